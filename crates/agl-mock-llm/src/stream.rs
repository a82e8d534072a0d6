//! A scripted answer as vLLM streams it: the prompt's ids with the first chunk, and with every chunk the ids of its tokens.

use std::collections::VecDeque;

use serde_json::{Map, Value, json};

use crate::answer::Asked;
use crate::script::Fault;
use crate::tokenizer::render_tool_call;

/// How many characters one chunk has.
const PIECE: usize = 3;

/// What a chunk says, and how many tokens that were.
type Said = (Value, usize);

/// The events of the stream, out of the whole answer with all its token ids. `fault` may spoil ids and log-probs.
#[must_use]
pub fn events(whole: &Value, asked: &Asked, include_usage: bool, fault: Option<&Fault>) -> Vec<String> {
    let object = if asked.chat { "chat.completion.chunk" } else { "text_completion" };
    let mut head = Map::from_iter([("object".to_owned(), json!(object))]);
    for key in ["id", "created", "model", "policy_version"] {
        if let Some(value) = whole.get(key) {
            head.insert(key.to_owned(), value.clone());
        }
    }
    let chunk = |choices: Value| {
        let mut chunk = head.clone();
        chunk.insert("choices".to_owned(), choices);
        Value::Object(chunk)
    };
    let with_ids = asked.return_token_ids && !matches!(fault, Some(Fault::MissingIds));
    let mut queues: Vec<VecDeque<Value>> = whole["choices"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|choice| pieces(choice, asked, with_ids, fault))
        .collect();
    let mut chunks = Vec::new();
    // The choices of one prompt are sampled side by side.
    while queues.iter().any(|queue| !queue.is_empty()) {
        for queue in &mut queues {
            if let Some(choice) = queue.pop_front() {
                let mut next = chunk(json!([choice]));
                if chunks.is_empty() && asked.chat && with_ids {
                    next["prompt_token_ids"] = json!(asked.prompts.first());
                }
                chunks.push(next);
            }
        }
    }
    if include_usage {
        let mut last = chunk(json!([]));
        last["usage"] = whole["usage"].clone();
        chunks.push(last);
    }
    chunks.iter().map(|chunk| format!("data: {chunk}\n\n")).chain(["data: [DONE]\n\n".to_owned()]).collect()
}

/// The chunks of one choice.
fn pieces(choice: &Value, asked: &Asked, with_ids: bool, fault: Option<&Fault>) -> VecDeque<Value> {
    let said = if asked.chat { chat_pieces(&choice["message"]) } else { texts(&choice["text"], "text") };
    let ids = choice["token_ids"].as_array().map(Vec::as_slice).unwrap_or_default();
    let logs = choice["logprobs"]["content"].as_array().or_else(|| choice["logprobs"]["token_logprobs"].as_array());
    let logs = logs.map(Vec::as_slice).unwrap_or_default();
    let base = |delta: Value| {
        let mut piece = json!({"index": choice["index"], "finish_reason": null, "logprobs": null, "token_ids": null});
        if asked.chat {
            piece["delta"] = delta;
        } else {
            piece["text"] = delta["text"].clone();
        }
        piece
    };
    let mut pieces: VecDeque<Value> = VecDeque::new();
    if asked.chat {
        pieces.push_back(base(json!({"role": "assistant", "content": ""})));
    }
    let last = said.len();
    let end = (json!({"text": ""}), 0);
    let mut at = 0;
    for (number, (delta, tokens)) in said.into_iter().chain([end]).enumerate() {
        let until = if number == last { ids.len() } else { (at + tokens).min(ids.len()) };
        let is_end = number == last;
        let mut piece = base(if is_end && asked.chat { json!({}) } else { delta });
        if with_ids {
            // The chunk that a parser swallowed, in servers that lose ids.
            let is_lost = matches!(fault, Some(Fault::LostIds)) && number == 1;
            piece["token_ids"] = if is_lost { Value::Null } else { json!(ids[at..until]) };
            if !asked.chat && number == 0 {
                let prompt = choice["index"].as_u64().and_then(|index| usize::try_from(index).ok()).unwrap_or_default();
                piece["prompt_token_ids"] = json!(asked.prompts.get(prompt / asked.choices));
            }
        }
        let missing = usize::from(is_end && matches!(fault, Some(Fault::CountMismatch)));
        let logs = logs.get(at..until.saturating_sub(missing)).unwrap_or_default();
        if asked.logprobs && !logs.is_empty() && !matches!(fault, Some(Fault::MissingLogprobs)) {
            let key = if asked.chat { "content" } else { "token_logprobs" };
            piece["logprobs"] = json!({ key: logs });
        }
        if is_end {
            piece["finish_reason"] = choice["finish_reason"].clone();
            piece["stop_reason"] = choice["stop_reason"].clone();
        }
        at = until;
        pieces.push_back(piece);
    }
    pieces
}

fn chat_pieces(message: &Value) -> Vec<Said> {
    let mut said = Vec::new();
    let silent = |tokens: usize| (json!({"content": ""}), tokens);
    if message["reasoning_content"].is_string() {
        said.push(silent("<think>".len()));
        said.extend(texts(&message["reasoning_content"], "reasoning_content"));
        said.push(silent("</think>".len()));
    }
    said.extend(texts(&message["content"], "content"));
    for (index, call) in message["tool_calls"].as_array().into_iter().flatten().enumerate() {
        let name = call["function"]["name"].as_str().unwrap_or_default();
        let around = render_tool_call(name, "");
        let close = "</tool_call>".len();
        let begun =
            json!({"index": index, "id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}});
        said.push((json!({"tool_calls": [begun]}), around.len() - close));
        for (delta, tokens) in texts(&call["function"]["arguments"], "arguments") {
            said.push((json!({"tool_calls": [{"index": index, "function": delta}]}), tokens));
        }
        said.push(silent(close));
    }
    said
}

/// A text in pieces under `key`.
fn texts(text: &Value, key: &str) -> Vec<Said> {
    let characters: Vec<char> = text.as_str().unwrap_or_default().chars().collect();
    characters
        .chunks(PIECE)
        .map(|piece| {
            let piece: String = piece.iter().collect();
            (json!({ key: piece }), piece.len())
        })
        .collect()
}
