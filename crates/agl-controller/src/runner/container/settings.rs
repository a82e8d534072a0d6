//! How containers are run, as it is configured. Pure.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// How a controller runs rollouts in containers: `[controller.container]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ContainerSettings {
    /// The engine: `unix:///path`, a path, or `tcp://host:port`. Default: `DOCKER_HOST`, else the first of Docker's socket and
    /// Podman's that is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// When images are fetched.
    pub pull: Pull,
    /// How long an image may take, or its registry be away, before the attempt counts as infrastructure's failure.
    pub pull_timeout_seconds: f64,
    /// `gateway`: no network, and a relay that leads to the gateway alone. Anything else is a network of the engine by its name.
    pub network: String,
    /// The program that is the relay inside containers. Default: this very program, with its loader and libraries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relay: Option<PathBuf>,
    /// The memory of a container, swap included; 0 is no limit.
    pub memory_bytes: u64,
    /// The processors of a container; 0 is no limit.
    pub cpus: f64,
    /// How many processes and threads a container may have; 0 is no limit.
    pub pids_limit: u32,
    /// Whether all but `tmpfs` and the working folder is read-only.
    pub read_only_root: bool,
    /// Folders in memory, `PATH` or `PATH:OPTIONS`; of each container alone.
    pub tmpfs: Vec<String>,
    /// Capabilities that are left to a container; all others are dropped.
    pub cap_add: Vec<String>,
    /// Security options beside `no-new-privileges`.
    pub security_opt: Vec<String>,
    /// Further lines of `/etc/hosts`: `name:address`.
    pub extra_hosts: Vec<String>,
    /// The engine's runtime. Default: the engine's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime: Option<String>,
    /// Who containers run as where `config.container.user` does not say. Default: as their image says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Whether containers that have ended are left for people to look at.
    pub keep_containers: bool,
}

/// When images are fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pull {
    /// When they are not there.
    #[default]
    Missing,
    /// For each attempt.
    Always,
    /// Not by us.
    Never,
}

/// The network that has no way out but the relay.
const GATEWAY: &str = "gateway";

impl Default for ContainerSettings {
    fn default() -> Self {
        Self {
            host: None,
            pull: Pull::default(),
            pull_timeout_seconds: 600.0,
            network: GATEWAY.to_owned(),
            relay: None,
            memory_bytes: 4 * 1024 * 1024 * 1024,
            cpus: 0.0,
            pids_limit: 1024,
            read_only_root: true,
            // Engines mount such folders noexec by themselves, and build tools run what they make there.
            tmpfs: vec!["/tmp:rw,exec,nosuid,nodev,mode=1777".to_owned()],
            cap_add: Vec::new(),
            security_opt: Vec::new(),
            extra_hosts: Vec::new(),
            runtime: None,
            user: None,
            keep_containers: false,
        }
    }
}

impl ContainerSettings {
    /// True where containers have no network and the relay leads to the gateway.
    #[must_use]
    pub fn is_relayed(&self) -> bool {
        self.network == GATEWAY
    }
}
