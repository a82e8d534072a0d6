//! What goes into a store and comes out of it, beside the domain types of `agl-core`.

use std::sync::Arc;

use agl_core::attempt::Attempt;
use agl_core::event::Event;
use agl_core::rollout::{Rollout, RolloutState};
use agl_core::trajectory::{CallRow, Delivery};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{Body, StoreError};

/// Which rollouts to list, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RolloutQuery {
    /// Only rollouts in one of these states.
    pub states: Vec<RolloutState>,
    /// Only rollouts created after this one: the last id of the page before.
    pub after: Option<String>,
    /// At most so many.
    pub limit: usize,
    /// Only rollouts whose `metadata.run_id` is this.
    pub run_id: Option<String>,
}

/// An attempt and what its model calls came to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttemptDetail {
    /// The attempt itself.
    #[serde(flatten)]
    pub attempt: Attempt,
    /// How many model calls were recorded.
    pub calls: u64,
    /// The last of them; `None` if there was none.
    pub last_call: Option<LastCall>,
}

/// What decides whether a call may be made: the rollout and, if it was ever made, the attempt. A store may keep it at hand; it is
/// never older than the last change that was acknowledged.
#[derive(Clone, Debug, PartialEq)]
pub struct Standing {
    /// The rollout.
    pub rollout: Arc<Rollout>,
    /// `None` where calls and events come for an attempt that nobody has made.
    pub attempt: Option<Arc<Attempt>>,
}

/// How the last model call of an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastCall {
    /// The status that the harness was answered with.
    pub http_status: u16,
    /// `ok`, or `error` from status 400 on.
    pub status: String,
}

/// A terminal rollout without its payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalItem {
    /// Which rollout.
    pub rollout_id: String,
    /// How it ended.
    pub state: RolloutState,
    /// [`Rollout::data_id`].
    pub data_id: String,
    /// Train or validation.
    pub is_train: bool,
}

/// A page of rollouts in the order in which they ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalPage {
    /// Those of the page that have not been deleted.
    pub items: Vec<TerminalItem>,
    /// Pass this as `after` for what ended since; counts deleted rollouts too.
    pub next_after: u64,
    /// How many rollouts ever ended.
    pub total_terminal: u64,
}

/// A model call, to be written in one transaction: its event, its rows and its bodies.
#[derive(Clone, Debug)]
pub struct CallRecord {
    /// Whose.
    pub rollout_id: String,
    /// Which attempt's.
    pub attempt_id: String,
    /// Seconds since the epoch.
    pub timestamp: f64,
    /// The event's payload; its keys `request` and `response` are filled in from the bodies when it is read.
    pub data: Map<String, Value>,
    /// The body as sent upstream.
    pub request: Bytes,
    /// The body as it came back; empty if none did.
    pub response: Bytes,
    /// One row per sampled answer; a call without any has one row, so that it is counted.
    pub rows: Vec<CallRow>,
    /// What the harness sent, digested: an equal digest later in the attempt is a retry.
    pub request_digest: [u8; 32],
    /// The status that the harness is answered with.
    pub http_status: u16,
    /// Rows that this call is the retry of: they become [`Delivery::Superseded`].
    pub supersedes: Vec<u64>,
}

/// A call row as it was stored.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredCall {
    /// The row.
    pub row: CallRow,
    /// See [`CallRecord::request_digest`].
    pub request_digest: [u8; 32],
    /// True once the gateway has seen the answer leave, or seen that it could not. A row is written before its answer
    /// leaves, so after a crash the last ones are unsettled.
    pub settled: bool,
    /// Who settles it.
    pub writer: Writer,
}

/// The gateway that wrote a row, and knows what becomes of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// No gateway that lives, as far as the store can tell.
    Gone,
    /// The one that reads.
    Here,
    /// Another one that lives.
    Elsewhere,
}

/// What became of an answer after its rows were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settlement {
    /// Whose.
    pub rollout_id: String,
    /// Which attempt's.
    pub attempt_id: String,
    /// The call's rows.
    pub seqs: Vec<u64>,
    /// Delivered or undelivered. A row that is superseded already stays so.
    pub delivery: Delivery,
}

/// An event with its bodies still compressed.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredEvent {
    /// The event; `data` lacks the bodies.
    pub event: Event,
    /// The body sent upstream, for a model call that the gateway made.
    pub request: Option<Body>,
    /// The body that came back.
    pub response: Option<Body>,
}

impl StoredEvent {
    /// The event with its bodies in `data.request` and `data.response`; a response that is no JSON reads as `{}`.
    /// Decompresses and parses: belongs on a blocking thread.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if a body cannot be decompressed.
    pub fn into_event(self) -> Result<Event, StoreError> {
        let mut event = self.event;
        for (key, body) in [("request", self.request), ("response", self.response)] {
            if let Some(body) = body {
                let value = serde_json::from_slice(&body.read()?).unwrap_or_else(|_| Value::Object(Map::new()));
                event.data.insert(key.to_owned(), value);
            }
        }
        Ok(event)
    }
}

/// A registered inference endpoint, keyed by model and endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisteredModel {
    /// The name that callers ask for.
    pub model: String,
    /// Base URL including `/v1`.
    pub endpoint: String,
    /// The training step of the weights it serves.
    #[serde(default)]
    pub version: u64,
    /// `agl`, `vllm`, `sglang`, `llamacpp`, `external` or `openai`: what the server understands beyond the common interface.
    #[serde(default = "openai")]
    pub kind: String,
    /// Whether its answers are trained on; absent: only if it serves the policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trainable: Option<bool>,
    /// The model's name at the server, where it is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream_model: Option<String>,
    /// The environment variable of the gateway that holds the server's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_env: Option<String>,
    /// `through`: streams are passed on as the server gives them; absent, or `synthesise`: they are cut from its whole answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<String>,
}

impl RegisteredModel {
    /// A server of the common kind that needs no key.
    #[must_use]
    pub fn new(model: impl Into<String>, endpoint: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            endpoint: endpoint.into(),
            version: 0,
            kind: openai(),
            trainable: None,
            upstream_model: None,
            api_key_env: None,
            stream: None,
        }
    }
}

fn openai() -> String {
    "openai".to_owned()
}

/// A pause of the proxy, kept so that it survives a restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pause {
    /// What a caller that cannot be held is told to wait, in seconds.
    pub retry_after_seconds: u64,
    /// For a person.
    pub reason: Option<String>,
    /// Who paused. A pause without an owner can be taken over by anyone.
    pub owner: Option<String>,
    /// Seconds since the epoch; the pause ends by itself then.
    pub lease_expires_at: f64,
}

/// What happened to a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangeKind {
    /// It was enqueued.
    Created,
    /// Its status changed.
    Updated,
    /// It was deleted.
    Deleted,
    /// A checkpoint that trained on it is on disk.
    Consumed,
}

impl ChangeKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Created, Self::Updated, Self::Deleted, Self::Consumed];

    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Updated => "updated",
            Self::Deleted => "deleted",
            Self::Consumed => "consumed",
        }
    }
}

/// One entry of the change log.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Counts up from 1 across restarts, never reused.
    pub cursor: u64,
    /// What happened.
    pub kind: ChangeKind,
    /// To which rollout.
    pub rollout_id: String,
    /// The rollout as it is when the log is read (not as it was then); `None` if it has been deleted since.
    pub rollout: Option<Rollout>,
}

/// The text under which rollouts of one run are found again: `metadata.run_id`, whatever its JSON type.
pub(crate) fn run_id_of(rollout: &Rollout) -> Option<String> {
    match rollout.metadata.get("run_id")? {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}
