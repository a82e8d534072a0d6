//! An attempt is one try at a rollout. A rollout's first attempt is `"0"`; an infrastructure failure is retried as the next
//! one, inside `running`, and only the last attempt's events count.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::rollout::IllegalTransition;

/// The id of the first attempt of every rollout.
pub const FIRST_ATTEMPT_ID: &str = "0";

/// Where an attempt is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttemptState {
    /// Its process is being made.
    Starting,
    /// The agent or its evaluator runs.
    Running,
    /// The agent exited with 0.
    Succeeded,
    /// See [`Attempt::failure`].
    Failed,
}

impl AttemptState {
    /// True for the two states nothing leads out of.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }

    /// `starting → running → succeeded | failed`, and `starting → failed`.
    #[must_use]
    pub fn may_become(self, next: Self) -> bool {
        matches!(
            (self, next),
            (Self::Starting, Self::Running | Self::Failed) | (Self::Running, Self::Succeeded | Self::Failed)
        )
    }

    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
        }
    }
}

/// Whose failure it was. Only the agent's and the clock's count against the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FailureClass {
    /// A non-zero exit of the agent whose last model call was answered.
    Agent,
    /// The time limit.
    Timeout,
    /// Could not start, was lost, or its last model call ended in a gateway-side or upstream error.
    Infrastructure,
    /// Somebody asked for it to stop.
    Cancelled,
}

/// One try at a rollout. Infrastructure failures are retried as new attempts inside `running`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attempt {
    /// Whose attempt.
    pub rollout_id: String,
    /// `"0"`, `"1"`, …
    pub attempt_id: String,
    /// See [`AttemptState`].
    pub state: AttemptState,
    /// Set when `failed`.
    #[serde(default)]
    pub failure: Option<FailureClass>,
    /// Why it failed, for a person.
    #[serde(default)]
    pub error_message: Option<String>,
    /// The agent's exit code; negative is the signal that ended it.
    #[serde(default)]
    pub exit_code: Option<i32>,
    /// What the runner wants to find again: pid, log folder, host.
    #[serde(default)]
    pub runner: Map<String, Value>,
    /// True once the agent's own key has been withdrawn because its process has ended.
    #[serde(default)]
    pub agent_ended: bool,
    /// Seconds since the epoch.
    pub created_at: f64,
    /// Seconds since the epoch.
    pub updated_at: f64,
}

/// A change of an attempt. Absent keys stay as they are; unknown keys are an error.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttemptPatch {
    /// The next state; must be a legal transition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<AttemptState>,
    /// See [`Attempt::failure`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<FailureClass>,
    /// See [`Attempt::error_message`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_message: Option<String>,
    /// See [`Attempt::exit_code`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Merged into [`Attempt::runner`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runner: Option<Map<String, Value>>,
    /// See [`Attempt::agent_ended`]; cannot be taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_ended: Option<bool>,
}

impl Attempt {
    /// A new attempt, `starting`.
    #[must_use]
    pub fn new(rollout_id: String, attempt_id: String, now: f64) -> Self {
        Self {
            rollout_id,
            attempt_id,
            state: AttemptState::Starting,
            failure: None,
            error_message: None,
            exit_code: None,
            runner: Map::new(),
            agent_ended: false,
            created_at: now,
            updated_at: now,
        }
    }

    /// Applies a patch, or says why it may not be applied and changes nothing.
    ///
    /// # Errors
    /// [`IllegalTransition`] where the patch names a state that [`AttemptState::may_become`] refuses.
    pub fn apply(&mut self, patch: &AttemptPatch, now: f64) -> Result<(), IllegalTransition> {
        if let Some(next) = patch.state {
            if !self.state.may_become(next) {
                return Err(IllegalTransition {
                    rollout_id: format!("{} attempt {}", self.rollout_id, self.attempt_id),
                    from: self.state.as_str().to_owned(),
                    to: next.as_str().to_owned(),
                });
            }
            self.state = next;
        }
        self.failure = patch.failure.or(self.failure);
        self.exit_code = patch.exit_code.or(self.exit_code);
        if patch.error_message.is_some() {
            self.error_message.clone_from(&patch.error_message);
        }
        if let Some(runner) = &patch.runner {
            self.runner.extend(runner.clone());
        }
        self.agent_ended |= patch.agent_ended.unwrap_or(false) || self.state.is_terminal();
        self.updated_at = now;
        Ok(())
    }
}
