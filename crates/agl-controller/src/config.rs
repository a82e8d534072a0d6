//! What can be set.

use std::path::PathBuf;
use std::time::Duration;

use agl_core::rollout::{EvaluatorConfig, RolloutConfig};
use serde::{Deserialize, Serialize};

use crate::error::ControllerError;
use crate::isolation::{Isolation, Mode};
use crate::runner::container::ContainerSettings;
use crate::runner::kubernetes::KubernetesConfig;

/// How a controller runs rollouts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ControllerConfig {
    /// Where attempts run.
    pub runner: RunnerKind,
    /// How many attempts run at the same time. Default for processes and containers: twice the number of cores, as agents
    /// mostly wait for the model; for Kubernetes: no limit but its pace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_concurrent: Option<usize>,
    /// How many attempts a rollout gets when infrastructure fails them; a rollout's own `config.max_attempts` goes first.
    pub max_attempts: u32,
    /// Where working folders, logs and records of attempts lie. One controller each.
    pub work_dir: PathBuf,
    /// The gateway's address as agents see it. Default: the one that the controller uses.
    pub agent_url: Option<String>,
    /// Whether agents get the names that SDKs read by themselves (`OPENAI_BASE_URL`, …) beside the `AGL_*` ones.
    pub sdk_environment: bool,
    /// How long the folders of rollouts that have ended are kept; for good if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_folders_seconds: Option<f64>,
    /// How much is kept of each of an agent's two output streams: its head and its tail.
    pub log_limit_bytes: u64,
    /// How long a process that is to end has between SIGTERM and SIGKILL.
    pub kill_grace_seconds: f64,
    /// Wait before the second attempt; doubles with each further one.
    pub retry_backoff_seconds: f64,
    /// Longest wait between two attempts.
    pub retry_backoff_cap_seconds: f64,
    /// How often all that the gateway has is compared with all that the runner has, beside the stream of changes; 0 is never.
    pub resync_seconds: f64,
    /// The evaluator of rollouts that bring none of their own.
    pub evaluator: Option<EvaluatorConfig>,
    /// The Python that runs `config.local.agent_class`.
    pub python: String,
    /// What becomes of running attempts when the controller is told to end.
    pub on_shutdown: OnShutdown,
    /// Treats running attempts of other controllers as lost. For when one is gone for good, with its work directory.
    pub take_over: bool,
    /// How attempts run in containers, where `runner = "container"`.
    pub container: ContainerSettings,
    /// How attempts run on a cluster, where `runner = "kubernetes"`.
    pub kubernetes: KubernetesConfig,
    /// The program with the `supervise` subcommand. Default: this very program.
    pub supervisor: Option<PathBuf>,
    /// What stands between agents and this machine. Default: nothing.
    pub isolation: Option<Isolation>,
    /// Warm starts of Python agents. Default: none, every agent is a fresh interpreter.
    pub zygote: Option<ZygoteConfig>,
}

/// A Python that imports once and is forked for every attempt that is a command of the same Python.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZygoteConfig {
    /// The modules to import, in this order. None of them may leave a thread running.
    pub imports: Vec<String>,
    /// Folders where these are looked for before everywhere else. Agents do not get them into their own `sys.path`.
    #[serde(default)]
    pub path: Vec<PathBuf>,
    /// The Python. Default: the controller's `python`.
    #[serde(default)]
    pub python: Option<String>,
    /// How long the imports may take; attempts wait for them. After that every start is a cold one.
    #[serde(default = "ready_seconds")]
    pub ready_seconds: f64,
}

fn ready_seconds() -> f64 {
    30.0
}

/// Where attempts run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunnerKind {
    /// Processes of this host: rollouts with `config.process` or `config.local`.
    #[default]
    Process,
    /// Containers of Docker or Podman on this host: rollouts with `config.container`.
    Container,
    /// Jobs of a Kubernetes cluster: rollouts with `config.k8s`.
    Kubernetes,
}

/// What becomes of running attempts when the controller is told to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnShutdown {
    /// They are killed (Jobs of a cluster go on even then) and count as infrastructure failures that cost no attempt; their rollouts stay `running`, and the
    /// next controller makes new attempts.
    #[default]
    Kill,
    /// They go on under their supervisors; the next controller takes them up.
    Leave,
}

impl Default for ControllerConfig {
    fn default() -> Self {
        Self {
            runner: RunnerKind::default(),
            max_concurrent: None,
            max_attempts: 3,
            work_dir: PathBuf::from("runs/controller"),
            agent_url: None,
            keep_folders_seconds: None,
            sdk_environment: true,
            log_limit_bytes: 4 * 1024 * 1024,
            kill_grace_seconds: 5.0,
            retry_backoff_seconds: 1.0,
            retry_backoff_cap_seconds: 30.0,
            resync_seconds: 300.0,
            evaluator: None,
            python: "python3".to_owned(),
            on_shutdown: OnShutdown::default(),
            take_over: false,
            container: ContainerSettings::default(),
            kubernetes: KubernetesConfig::default(),
            supervisor: None,
            zygote: None,
            isolation: None,
        }
    }
}

impl ControllerConfig {
    /// Refuses values that would make the controller wait for ever or never start anything.
    ///
    /// # Errors
    /// [`ControllerError::Config`], naming the key.
    pub fn check(&self) -> Result<(), ControllerError> {
        let refuse = |key, value: String, reason| Err(ControllerError::Config { key, value, reason });
        if self.max_concurrent == Some(0) {
            return refuse("max_concurrent", "0".to_owned(), "it must be at least 1");
        }
        if self.max_attempts == 0 {
            return refuse("max_attempts", "0".to_owned(), "it must be at least 1");
        }
        let kubernetes = &self.kubernetes;
        for (key, value) in [
            ("kubernetes.max_jobs_per_minute", kubernetes.max_jobs_per_minute),
            ("kubernetes.job_burst", kubernetes.job_burst),
        ] {
            if value == 0 {
                return refuse(key, "0".to_owned(), "it must be at least 1");
            }
        }
        for (key, value) in [
            ("kubernetes.namespace", &kubernetes.namespace),
            ("kubernetes.instance", &kubernetes.instance),
            ("kubernetes.lease_name", &kubernetes.lease_name),
        ] {
            if value.is_empty() {
                return refuse(key, "\"\"".to_owned(), "it must not be empty");
            }
        }
        for (key, value) in [
            ("kubernetes.start_timeout_seconds", kubernetes.start_timeout_seconds),
            ("kubernetes.image_pull_grace_seconds", kubernetes.image_pull_grace_seconds),
            ("container.pull_timeout_seconds", self.container.pull_timeout_seconds),
            ("container.cpus", self.container.cpus),
            ("kill_grace_seconds", self.kill_grace_seconds),
            ("retry_backoff_seconds", self.retry_backoff_seconds),
            ("retry_backoff_cap_seconds", self.retry_backoff_cap_seconds),
            ("resync_seconds", self.resync_seconds),
            ("keep_folders_seconds", self.keep_folders_seconds.unwrap_or(0.0)),
        ] {
            if !value.is_finite() || value < 0.0 {
                return refuse(key, value.to_string(), "it must be a number, 0 or more");
            }
        }
        let isolated = self.isolation.as_ref().is_some_and(|isolation| isolation.mode != Mode::None);
        if isolated && self.zygote.is_some() {
            let reason = "a forked agent cannot be put behind walls: remove controller.zygote or controller.isolation";
            return refuse("zygote", "{…}".to_owned(), reason);
        }
        if self.runner != RunnerKind::Process && (isolated || self.zygote.is_some()) {
            let key = if isolated { "isolation" } else { "zygote" };
            return refuse(key, "{…}".to_owned(), "it is for runner = \"process\"");
        }
        if let Some(zygote) = &self.zygote {
            // They become fields between zero bytes, and an import of nothing is a mistake.
            if let Some(name) = zygote.imports.iter().find(|name| name.is_empty() || name.contains('\0')) {
                return refuse("zygote.imports", format!("{name:?}"), "each must be the name of a module");
            }
            if !zygote.ready_seconds.is_finite() || zygote.ready_seconds <= 0.0 {
                let value = zygote.ready_seconds.to_string();
                return refuse("zygote.ready_seconds", value, "it must be a number of seconds above 0");
            }
        }
        Ok(())
    }

    /// The evaluator of a rollout: its own, or the one of those that bring none.
    #[must_use]
    pub fn evaluator_of<'a>(&'a self, rollout: &'a RolloutConfig) -> Option<&'a EvaluatorConfig> {
        rollout.evaluator.as_ref().or(self.evaluator.as_ref())
    }

    /// The gateway as agents reach it; `gateway_url` is how we do. Without a trailing slash.
    #[must_use]
    pub fn url_for_agents<'a>(&'a self, gateway_url: &'a str) -> &'a str {
        self.agent_url.as_deref().unwrap_or(gateway_url).trim_end_matches('/')
    }

    /// How long to wait before another attempt when `failed` ones have failed.
    #[must_use]
    pub fn backoff(&self, failed: u32) -> Duration {
        let doublings = i32::try_from(failed.saturating_sub(1).min(30)).unwrap_or(30);
        Duration::from_secs_f64(
            (self.retry_backoff_seconds * 2_f64.powi(doublings)).min(self.retry_backoff_cap_seconds),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_key_is_an_error_that_names_it() {
        let error = serde_json::from_str::<ControllerConfig>(r#"{"max_concurent": 4}"#).unwrap_err().to_string();
        assert!(error.contains("max_concurent"), "{error}");
    }

    #[test]
    fn values_that_would_stop_everything_are_refused() {
        let config = ControllerConfig { max_concurrent: Some(0), ..ControllerConfig::default() };
        assert!(config.check().unwrap_err().to_string().contains("max_concurrent = 0"));
        let config = ControllerConfig { kill_grace_seconds: f64::NAN, ..ControllerConfig::default() };
        assert!(config.check().unwrap_err().to_string().contains("kill_grace_seconds"));
    }

    #[test]
    fn a_zygote_needs_its_imports_and_knows_its_keys() {
        let parse = |text: &str| serde_json::from_str::<ControllerConfig>(text);
        let zygote = parse(r#"{"zygote": {"imports": ["openai"]}}"#).unwrap().zygote.unwrap();
        assert_eq!((zygote.imports, zygote.python, zygote.ready_seconds), (vec!["openai".to_owned()], None, 30.0));
        assert!(parse(r#"{"zygote": {}}"#).unwrap_err().to_string().contains("imports"));
        assert!(parse(r#"{"zygote": {"imports": [], "pyhton": "x"}}"#).unwrap_err().to_string().contains("pyhton"));
        let config = parse(r#"{"zygote": {"imports": [""]}}"#).unwrap();
        assert!(config.check().unwrap_err().to_string().contains("zygote.imports"));
        let config = parse(r#"{"zygote": {"imports": [], "ready_seconds": 0}}"#).unwrap();
        assert!(config.check().unwrap_err().to_string().contains("zygote.ready_seconds"));
    }

    #[test]
    fn walls_and_warm_starts_exclude_each_other_and_are_for_processes() {
        let check =
            |text: &str| serde_json::from_str::<ControllerConfig>(text).unwrap().check().map_err(|it| it.to_string());
        let both = check(r#"{"zygote": {"imports": []}, "isolation": {}}"#).unwrap_err();
        assert!(both.contains("controller.zygote") && both.contains("controller.isolation"), "{both}");
        assert!(check(r#"{"zygote": {"imports": []}, "isolation": {"mode": "none"}}"#).is_ok());
        let elsewhere = check(r#"{"runner": "kubernetes", "isolation": {}}"#).unwrap_err();
        assert!(elsewhere.contains("isolation") && elsewhere.contains("process"), "{elsewhere}");
    }

    #[test]
    fn waits_between_attempts_double_up_to_the_cap() {
        let config = ControllerConfig { retry_backoff_cap_seconds: 3.0, ..ControllerConfig::default() };
        let waits: Vec<f64> = (1..5).map(|failed| config.backoff(failed).as_secs_f64()).collect();
        assert_eq!(waits, [1.0, 2.0, 3.0, 3.0]);
    }
}
