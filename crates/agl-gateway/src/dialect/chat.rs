//! OpenAI's chat completions and completions: requests and whole answers pass as they are; a stream is cut from the answer.

use serde_json::{Map, Value, json};

use super::{Dialect, sse};

/// What a chunk repeats of the answer. Token ids and log-probs travel with the first chunk of their choice, so that a harness
/// that reads them finds them.
const REPEATED: [&str; 4] = ["id", "created", "model", "system_fingerprint"];

/// The answer as a stream of chunks; `None` where it has no choices.
pub(crate) fn stream(answer: &Value, dialect: Dialect, include_usage: bool) -> Option<String> {
    let object = if dialect == Dialect::Chat { "chat.completion.chunk" } else { "text_completion" };
    let mut head: Map<String, Value> =
        REPEATED.iter().filter_map(|&key| Some((key.to_owned(), answer.get(key)?.clone()))).collect();
    head.insert("object".to_owned(), object.into());
    let chunk = |choices: Value, usage: Option<&Value>| {
        let mut chunk = head.clone();
        chunk.insert("choices".to_owned(), choices);
        if include_usage {
            chunk.insert("usage".to_owned(), usage.cloned().unwrap_or_default());
        }
        Value::Object(chunk)
    };
    let mut events = String::new();
    let choices = answer.get("choices")?.as_array().filter(|choices| !choices.is_empty())?;
    for (position, choice) in choices.iter().enumerate() {
        let index = choice.get("index").cloned().unwrap_or_else(|| position.into());
        let deltas = if dialect == Dialect::Chat { chat_deltas(choice) } else { completion_deltas(choice) };
        let last = deltas.len().saturating_sub(1);
        for (number, delta) in deltas.into_iter().enumerate() {
            let mut said = Map::from_iter([("index".to_owned(), index.clone())]);
            said.extend(delta);
            said.insert("finish_reason".to_owned(), Value::Null);
            let mut carrier = chunk(Value::Null, None);
            if number == 0 {
                for key in ["logprobs", "token_ids", "policy_versions"] {
                    if let Some(value) = choice.get(key).filter(|value| !value.is_null()) {
                        said.insert(key.to_owned(), value.clone());
                    }
                }
                let prompt = choice.get("prompt_token_ids").or_else(|| answer.get("prompt_token_ids"));
                if let Some(prompt) = prompt.filter(|prompt| !prompt.is_null() && position == 0) {
                    carrier["prompt_token_ids"] = prompt.clone();
                }
            }
            if number == last {
                said.insert("finish_reason".to_owned(), choice.get("finish_reason").cloned().unwrap_or_default());
                if let Some(reason) = choice.get("stop_reason") {
                    said.insert("stop_reason".to_owned(), reason.clone());
                }
            }
            carrier["choices"] = json!([said]);
            events += &sse::data(&carrier);
        }
    }
    if include_usage {
        events += &sse::data(&chunk(json!([]), answer.get("usage")));
    }
    events += "data: [DONE]\n\n";
    Some(events)
}

/// The message in pieces: role, then everything else the server said about it, then the tool calls, then the end.
fn chat_deltas(choice: &Value) -> Vec<Map<String, Value>> {
    let delta = |delta: Value| Map::from_iter([("delta".to_owned(), delta)]);
    let mut deltas = vec![delta(json!({"role": "assistant", "content": ""}))];
    for (key, value) in choice["message"].as_object().into_iter().flatten() {
        let is_said = !value.is_null() && value != "" && key != "role" && key != "tool_calls";
        if is_said {
            deltas.push(delta(json!({ key.as_str(): value })));
        }
    }
    let calls = choice["message"]["tool_calls"].as_array().into_iter().flatten();
    for (index, call) in calls.filter_map(Value::as_object).enumerate() {
        let mut call = call.clone();
        call.insert("index".to_owned(), index.into());
        deltas.push(delta(json!({"tool_calls": [call]})));
    }
    deltas.push(delta(json!({})));
    deltas
}

fn completion_deltas(choice: &Value) -> Vec<Map<String, Value>> {
    vec![Map::from_iter([("text".to_owned(), choice.get("text").cloned().unwrap_or_else(|| "".into()))])]
}
