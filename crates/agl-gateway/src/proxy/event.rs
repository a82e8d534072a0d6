//! What a call's event says, and the seed that makes its answer repeatable.

use agl_core::rollout::Rollout;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::answer::Answer;
use super::upstream::Progress;
use crate::dialect::Dialect;
use crate::dialect::fields::LeftOut;

/// What an event says of a call beside its answer.
pub(crate) struct Described<'a> {
    pub(crate) model: &'a str,
    pub(crate) dialect: Dialect,
    pub(crate) stream: bool,
    pub(crate) agent: Option<&'a str>,
    pub(crate) left_out: &'a LeftOut,
    pub(crate) latency_ms: f64,
    pub(crate) http_status: u16,
}

/// The payload of the event: the original's fields in its order, then ours.
pub(crate) fn event_data(call: &Described<'_>, progress: &Progress, answer: &Answer) -> Map<String, Value> {
    let server = progress.server.as_ref();
    let mut data = Map::new();
    let mut put = |key: &str, value: Value| data.insert(key.to_owned(), value);
    put("model", server.map_or(call.model, |server| &server.model).into());
    put("model_version", server.map(|server| server.version).into());
    put("request", Value::Null);
    put("response", Value::Object(Map::new()));
    put(
        "server",
        server
            .map(|server| json!({"model": server.model, "endpoint": server.endpoint, "version": server.version}))
            .into(),
    );
    put("latency_ms", call.latency_ms.into());
    put("http_status", call.http_status.into());
    put("status", if call.http_status < 400 { "ok" } else { "error" }.into());
    put("retry_count", progress.retries.into());
    put("usage", answer.usage.clone().into());
    put("finish_reason", answer.finish_reason.clone().into());
    put("dialect", call.dialect.name().into());
    put("stream", call.stream.into());
    if let Some(agent) = call.agent {
        put("agent", agent.into());
    }
    if !call.left_out.is_empty() {
        put("left_out", call.left_out.iter().cloned().collect());
    }
    data
}

/// A seed that makes this call's answer repeatable: SHA-256 over (seed, step, task, group, sample, call), 63 bits. A run that
/// is repeated makes new rollout ids; where the trainer gave no seed or no sample index, the rollout's id stands in all the
/// same, so that siblings still differ.
pub(crate) fn seed(rollout: &Rollout, call: u64) -> u64 {
    let given = |key: &str| rollout.metadata.get(key).filter(|value| !value.is_null());
    let needed = |key: &str| given(key).map_or_else(|| json!(rollout.rollout_id).to_string(), Value::to_string);
    let optional = |key: &str| given(key).map(Value::to_string).unwrap_or_default();
    let task = match given("data_id") {
        Some(Value::String(id)) => id.clone(),
        Some(id) => id.to_string(),
        None => rollout.data_id(),
    };
    let parts = [needed("seed"), optional("step"), task, optional("group_idx"), needed("sample_idx"), call.to_string()];
    let digest: [u8; 32] = parts
        .iter()
        .fold(Sha256::new(), |hash, part| hash.chain_update((part.len() as u64).to_le_bytes()).chain_update(part))
        .finalize()
        .into();
    digest.first_chunk::<8>().map_or(0, |bytes| u64::from_be_bytes(*bytes) >> 1)
}

#[cfg(test)]
mod tests {
    use agl_core::rollout::RolloutCreate;

    use super::*;

    fn rollout(id: &str, metadata: Value) -> Rollout {
        let create: RolloutCreate =
            serde_json::from_value(json!({"input": {"data_id": "q1"}, "metadata": metadata})).unwrap();
        Rollout::new(create, id.to_owned(), 0.0)
    }

    #[test]
    fn a_seed_depends_on_seed_step_task_group_sample_and_call_but_not_on_the_rollouts_id() {
        let metadata = json!({"seed": 1, "step": 4, "group_idx": 2, "sample_idx": 0});
        let first = seed(&rollout("a", metadata.clone()), 0);
        assert_eq!(first, seed(&rollout("b", metadata.clone()), 0));
        for (key, value) in [
            ("seed", json!(2)),
            ("step", json!(5)),
            ("group_idx", json!(3)),
            ("sample_idx", json!(1)),
            ("data_id", json!("q2")),
        ] {
            let mut other = metadata.clone();
            other[key] = value;
            assert_ne!(seed(&rollout("a", other), 0), first, "{key}");
        }
        assert_ne!(seed(&rollout("a", metadata), 1), first);
        assert!(first <= u64::MAX >> 1);
    }

    #[test]
    fn the_task_that_the_trainer_names_goes_before_that_of_the_input() {
        let named = json!({"seed": 1, "sample_idx": 0, "data_id": "q1"});
        let unnamed = json!({"seed": 1, "sample_idx": 0});
        assert_eq!(seed(&rollout("a", named), 0), seed(&rollout("b", unnamed), 0));
    }

    #[test]
    fn siblings_without_a_sample_index_still_differ() {
        assert_ne!(seed(&rollout("a", json!({"seed": 1})), 0), seed(&rollout("b", json!({"seed": 1})), 0));
    }
}
