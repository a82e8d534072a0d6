//! What the gateway says and hears beyond the types of `agl-core`.

use agl_core::attempt::Attempt;
use agl_core::rollout::{Rollout, RolloutState};
use agl_core::trajectory::Assembly;
use serde::{Deserialize, Serialize};

/// A rollout and the attempts that have events.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct RolloutDetail {
    /// The rollout.
    pub rollout: Rollout,
    /// Ids of the attempts that have events, oldest first. A rollout whose agent never called has none.
    pub attempts: Vec<String>,
}

/// A page of rollouts in the order in which they ended.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TerminalPage {
    /// Those of the page that still exist.
    pub items: Vec<TerminalItem>,
    /// Ask with this as `after` for what ended later. Counts deleted rollouts too.
    pub next_after: u64,
    /// How many rollouts have ended so far.
    pub total_terminal: u64,
}

/// A rollout that has ended, without its input.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TerminalItem {
    /// Which.
    pub rollout_id: String,
    /// `succeeded` or `failed`.
    pub state: RolloutState,
    /// See [`Rollout::data_id`].
    pub data_id: String,
    /// Train or validation.
    pub is_train: bool,
}

/// An attempt as the gateway sees it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct AttemptDetail {
    /// The attempt itself.
    #[serde(flatten)]
    pub attempt: Attempt,
    /// How many model calls the gateway recorded for it.
    #[serde(default)]
    pub calls: u64,
    /// How the last of them ended; `None` where there was none.
    #[serde(default)]
    pub last_call: Option<LastCall>,
    /// When the gateway's process started, in seconds since the epoch by the clock of `attempt.created_at`; 0 where it does
    /// not say.
    #[serde(default)]
    pub gateway_started_at: f64,
}

impl AttemptDetail {
    /// True where the gateway was restarted since the attempt began: calls that were under way then got no answer.
    #[must_use]
    pub fn outlived_a_gateway(&self) -> bool {
        self.attempt.created_at < self.gateway_started_at
    }
}

/// How a model call ended.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct LastCall {
    /// What the agent was answered.
    #[serde(default)]
    pub http_status: Option<u16>,
    /// `ok` or `error`.
    pub status: String,
}

impl LastCall {
    /// True where the gateway or the server behind it is to blame: no answer at all, 408, 429 or 5xx. A 400 or 404 is
    /// the agent's own doing.
    #[must_use]
    pub fn failed_upstream(&self) -> bool {
        self.status != "ok" && self.http_status.is_none_or(|status| status == 408 || status == 429 || status >= 500)
    }
}

/// A new attempt with its two keys.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct AttemptGrant {
    /// The attempt.
    #[serde(flatten)]
    pub detail: AttemptDetail,
    /// Opens the attempt's proxy and event URLs until its agent has ended.
    pub key: String,
    /// Opens the attempt's event URL, for the evaluator.
    pub reward_key: String,
}

/// A rollout's assembled training sequences and its rewards.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct SequencesResponse {
    /// Whose.
    pub rollout_id: String,
    /// Of which attempt.
    pub attempt_id: String,
    /// The outcome: the last reward that names no call.
    pub reward: Option<f64>,
    /// Rewards that name their call: `(call_id, value)`, in the order they came.
    #[serde(default)]
    pub call_rewards: Vec<(String, f64)>,
    /// The sequences, the breaks between them and the counts.
    #[serde(flatten)]
    pub assembly: Assembly,
}

/// One entry of the stream that [`crate::GatewayClient::watch`] gives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// Where in the stream it stands; resume from here.
    pub cursor: u64,
    /// What happened.
    pub kind: ChangeKind,
    /// To which rollout.
    pub rollout_id: String,
    /// The rollout afterwards; `None` where it was deleted.
    #[serde(default)]
    pub rollout: Option<Rollout>,
}

/// What happened to a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangeKind {
    /// Nothing yet: it existed, not terminal, when the watch began.
    Snapshot,
    /// It was created.
    Created,
    /// Its status changed.
    Updated,
    /// It was deleted.
    Deleted,
    /// A checkpoint that trained on it is on disk.
    Consumed,
}

/// A model server that the gateway may send calls to. Keyed by `(model, endpoint)`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    /// Name by which the gateway asks for it.
    pub model: String,
    /// Base URL including the OpenAI path, such as `http://host:8000/v1`.
    pub endpoint: String,
    /// Policy version that it serves.
    #[serde(default)]
    pub version: u64,
    /// What server it is: `agl`, `vllm`, `sglang`, `llamacpp`, `external` or `openai`. Absent: `openai`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Whether its tokens are the policy's. Absent: whether its name is the policy's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trainable: Option<bool>,
    /// The model's name at the server, where it is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream_model: Option<String>,
    /// The environment variable of the gateway that holds the server's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_env: Option<String>,
    /// `through`: streams are passed on as the server gives them. Absent: they are cut from its whole answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<String>,
}

/// Whether the proxy forwards calls.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct ProxyState {
    /// True while calls are held.
    pub paused: bool,
    /// What a refused caller is told to wait, in seconds.
    #[serde(default)]
    pub retry_after_seconds: u64,
    /// Why, for a person.
    #[serde(default)]
    pub reason: Option<String>,
    /// Calls at the upstream now; held and waiting calls do not count.
    pub inflight: u64,
    /// Calls that wait for the resume.
    #[serde(default)]
    pub held: u64,
    /// Who paused.
    #[serde(default)]
    pub owner: Option<String>,
    /// When the pause ends by itself, in seconds since the epoch.
    #[serde(default)]
    pub lease_expires_at: Option<f64>,
}
