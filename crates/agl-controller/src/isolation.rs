//! Isolation of agents: what can be set, and what it means for one attempt. Nothing here touches the world; what does is
//! [`crate::supervisor::isolation`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use url::Url;

use crate::error::ControllerError;

/// Where an isolated agent finds the gateway, on its own loopback address.
pub const GATEWAY_PORT: u16 = 4477;
/// Where it finds a proxy that refuses everything.
pub const PROXY_PORT: u16 = 4478;
/// Its home, on its private `/tmp`: what programs leave there is no part of its work.
pub const HOME: &str = "/tmp/home";

/// What stands between an agent and the machine. The evaluator runs outside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Isolation {
    /// How agents are isolated.
    pub mode: Mode,
    /// What an agent may write beside its working folder, `/tmp` and `/var/tmp`. A device of the host is named here too.
    pub writable: Vec<PathBuf>,
    /// What an agent may read although it lies below something hidden, such as an agent's own files below `/tmp`.
    pub readable: Vec<PathBuf>,
    /// What an agent finds empty, beside `/run` and the controller's `work_dir`. `~/` is the home of the controller's
    /// user. What does not exist is no error.
    pub hidden: Vec<PathBuf>,
    /// How much memory an agent and all its processes get together.
    pub memory_limit_bytes: Option<u64>,
    /// How many processes and threads an agent gets.
    pub pids_limit: Option<u64>,
    /// Fails an attempt where the machine does not let us set its limits. Else the log says that there are none.
    pub require_limits: bool,
    /// How large `/tmp` can grow, and as much again `/var/tmp` and `/dev/shm`. They are in memory.
    pub tmp_limit_bytes: u64,
    /// Lets agents make user namespaces of their own, as browsers and some harnesses do for their sandboxes. It opens
    /// much of the kernel to them.
    pub nested_namespaces: bool,
}

/// How agents are isolated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// They are not.
    None,
    /// By Linux namespaces: no network but the gateway, nothing writable but their own folder, no processes but theirs.
    #[default]
    Namespaces,
}

/// Where people keep what opens other doors.
const SECRETS: [&str; 9] = [
    "~/.ssh",
    "~/.gnupg",
    "~/.aws",
    "~/.azure",
    "~/.config/gcloud",
    "~/.kube",
    "~/.docker",
    "~/.netrc",
    "~/.git-credentials",
];

impl Default for Isolation {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            writable: Vec::new(),
            readable: Vec::new(),
            hidden: SECRETS.map(PathBuf::from).to_vec(),
            memory_limit_bytes: None,
            pids_limit: None,
            require_limits: false,
            tmp_limit_bytes: 1024 * 1024 * 1024,
            nested_namespaces: false,
        }
    }
}

impl Isolation {
    /// Refuses values with which no agent would start. `agent_url` is the gateway as agents reach it.
    ///
    /// # Errors
    /// [`ControllerError::Config`], naming the key.
    pub fn check(&self, agent_url: &str) -> Result<(), ControllerError> {
        if self.mode == Mode::None {
            return Ok(());
        }
        let refuse = |key, value: &str, reason| Err(ControllerError::Config { key, value: value.to_owned(), reason });
        if let Err(reason) = Route::to(agent_url) {
            return refuse("agent_url", agent_url, reason);
        }
        if self.memory_limit_bytes == Some(0) {
            return refuse("isolation.memory_limit_bytes", "0", "no process fits into it; leave it out for no limit");
        }
        if self.pids_limit == Some(0) {
            return refuse("isolation.pids_limit", "0", "it must be at least 1; leave it out for no limit");
        }
        if self.tmp_limit_bytes == 0 {
            // To the kernel it means: no limit.
            return refuse("isolation.tmp_limit_bytes", "0", "it must be at least 1");
        }
        Ok(())
    }

    /// Makes relative paths absolute.
    pub fn anchor(&mut self, folder: &Path) {
        for path in self.writable.iter_mut().chain(&mut self.readable).chain(&mut self.hidden) {
            if !path.starts_with("~") {
                *path = folder.join(&*path);
            }
        }
    }
}

/// The one way out.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Route {
    /// Host and port of the gateway.
    gateway: String,
    /// The gateway's URL inside.
    inside: String,
}

impl Route {
    fn to(agent_url: &str) -> Result<Self, &'static str> {
        let url = Url::parse(agent_url).map_err(|_| "it is no URL")?;
        if url.scheme() != "http" {
            return Err(
                "isolated agents reach the gateway over plain http, through a relay on their own loopback address; give \
                        the gateway's http:// address as agent_url, or set isolation.mode = \"none\"",
            );
        }
        let (Some(host), Some(port)) = (url.host_str(), url.port_or_known_default()) else {
            return Err("it names no host");
        };
        let inside = format!("http://127.0.0.1:{GATEWAY_PORT}{}", url.path().trim_end_matches('/'));
        Ok(Self { gateway: format!("{host}:{port}"), inside })
    }
}

/// What a supervisor needs to know to isolate one agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enclosure {
    /// What is set.
    pub settings: Isolation,
    /// Host and port of the gateway: where the relay leads.
    pub gateway: String,
    /// The gateway's URL inside.
    pub inside_url: String,
    /// Where refused attempts to get out are reported.
    pub report: Report,
}

/// Where refused attempts to get out are reported: as events of the agent's own attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The gateway as it is reached from outside.
    pub gateway_url: String,
    /// The rollout.
    pub rollout_id: String,
    /// Its attempt.
    pub attempt_id: String,
    /// The agent's own key.
    pub key: String,
}

impl Enclosure {
    /// The enclosure of an agent; `None` where agents are not isolated.
    ///
    /// # Errors
    /// What is wrong with the gateway's URL in `report`.
    pub fn new(settings: Option<&Isolation>, report: Report) -> Result<Option<Self>, &'static str> {
        let Some(settings) = settings.filter(|settings| settings.mode != Mode::None) else { return Ok(None) };
        let Route { gateway, inside } = Route::to(&report.gateway_url)?;
        Ok(Some(Self { settings: settings.clone(), gateway, inside_url: inside, report }))
    }

    /// Adds what an isolated agent finds in its environment. What the rollout sets itself stays.
    pub fn furnish(&self, env: &mut BTreeMap<String, String>) {
        let proxy = format!("http://127.0.0.1:{PROXY_PORT}");
        let mut add = |name: &str, value: &str| {
            env.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        };
        for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"] {
            add(name, &proxy);
            add(&name.to_ascii_lowercase(), &proxy);
        }
        for name in ["NO_PROXY", "no_proxy"] {
            add(name, "127.0.0.1,localhost,::1");
        }
        add("HOME", HOME);
        add("TMPDIR", "/tmp");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enclosure(settings: Option<&Isolation>, url: &str) -> Result<Option<Enclosure>, &'static str> {
        let report = Report {
            gateway_url: url.to_owned(),
            rollout_id: "r".to_owned(),
            attempt_id: "0".to_owned(),
            key: "k".to_owned(),
        };
        Enclosure::new(settings, report)
    }

    #[test]
    fn an_empty_table_isolates_and_an_unknown_key_is_an_error() {
        let settings: Isolation = serde_json::from_str("{}").unwrap();
        assert_eq!(settings.mode, Mode::Namespaces);
        assert!(settings.hidden.contains(&PathBuf::from("~/.ssh")));
        let error = serde_json::from_str::<Isolation>(r#"{"writeable": []}"#).unwrap_err().to_string();
        assert!(error.contains("writeable"), "{error}");
    }

    #[test]
    fn the_url_inside_keeps_its_path_and_the_route_its_host_and_port() {
        let settings = Isolation::default();
        for (url, gateway, inside) in [
            ("http://gateway:8080", "gateway:8080", "http://127.0.0.1:4477"),
            ("http://10.0.0.7/agl/", "10.0.0.7:80", "http://127.0.0.1:4477/agl"),
            ("http://[::1]:9", "[::1]:9", "http://127.0.0.1:4477"),
        ] {
            let enclosure = enclosure(Some(&settings), url).unwrap().unwrap();
            assert_eq!((enclosure.gateway.as_str(), enclosure.inside_url.as_str()), (gateway, inside));
        }
        assert_eq!(enclosure(None, "https://x").unwrap(), None);
        let off = Isolation { mode: Mode::None, ..Isolation::default() };
        assert_eq!(enclosure(Some(&off), "https://x").unwrap(), None);
        off.check("https://x").unwrap();
    }

    #[test]
    fn an_https_gateway_and_limits_of_nothing_are_refused_by_name() {
        let message = Isolation::default().check("https://gateway.example").unwrap_err().to_string();
        assert!(message.contains("agent_url = https://gateway.example") && message.contains("plain http"), "{message}");
        let none = Isolation { pids_limit: Some(0), ..Isolation::default() };
        assert!(none.check("http://x").unwrap_err().to_string().contains("isolation.pids_limit = 0"));
    }

    #[test]
    fn what_a_rollout_sets_itself_stays() {
        let enclosure = enclosure(Some(&Isolation::default()), "http://x").unwrap().unwrap();
        let mut env = BTreeMap::from([("HOME".to_owned(), "/srv/agent".to_owned())]);
        enclosure.furnish(&mut env);
        assert_eq!((env["HOME"].as_str(), env["https_proxy"].as_str()), ("/srv/agent", "http://127.0.0.1:4478"));
    }

    #[test]
    fn relative_paths_are_anchored_and_homes_are_not() {
        let mut settings = Isolation { writable: vec!["data".into(), "/srv".into()], ..Isolation::default() };
        settings.anchor(Path::new("/run-folder"));
        assert_eq!(settings.writable, [PathBuf::from("/run-folder/data"), PathBuf::from("/srv")]);
        assert!(settings.hidden.contains(&PathBuf::from("~/.ssh")));
    }
}
