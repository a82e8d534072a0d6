//! A rollout is one execution of an agent on one task. It is created `queuing`, a controller runs it as one or more
//! attempts, and it ends `succeeded` or `failed` for ever: a terminal rollout is never reopened.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::attempt::FIRST_ATTEMPT_ID;

/// Where a rollout is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RolloutState {
    /// Waits for a controller.
    Queuing,
    /// An attempt is being made.
    Running,
    /// The agent ended well. Says nothing about the reward.
    Succeeded,
    /// The agent failed, ran out of time, was cancelled, or its infrastructure stayed dead.
    Failed,
}

impl RolloutState {
    /// All states, in the order a rollout passes them.
    pub const ALL: [Self; 4] = [Self::Queuing, Self::Running, Self::Succeeded, Self::Failed];

    /// True for the two states nothing leads out of.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }

    /// True where `queuing → {running, failed}` or `running → {succeeded, failed}`. A step to the same state is illegal.
    #[must_use]
    pub fn may_become(self, next: Self) -> bool {
        matches!(
            (self, next),
            (Self::Queuing, Self::Running | Self::Failed) | (Self::Running, Self::Succeeded | Self::Failed)
        )
    }

    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queuing => "queuing",
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
        }
    }

    /// The state of that name on the wire.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == name)
    }
}

impl std::fmt::Display for RolloutState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One execution of an agent on one task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rollout {
    /// Unique for ever; chosen by the caller or by the gateway.
    pub rollout_id: String,
    /// One row of the data set, handed to the agent as it is.
    pub input: Value,
    /// Train or validation: decides the proxy mode and the temperature.
    #[serde(default = "yes")]
    pub is_train: bool,
    /// What the controller runs.
    #[serde(default)]
    pub config: RolloutConfig,
    /// What the trainer wants to find again: group, sample index, step, seed. Unknown keys are kept.
    #[serde(default)]
    pub metadata: Map<String, Value>,
    /// Where it stands.
    pub status: RolloutStatus,
    /// The terminal rollout that this one repeats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_of: Option<String>,
    /// Set once the checkpoint that trained on this rollout is on disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consumed: Option<Consumed>,
}

/// The mark that a rollout has been trained on by a checkpoint that is on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Consumed {
    /// The run whose checkpoint it is.
    pub run_id: String,
    /// The training step of that checkpoint.
    pub step: u64,
}

/// What a caller says to create a rollout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RolloutCreate {
    /// See [`Rollout::input`].
    pub input: Value,
    /// See [`Rollout::is_train`].
    #[serde(default = "yes")]
    pub is_train: bool,
    /// See [`Rollout::config`].
    #[serde(default)]
    pub config: Option<RolloutConfig>,
    /// See [`Rollout::metadata`].
    #[serde(default)]
    pub metadata: Option<Map<String, Value>>,
    /// A caller-supplied id makes creation idempotent: a known id returns the existing rollout untouched.
    #[serde(default)]
    pub rollout_id: Option<String>,
    /// See [`Rollout::retry_of`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_of: Option<String>,
}

fn yes() -> bool {
    true
}

/// How the controller runs a rollout. Exactly one of `process`, `local`, `container` and `k8s` is used, as the runner asks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RolloutConfig {
    /// Wall-clock limit of one attempt's agent, in seconds.
    #[serde(default = "default_timeout_seconds")]
    pub timeout_seconds: u64,
    /// A Python class of an installed package (Agent Lightning's local runner).
    #[serde(default)]
    pub local: Option<LocalConfig>,
    /// A Kubernetes Job (Agent Lightning's cluster runner).
    #[serde(default)]
    pub k8s: Option<K8sConfig>,
    /// Any command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessConfig>,
    /// A container of Docker or Podman.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<ContainerConfig>,
    /// Runs after the agent has stopped and posts the reward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluator: Option<EvaluatorConfig>,
    /// `"evaluator"`: only the evaluator's key may post the reward. Absent: the agent may too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward_source: Option<RewardSource>,
    /// How many attempts infrastructure failures may cost before the rollout fails. Absent: the controller's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_attempts: Option<u32>,
    /// Keys that a newer client knows and we do not: kept and given back.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Default for RolloutConfig {
    fn default() -> Self {
        Self {
            timeout_seconds: default_timeout_seconds(),
            local: None,
            k8s: None,
            process: None,
            container: None,
            evaluator: None,
            reward_source: None,
            max_attempts: None,
            extra: Map::new(),
        }
    }
}

fn default_timeout_seconds() -> u64 {
    3600
}

/// Who may post a rollout's reward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RewardSource {
    /// The agent and the evaluator.
    Agent,
    /// The evaluator alone.
    Evaluator,
}

/// `config.local`: a Python class with a `run()` method, as Agent Lightning v1.0 starts it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LocalConfig {
    /// `package.module:Class` or `package.module.Class`.
    #[serde(default)]
    pub agent_class: Option<String>,
    /// Environment variable → `input`, `input.path.to.value`, or a literal.
    #[serde(default)]
    pub env_map: std::collections::BTreeMap<String, String>,
}

/// `config.k8s`: a Job template.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct K8sConfig {
    /// Jinja source of a Job manifest.
    #[serde(default)]
    pub job_template: Option<String>,
}

/// `config.process`: any command. Every string is a Jinja template over `input`, `rollout_id`, `attempt_id`, `is_train` and `metadata`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessConfig {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Added to the controller's environment.
    #[serde(default)]
    pub env: std::collections::BTreeMap<String, String>,
    /// Working directory; a fresh one for each attempt when absent.
    #[serde(default)]
    pub cwd: Option<String>,
}

/// `config.container`: a container of an image. Every string is a template as in [`ProcessConfig`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContainerConfig {
    /// The image, as `docker run` takes it.
    pub image: String,
    /// What the image's entrypoint gets, or what runs where it has none. The image's own command when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    /// In place of the image's entrypoint; empty is none. The image's own command is then left out too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrypoint: Option<Vec<String>>,
    /// Added to the image's environment.
    #[serde(default)]
    pub env: std::collections::BTreeMap<String, String>,
    /// Working directory inside; the attempt's fresh folder when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User, or user and group, that it runs as: `1000:1000`. The controller's choice, or the image's, when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Files and folders of the host that it sees.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<ContainerMount>,
}

/// A file or folder of the host inside a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContainerMount {
    /// Where it is on the host. It must exist.
    pub source: String,
    /// Where it is inside.
    pub target: String,
    /// Whether it may be written. It may not when absent.
    #[serde(default)]
    pub writable: bool,
}

/// `config.evaluator`: a command that judges what the agent left and posts the reward.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluatorConfig {
    /// The program and its arguments; templates as in [`ProcessConfig`].
    pub argv: Vec<String>,
    /// Added to the controller's environment.
    #[serde(default)]
    pub env: std::collections::BTreeMap<String, String>,
    /// Wall-clock limit in seconds.
    #[serde(default = "default_evaluator_timeout")]
    pub timeout_seconds: u64,
}

fn default_evaluator_timeout() -> u64 {
    600
}

/// The part of a rollout that changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RolloutStatus {
    /// See [`RolloutState`].
    #[serde(default = "queuing")]
    pub state: RolloutState,
    /// Set by the Kubernetes runner.
    #[serde(default)]
    pub k8s_job_name: Option<String>,
    /// The attempt that counts.
    #[serde(default)]
    pub last_attempt_id: Option<String>,
    /// Why it failed, for a person.
    #[serde(default)]
    pub error_message: Option<String>,
    /// Counts the patches, from 1.
    #[serde(default = "one")]
    pub version: u64,
    /// Seconds since the epoch.
    pub created_at: f64,
    /// Seconds since the epoch.
    pub updated_at: f64,
}

fn queuing() -> RolloutState {
    RolloutState::Queuing
}

fn one() -> u64 {
    1
}

/// A change of a rollout's status. Absent keys stay as they are; unknown keys are an error.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StatusPatch {
    /// The next state; must be a legal transition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<RolloutState>,
    /// See [`RolloutStatus::k8s_job_name`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub k8s_job_name: Option<String>,
    /// See [`RolloutStatus::last_attempt_id`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_attempt_id: Option<String>,
    /// See [`RolloutStatus::error_message`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_message: Option<String>,
}

impl StatusPatch {
    /// True if nothing would change; such a patch is answered with the rollout as it is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A transition that the state machine refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Rollout {rollout_id}: cannot transition {from} -> {to}")]
pub struct IllegalTransition {
    /// Whose.
    pub rollout_id: String,
    /// Where it is.
    pub from: String,
    /// Where it was asked to go.
    pub to: String,
}

impl Rollout {
    /// A new rollout, `queuing`. `rollout_id` is the caller's or a fresh one; `now` in seconds since the epoch.
    #[must_use]
    pub fn new(create: RolloutCreate, rollout_id: String, now: f64) -> Self {
        Self {
            rollout_id,
            input: create.input,
            is_train: create.is_train,
            config: create.config.unwrap_or_default(),
            metadata: create.metadata.unwrap_or_default(),
            status: RolloutStatus {
                state: RolloutState::Queuing,
                k8s_job_name: None,
                last_attempt_id: None,
                error_message: None,
                version: 1,
                created_at: now,
                updated_at: now,
            },
            retry_of: create.retry_of,
            consumed: None,
        }
    }

    /// Applies a patch, or says why it may not be applied and changes nothing.
    ///
    /// # Errors
    /// [`IllegalTransition`] where the patch names a state that [`RolloutState::may_become`] refuses.
    pub fn apply(&mut self, patch: &StatusPatch, now: f64) -> Result<(), IllegalTransition> {
        if patch.is_empty() {
            return Ok(());
        }
        if let Some(next) = patch.state {
            if !self.status.state.may_become(next) {
                return Err(IllegalTransition {
                    rollout_id: self.rollout_id.clone(),
                    from: self.status.state.to_string(),
                    to: next.to_string(),
                });
            }
            self.status.state = next;
        } else if self.status.state.is_terminal()
            && patch.last_attempt_id.is_some()
            && patch.last_attempt_id != self.status.last_attempt_id
        {
            // What a rollout came to is what its last attempt did: nobody changes that afterwards.
            return Err(IllegalTransition {
                rollout_id: self.rollout_id.clone(),
                from: self.status.state.to_string(),
                to: "another attempt".to_owned(),
            });
        }
        for (slot, value) in [
            (&mut self.status.k8s_job_name, &patch.k8s_job_name),
            (&mut self.status.last_attempt_id, &patch.last_attempt_id),
            (&mut self.status.error_message, &patch.error_message),
        ] {
            if value.is_some() {
                slot.clone_from(value);
            }
        }
        self.status.version += 1;
        self.status.updated_at = now;
        Ok(())
    }

    /// The attempt whose events and sequences count.
    #[must_use]
    pub fn current_attempt(&self) -> &str {
        self.status.last_attempt_id.as_deref().unwrap_or(FIRST_ATTEMPT_ID)
    }

    /// The task's own id (`input.data_id`, else `input.instance_id`), or the empty string.
    #[must_use]
    pub fn data_id(&self) -> String {
        ["data_id", "instance_id"]
            .iter()
            .filter_map(|key| self.input.get(key))
            .find_map(|value| match value {
                Value::String(text) if !text.is_empty() => Some(text.clone()),
                Value::Number(number) => Some(number.to_string()),
                _ => None,
            })
            .unwrap_or_default()
    }

    /// `train` or `val`, the mode segment of the proxy's path.
    #[must_use]
    pub fn mode(&self) -> &'static str {
        if self.is_train { "train" } else { "val" }
    }
}
