//! An attempt as what the engine is asked to make. Nothing here touches the world.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use agl_core::rollout::ContainerMount;
use bollard::models::{
    ContainerCreateBody, HostConfig, HostConfigLogConfig, ImageConfig, Mount, MountType, RestartPolicy,
    RestartPolicyNameEnum,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::relay::{self, TOKEN, Way};
use super::settings::{ContainerSettings, Pull};
use crate::config::ControllerConfig;
use crate::launch::{Launch, LaunchError};
use crate::runner::names::{ATTEMPT_ID, INSTANCE, MANAGED_BY, ROLE, ROLLOUT_ID, job_name};
use crate::runner::{Host, Order};
use crate::work_dir::AttemptDir;

/// The attempt's folder as containers see it.
const INSIDE: &str = "/agl";
/// Of what a container writes the engine keeps this many times `log_limit_bytes`; we read it as it is written.
const LOG_ROOM: u64 = 4;

/// A container that is to be made.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) name: String,
    pub(super) image: String,
    pub(super) pull: Pull,
    /// In place of the image's own; the image's command is then left out.
    entrypoint: Option<Vec<String>>,
    argv: Option<Vec<String>>,
    env: BTreeMap<String, String>,
    cwd: String,
    user: Option<String>,
    pub(super) mounts: Vec<ContainerMount>,
    labels: HashMap<String, String>,
    /// How it reaches the gateway, where it has no network.
    way: Option<Way>,
    log_limit_bytes: u64,
    /// Wall-clock limit; `None` is none.
    pub(super) limit: Option<Duration>,
    /// What the relay puts before its reason where the program cannot be started.
    pub(super) token: String,
}

/// The name of an attempt's container.
pub(super) fn agent_name(rollout_id: &str, attempt_id: &str) -> String {
    job_name(rollout_id, attempt_id)
}

/// The name of its evaluator's. No attempt's own name holds a dot.
pub(super) fn evaluator_name(rollout_id: &str, attempt_id: &str) -> String {
    format!("{}.evaluator", job_name(rollout_id, attempt_id))
}

/// The labels by which a controller finds its own.
pub(super) fn selector(instance: &str) -> Vec<String> {
    vec![format!("{MANAGED_BY}=agl"), format!("{INSTANCE}={instance}")]
}

/// What plans are made from.
pub(super) struct Draft<'a> {
    pub(super) config: &'a ControllerConfig,
    pub(super) instance: &'a str,
    pub(super) host: &'a Host,
    pub(super) order: &'a Order,
    /// The gateway as containers reach it.
    pub(super) inside_url: &'a str,
    /// The attempt's folder on this host.
    pub(super) dir: &'a AttemptDir,
    pub(super) way: Option<Way>,
}

impl Draft<'_> {
    /// The agent's container.
    ///
    /// # Errors
    /// [`LaunchError`], written for whoever configured the rollout.
    pub(super) fn agent(self) -> Result<Plan, LaunchError> {
        let inside = AttemptDir::new(PathBuf::from(INSIDE));
        let container = self.launch(&inside).container(self.config)?;
        let mut mounts = self.mounts(&[(self.dir.input(), inside.input())]);
        mounts.extend(container.mounts.iter().cloned());
        Ok(Plan {
            name: agent_name(&self.order.rollout.rollout_id, &self.order.attempt_id),
            image: container.image,
            pull: self.config.container.pull,
            entrypoint: container.entrypoint,
            argv: container.argv,
            env: container.env,
            cwd: container.cwd.unwrap_or_else(|| text(&inside.work())),
            user: container.user.or_else(|| self.config.container.user.clone()),
            mounts,
            labels: self.labels("agent"),
            log_limit_bytes: self.config.log_limit_bytes,
            limit: limit(self.order.rollout.config.timeout_seconds),
            token: token(self.order),
            way: self.way,
        })
    }

    /// The evaluator's container, for an agent that exited with `exit_code`: another one of the same image, as the same
    /// user, with the same mounts, and with what the agent wrote. `image` is what the agent's container was made of.
    ///
    /// # Errors
    /// [`LaunchError`], written for whoever configured the rollout.
    pub(super) fn evaluator(self, exit_code: Option<i32>, image: Option<String>) -> Result<Option<Plan>, LaunchError> {
        let inside = AttemptDir::new(PathBuf::from(INSIDE));
        let launch = self.launch(&inside);
        let container = launch.container(self.config)?;
        let Some(spec) = launch.evaluation(self.config, exit_code)? else { return Ok(None) };
        let mut mounts = self.mounts(&[
            (self.dir.input(), inside.evaluation().input()),
            (self.dir.stdout(), inside.stdout()),
            (self.dir.stderr(), inside.stderr()),
        ]);
        mounts.extend(container.mounts.iter().cloned());
        Ok(Some(Plan {
            name: evaluator_name(&self.order.rollout.rollout_id, &self.order.attempt_id),
            image: image.unwrap_or(container.image),
            // It was there a moment ago, and a newer one is another.
            pull: if self.config.container.pull == Pull::Never { Pull::Never } else { Pull::Missing },
            entrypoint: Some(Vec::new()),
            argv: Some(spec.agent.argv),
            env: spec.agent.env,
            cwd: container.cwd.unwrap_or_else(|| text(&inside.work())),
            user: container.user.or_else(|| self.config.container.user.clone()),
            mounts,
            labels: self.labels("evaluator"),
            log_limit_bytes: self.config.log_limit_bytes,
            limit: limit(spec.agent.timeout_seconds),
            token: token(self.order),
            way: self.way,
        }))
    }

    fn launch<'b>(&'b self, inside: &'b AttemptDir) -> Launch<'b> {
        Launch { agent_url: self.inside_url, ..Launch::new(self.order, inside, self.host) }
    }

    /// The working folder, which may be written, and `files`, which may not.
    fn mounts(&self, files: &[(PathBuf, PathBuf)]) -> Vec<ContainerMount> {
        let inside = AttemptDir::new(PathBuf::from(INSIDE));
        let mount = |source: &Path, target: &Path, writable| ContainerMount {
            source: text(source),
            target: text(target),
            writable,
        };
        let mut mounts = vec![mount(&self.dir.work(), &inside.work(), true)];
        mounts.extend(files.iter().map(|(source, target)| mount(source, target, false)));
        mounts.extend(self.way.iter().map(|way| mount(&way.folder, Path::new(relay::INSIDE), false)));
        mounts
    }

    fn labels(&self, role: &str) -> HashMap<String, String> {
        let labels = [
            (MANAGED_BY, "agl"),
            (INSTANCE, self.instance),
            (ROLLOUT_ID, &self.order.rollout.rollout_id),
            (ATTEMPT_ID, &self.order.attempt_id),
            (ROLE, role),
        ];
        labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into_iter().collect()
    }
}

impl Plan {
    /// What tells whose it is.
    pub(super) fn labels(&self) -> &HashMap<String, String> {
        &self.labels
    }

    /// What the engine is asked to make of an image.
    ///
    /// # Errors
    /// [`LaunchError::NoProgram`] where neither the rollout nor the image says what to run.
    pub(super) fn body(
        &self,
        image: &ImageConfig,
        settings: &ContainerSettings,
    ) -> Result<ContainerCreateBody, LaunchError> {
        let mut command = self.command(image)?;
        let mut env = self.env.clone();
        if let Some(way) = &self.way {
            env.insert(TOKEN.to_owned(), self.token.clone());
            command = way.command.iter().cloned().chain(command).collect();
        }
        let program: Vec<String> = command.drain(..1).collect();
        Ok(ContainerCreateBody {
            image: Some(self.image.clone()),
            entrypoint: Some(program),
            cmd: Some(command),
            env: Some(env.iter().map(|(name, value)| format!("{name}={value}")).collect()),
            working_dir: Some(self.cwd.clone()),
            user: self.user.clone(),
            labels: Some(self.labels.clone()),
            tty: Some(false),
            open_stdin: Some(false),
            host_config: Some(self.walls(settings)),
            ..ContainerCreateBody::default()
        })
    }

    /// The same for a person, before anybody has looked at the image. `null` is what the image says.
    pub(super) fn shown(&self, settings: &ContainerSettings) -> Value {
        json!({
            "container": self.name, "image": self.image, "entrypoint": self.entrypoint, "argv": self.argv, "env": self.env,
            "cwd": self.cwd, "user": self.user, "host_config": self.walls(settings),
        })
    }

    /// As `docker run` puts it together.
    fn command(&self, image: &ImageConfig) -> Result<Vec<String>, LaunchError> {
        let own = |words: &Option<Vec<String>>| words.clone().unwrap_or_default();
        let (program, arguments) = match (&self.entrypoint, &self.argv) {
            (Some(entrypoint), argv) => (entrypoint.clone(), own(argv)),
            (None, Some(argv)) => (own(&image.entrypoint), argv.clone()),
            (None, None) => (own(&image.entrypoint), own(&image.cmd)),
        };
        let command: Vec<String> = program.into_iter().chain(arguments).collect();
        match command.first() {
            Some(program) if !program.is_empty() => Ok(command),
            _ => Err(LaunchError::NoProgram { key: "config.container.argv" }),
        }
    }

    /// What stands between the container and the host.
    fn walls(&self, settings: &ContainerSettings) -> HostConfig {
        let limit = |value: u64| i64::try_from(value).ok().filter(|value| *value > 0);
        let memory = limit(settings.memory_bytes);
        let network = if settings.is_relayed() { "none" } else { &settings.network };
        let tmpfs = settings.tmpfs.iter().map(|folder| match folder.split_once(':') {
            Some((path, options)) => (path.to_owned(), options.to_owned()),
            None => (folder.clone(), String::new()),
        });
        let no_new_privileges = "no-new-privileges".to_owned();
        let log =
            [("max-size", (self.log_limit_bytes.max(1 << 20) * LOG_ROOM).to_string()), ("max-file", "2".to_owned())];
        HostConfig {
            network_mode: Some(network.to_owned()),
            extra_hosts: Some(settings.extra_hosts.clone()).filter(|hosts| !hosts.is_empty()),
            readonly_rootfs: Some(settings.read_only_root),
            tmpfs: Some(tmpfs.collect()),
            mounts: Some(self.mounts.iter().map(bind).collect()),
            memory,
            // Equal to the memory: no swap.
            memory_swap: memory,
            #[expect(clippy::cast_possible_truncation, reason = "a number of processors")]
            nano_cpus: Some((settings.cpus * 1e9) as i64).filter(|cpus| *cpus > 0),
            pids_limit: limit(u64::from(settings.pids_limit)),
            privileged: Some(false),
            cap_drop: Some(vec!["ALL".to_owned()]),
            cap_add: Some(settings.cap_add.clone()).filter(|added| !added.is_empty()),
            security_opt: Some([no_new_privileges].into_iter().chain(settings.security_opt.clone()).collect()),
            runtime: settings.runtime.clone(),
            auto_remove: Some(false),
            restart_policy: Some(RestartPolicy { name: Some(RestartPolicyNameEnum::NO), maximum_retry_count: None }),
            log_config: Some(HostConfigLogConfig {
                typ: Some("json-file".to_owned()),
                config: Some(log.map(|(name, value)| (name.to_owned(), value)).into_iter().collect()),
            }),
            ..HostConfig::default()
        }
    }
}

/// A mount whose source must exist: an engine that is elsewhere says so instead of making an empty folder.
fn bind(mount: &ContainerMount) -> Mount {
    Mount {
        typ: Some(MountType::BIND),
        source: Some(mount.source.clone()),
        target: Some(mount.target.clone()),
        read_only: Some(!mount.writable),
        ..Mount::default()
    }
}

fn limit(seconds: u64) -> Option<Duration> {
    (seconds > 0).then(|| Duration::from_secs(seconds))
}

/// Nobody inside knows it before the relay says it: it follows from the evaluator's key.
fn token(order: &Order) -> String {
    let digest = Sha256::digest(format!("relay {}", order.reward_key));
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Option<Vec<String>> {
        Some(words.iter().map(|word| (*word).to_owned()).collect())
    }

    fn plan(entrypoint: Option<Vec<String>>, argv: Option<Vec<String>>) -> Plan {
        Plan {
            name: "agl-rollout-r".to_owned(),
            image: "agent:1".to_owned(),
            pull: Pull::Never,
            entrypoint,
            argv,
            env: BTreeMap::new(),
            cwd: "/agl/work".to_owned(),
            user: None,
            mounts: Vec::new(),
            labels: HashMap::new(),
            way: None,
            log_limit_bytes: 0,
            limit: None,
            token: String::new(),
        }
    }

    #[test]
    fn entrypoint_and_command_are_put_together_as_docker_does() {
        let image = ImageConfig { entrypoint: words(&["run"]), cmd: words(&["all"]), ..ImageConfig::default() };
        for (entrypoint, argv, expected) in [
            (None, None, words(&["run", "all"])),
            (None, words(&["one"]), words(&["run", "one"])),
            (words(&["sh"]), None, words(&["sh"])),
            (words(&["sh"]), words(&["-c"]), words(&["sh", "-c"])),
            (words(&[]), words(&["agent"]), words(&["agent"])),
            (words(&[]), None, None),
            (words(&[]), words(&[""]), None),
        ] {
            let command = plan(entrypoint.clone(), argv.clone()).command(&image).ok();
            assert_eq!(command, expected, "{entrypoint:?} {argv:?}");
        }
    }

    #[test]
    fn limits_of_zero_are_none() {
        let settings = ContainerSettings { memory_bytes: 0, pids_limit: 0, cpus: 1.5, ..ContainerSettings::default() };
        let walls = plan(None, None).walls(&settings);
        assert_eq!((walls.memory, walls.pids_limit, walls.nano_cpus), (None, None, Some(1_500_000_000)));
        let walls = plan(None, None).walls(&ContainerSettings::default());
        assert_eq!((walls.memory, walls.memory_swap), (Some(4 << 30), Some(4 << 30)));
        assert_eq!(walls.nano_cpus, None);
    }

    #[test]
    fn the_names_of_evaluators_are_no_attempts() {
        assert_eq!(evaluator_name("x", "0"), "agl-rollout-x.evaluator");
        assert_ne!(agent_name("x.evaluator", "0"), evaluator_name("x", "0"));
    }
}
