//! `format=triplet`: what Agent Lightning's trainer reads. Token ids, log-probs and scalar rewards; of the calls with one
//! prompt the last.

use std::collections::HashMap;

use agl_core::event::{Event, MODEL_REQUEST, REWARD};
use agl_store::{StoreError, StoredEvent};
use serde_json::{Map, Value, json};

/// The event in triplet form. Other types pass through untouched.
pub(super) fn of_stored(mut stored: StoredEvent) -> Result<Event, StoreError> {
    // The request is the larger half, and not part of a triplet.
    stored.request = None;
    let mut event = stored.into_event()?;
    match event.event_type.as_str() {
        MODEL_REQUEST => event.data = model_request(&event.data),
        REWARD => event.data = reward(&event.data),
        _ => {}
    }
    Ok(event)
}

fn model_request(data: &Map<String, Value>) -> Map<String, Value> {
    let response = data.get("response").unwrap_or(&Value::Null);
    let first = &response["choices"][0];
    let list = |value: &Value| value.as_array().filter(|ids| !ids.is_empty()).map(|_| value.clone());
    let (prompt, sampled) = match response {
        // Raw chunks of a stream, as earlier versions stored them.
        Value::Array(chunks) => streamed(chunks),
        _ => (
            list(&response["prompt_token_ids"]).or_else(|| list(&first["prompt_token_ids"])),
            list(&first["token_ids"]),
        ),
    };
    let mut trimmed = Map::new();
    trimmed.insert("prompt_token_ids".to_owned(), prompt.unwrap_or_else(|| json!([])));
    trimmed.insert("response_token_ids".to_owned(), sampled.unwrap_or_else(|| json!([])));
    trimmed.insert("response_log_probs".to_owned(), log_probs(&first["logprobs"]).into());
    let server = data.get("server").unwrap_or(&Value::Null);
    trimmed.insert("server".to_owned(), json!({"model": server["model"], "version": server["version"]}));
    for key in ["http_status", "status"] {
        if let Some(value) = data.get(key) {
            trimmed.insert(key.to_owned(), value.clone());
        }
    }
    if let Some(error) = response.get("error") {
        trimmed.insert("error".to_owned(), error.clone());
    }
    trimmed
}

fn streamed(chunks: &[Value]) -> (Option<Value>, Option<Value>) {
    let prompt = chunks
        .iter()
        .map(|chunk| &chunk["prompt_token_ids"])
        .find(|ids| ids.as_array().is_some_and(|ids| !ids.is_empty()));
    let sampled =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["token_ids"].as_array()).flatten().cloned().collect();
    (prompt.cloned(), Some(Value::Array(sampled)))
}

/// In double precision, as the server wrote them; `None` where one is no finite number.
fn log_probs(raw: &Value) -> Option<Vec<f64>> {
    let number = |value: &Value| value.as_f64().filter(|value| value.is_finite());
    if let Some(content) = raw["content"].as_array() {
        return content.iter().map(|token| number(&token["logprob"])).collect();
    }
    raw["token_logprobs"].as_array()?.iter().map(number).collect()
}

fn reward(data: &Map<String, Value>) -> Map<String, Value> {
    let mut trimmed = Map::new();
    trimmed.insert("value".to_owned(), data.get("value").cloned().into());
    // `call_id` is ours: a turn-level reward is no outcome.
    for key in ["source", "reason", "call_id"] {
        if let Some(value) = data.get(key) {
            trimmed.insert(key.to_owned(), value.clone());
        }
    }
    trimmed
}

/// Keeps the last of the calls with equal prompts, in its place. Calls without a usable prompt are all kept.
pub(super) fn last_per_prompt(events: Vec<Event>) -> Vec<Event> {
    let mut last = HashMap::new();
    for (index, event) in events.iter().enumerate() {
        if let Some(prompt) = prompt_of(event) {
            last.insert(prompt, index);
        }
    }
    let kept: Vec<bool> = events
        .iter()
        .enumerate()
        .map(|(index, event)| prompt_of(event).is_none_or(|prompt| last.get(&prompt) == Some(&index)))
        .collect();
    events.into_iter().zip(kept).filter_map(|(event, keep)| keep.then_some(event)).collect()
}

fn prompt_of(event: &Event) -> Option<Vec<i64>> {
    let ids = event.data.get("prompt_token_ids").filter(|_| event.event_type == MODEL_REQUEST)?.as_array()?;
    ids.iter().map(Value::as_i64).collect::<Option<Vec<_>>>().filter(|ids| !ids.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(event_type: &str, data: Value) -> StoredEvent {
        let event = Event {
            event_type: event_type.to_owned(),
            rollout_id: "r".to_owned(),
            attempt_id: "0".to_owned(),
            timestamp: 1.0,
            data: data.as_object().cloned().unwrap(),
        };
        StoredEvent { event, request: None, response: None }
    }

    fn trimmed(event_type: &str, data: Value) -> Value {
        Value::Object(of_stored(event(event_type, data)).unwrap().data)
    }

    #[test]
    fn a_model_request_keeps_ids_log_probs_server_and_status() {
        let data = json!({
            "model": "m", "request": {"messages": []}, "http_status": 200, "status": "ok",
            "server": {"model": "m", "endpoint": "http://x", "version": 3},
            "response": {"prompt_token_ids": [1, 2], "choices": [
                {"token_ids": [7], "logprobs": {"content": [{"logprob": -0.1, "token": "a"}]}}]},
        });
        assert_eq!(
            trimmed(MODEL_REQUEST, data),
            json!({"prompt_token_ids": [1, 2], "response_token_ids": [7], "response_log_probs": [-0.1],
                   "server": {"model": "m", "version": 3}, "http_status": 200, "status": "ok"})
        );
    }

    #[test]
    fn whatever_is_missing_is_empty_and_an_error_is_kept() {
        assert_eq!(
            trimmed(MODEL_REQUEST, json!({"response": {"error": "boom"}})),
            json!({"prompt_token_ids": [], "response_token_ids": [], "response_log_probs": null,
                   "server": {"model": null, "version": null}, "error": "boom"})
        );
    }

    #[test]
    fn chunks_of_a_stream_are_joined() {
        let chunks = json!([{"prompt_token_ids": [1], "choices": [{"token_ids": [7]}]}, {"choices": []},
                            {"choices": [{"token_ids": [8]}]}]);
        let data = trimmed(MODEL_REQUEST, json!({"response": chunks}));
        assert_eq!((&data["prompt_token_ids"], &data["response_token_ids"]), (&json!([1]), &json!([7, 8])));
    }

    #[test]
    fn one_bad_log_prob_drops_all_of_them() {
        let of = |logprobs: Value| log_probs(&logprobs);
        assert_eq!(of(json!({"token_logprobs": [-0.5, -1]})), Some(vec![-0.5, -1.0]));
        assert_eq!(of(json!({"token_logprobs": [-0.5, null]})), None);
        assert_eq!(of(json!({"content": [{"token": "x"}]})), None);
        assert_eq!(of(json!(null)), None);
    }

    #[test]
    fn a_reward_keeps_its_value_and_where_it_came_from() {
        let data = json!({"value": 1.0, "message": "long", "source": "agent"});
        assert_eq!(trimmed(REWARD, data), json!({"value": 1.0, "source": "agent"}));
        assert_eq!(trimmed("note", json!({"anything": [1]})), json!({"anything": [1]}));
    }

    #[test]
    fn the_last_of_equal_prompts_stays_and_calls_without_prompt_stay_all() {
        let call = |prompt: Value, id: u32| {
            let response = json!({"prompt_token_ids": prompt, "choices": [{"token_ids": [id]}]});
            of_stored(event(MODEL_REQUEST, json!({"response": response}))).unwrap()
        };
        let events = vec![call(json!([1, 2]), 7), call(json!([]), 5), call(json!([1, 2]), 8), call(json!([]), 6)];
        let ids: Vec<_> = last_per_prompt(events).iter().map(|e| e.data["response_token_ids"][0].clone()).collect();
        assert_eq!(ids, [json!(5), json!(8), json!(6)]);
    }
}
