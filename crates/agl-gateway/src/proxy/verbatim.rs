//! What a model wrote as the arguments of its tool calls, to the letter. Dialects that tell arguments as objects, and clients that
//! write them anew (LangChain), lose the model's spaces and number formats; with the first character that differs, the next
//! prompt no longer extends the tokens that were sampled. Arguments that still mean the same are put back as they were written.
//!
//! A cache: what is not here any more, after a restart for instance, stays as the harness wrote it, which at worst opens a new row.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use super::recorder::AttemptKey;
use crate::dialect::answer::ToolCall;

/// Of arguments and their keys together.
const MAX_BYTES: usize = 64 << 20;

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Verbatim(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    attempts: HashMap<AttemptKey, HashMap<String, String>>,
    /// Tool calls in the order in which they came.
    oldest: VecDeque<(AttemptKey, String)>,
    bytes: usize,
}

impl Verbatim {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        // A cache: whatever a panic left of it is still true.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers the arguments of tool calls.
    pub(crate) fn remember(&self, key: &AttemptKey, calls: impl IntoIterator<Item = ToolCall>) {
        let mut inner = self.inner();
        for ToolCall { id, arguments, .. } in calls {
            inner.bytes += size(key, &id, &arguments);
            inner.oldest.push_back((key.clone(), id.clone()));
            let before = inner.attempts.entry(key.clone()).or_default().insert(id.clone(), arguments);
            inner.bytes -= before.map_or(0, |before| size(key, &id, &before));
        }
        while inner.bytes > MAX_BYTES {
            let Some((key, id)) = inner.oldest.pop_front() else { break };
            let Some(calls) = inner.attempts.get_mut(&key) else { continue };
            let gone = calls.remove(&id).map_or(0, |arguments| size(&key, &id, &arguments));
            if calls.is_empty() {
                inner.attempts.remove(&key);
            }
            inner.bytes -= gone;
        }
    }

    /// False where nothing of the attempt is remembered: there is nothing to put back then.
    pub(crate) fn knows(&self, key: &AttemptKey) -> bool {
        self.inner().attempts.contains_key(key)
    }

    /// Puts back what the model wrote wherever a message of the assistant has equal arguments; true if that changed any.
    pub(crate) fn restore(&self, key: &AttemptKey, messages: &mut [Value]) -> bool {
        let inner = self.inner();
        let Some(remembered) = inner.attempts.get(key) else { return false };
        let calls = messages.iter_mut().filter_map(|message| message.get_mut("tool_calls")?.as_array_mut()).flatten();
        let mut changed = false;
        for call in calls {
            let Some(written) = call["id"].as_str().and_then(|id| remembered.get(id)) else { continue };
            if let Some(Value::String(sent)) = call.pointer_mut("/function/arguments")
                && sent != written
                && means_the_same(sent, written)
            {
                sent.clone_from(written);
                changed = true;
            }
        }
        changed
    }
}

fn size(key: &AttemptKey, id: &str, arguments: &str) -> usize {
    key.rollout_id.len() + key.attempt_id.len() + id.len() + arguments.len()
}

fn means_the_same(one: &str, other: &str) -> bool {
    // Some servers write the arguments of a tool that takes none as nothing at all.
    let read = |text: &str| serde_json::from_str::<Value>(if text.trim().is_empty() { "{}" } else { text }).ok();
    read(one).zip(read(other)).is_some_and(|(one, other)| is_same(&one, &other))
}

/// Equal as JavaScript reads it: 1.0 is 1 there.
fn is_same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => one == other || one.as_f64() == other.as_f64(),
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| is_same(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            one.len() == other.len()
                && one.iter().all(|(key, one)| other.get(key).is_some_and(|other| is_same(one, other)))
        }
        _ => one == other,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key(rollout: &str) -> AttemptKey {
        AttemptKey { rollout_id: rollout.to_owned(), attempt_id: "0".to_owned() }
    }

    fn restored(verbatim: &Verbatim, rollout: &str, arguments: &str) -> Value {
        let call = json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}});
        let mut messages =
            [json!({"role": "user", "content": "q"}), json!({"role": "assistant", "tool_calls": [call]})];
        let changed = verbatim.restore(&key(rollout), &mut messages);
        let now = messages[1]["tool_calls"][0]["function"]["arguments"].clone();
        assert_eq!(changed, now != arguments);
        now
    }

    fn wrote(id: &str, arguments: &str) -> [ToolCall; 1] {
        [ToolCall { id: id.to_owned(), name: "f".to_owned(), arguments: arguments.to_owned() }]
    }

    #[test]
    fn equal_arguments_are_put_back_as_the_model_wrote_them_and_changed_ones_stay() {
        let verbatim = Verbatim::default();
        verbatim.remember(&key("r"), wrote("c1", r#"{ "b":1, "a": 2.50 }"#));
        assert_eq!(restored(&verbatim, "r", r#"{"a": 2.5, "b": 1}"#), r#"{ "b":1, "a": 2.50 }"#);
        assert_eq!(restored(&verbatim, "r", r#"{"a": 2.5, "b": 2}"#), r#"{"a": 2.5, "b": 2}"#);
        verbatim.remember(&key("js"), wrote("c1", r#"{"a": 1.0, "b": [1e3]}"#));
        assert_eq!(restored(&verbatim, "js", r#"{"a":1,"b":[1000]}"#), r#"{"a": 1.0, "b": [1e3]}"#);
        verbatim.remember(&key("empty"), wrote("c1", ""));
        assert_eq!(restored(&verbatim, "empty", "{}"), "");
        assert_eq!(restored(&verbatim, "other", r#"{"a": 2.5, "b": 1}"#), r#"{"a": 2.5, "b": 1}"#);
    }

    #[test]
    fn the_oldest_go_when_there_are_too_many() {
        let verbatim = Verbatim::default();
        let long = format!("\"{}\"", "x".repeat(MAX_BYTES / 3));
        for rollout in ["a", "b", "c"] {
            verbatim.remember(&key(rollout), wrote("c1", &long));
        }
        assert_eq!(["a", "b", "c"].map(|rollout| verbatim.knows(&key(rollout))), [false, true, true]);
    }
}
