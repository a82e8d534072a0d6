//! What is appended to an attempt while it runs. Two event types have a known form; every other one passes through untouched.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The type of the event that the gateway writes for every proxied model call.
pub const MODEL_REQUEST: &str = "model_request";
/// The type of the event that carries a reward.
pub const REWARD: &str = "reward";

/// One entry of an attempt's log. Never changed once written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// [`MODEL_REQUEST`], [`REWARD`], or anything a user likes.
    pub event_type: String,
    /// Whose.
    pub rollout_id: String,
    /// Which attempt's.
    pub attempt_id: String,
    /// Seconds since the epoch, given by the store.
    pub timestamp: f64,
    /// The payload.
    pub data: Map<String, Value>,
}

/// What a caller says to append an event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventCreate {
    /// See [`Event::event_type`].
    pub event_type: String,
    /// See [`Event::data`].
    #[serde(default)]
    pub data: Map<String, Value>,
}

/// The scalar of a reward event, or `None` if its data holds no finite number under `value`.
#[must_use]
pub fn reward_value(data: &Map<String, Value>) -> Option<f64> {
    data.get("value").and_then(Value::as_f64).filter(|value| value.is_finite())
}

/// A rollout's outcome: the value of the last reward event that names no call.
///
/// Rewards with a `call_id` belong to single calls (turn-level credit) and do not replace the outcome.
#[must_use]
pub fn outcome<'a>(events: impl IntoIterator<Item = &'a Event>) -> Option<f64> {
    events
        .into_iter()
        .filter(|event| event.event_type == REWARD && event.data.get("call_id").is_none_or(Value::is_null))
        .filter_map(|event| reward_value(&event.data))
        .last()
}

/// Rewards that name their call, in the order they came: `(call_id, value)`.
pub fn call_rewards<'a>(events: impl IntoIterator<Item = &'a Event>) -> impl Iterator<Item = (&'a str, f64)> {
    events.into_iter().filter_map(|event| {
        let call_id = event.data.get("call_id")?.as_str()?;
        (event.event_type == REWARD).then(|| reward_value(&event.data).map(|value| (call_id, value)))?
    })
}
