//! Anthropic's Messages (`POST /v1/messages`, version 2023-06-01).

use axum::http::StatusCode;
use serde_json::{Map, Value, json};

use super::answer::{ChatAnswer, Finish, Usage, arguments_text};
use super::fields::{Fields, LeftOut, Unreadable};
use super::{Detail, Dialect, Translated, Voice, fit_tool_choice, lead_with_system, sse};

/// The request as chat completions.
pub(crate) fn request(body: Value) -> Result<Translated, Unreadable> {
    let mut left_out = LeftOut::new();
    let mut fields = Fields::of(body, "")?;
    let mut chat = Map::new();
    let model = fields.text("model")?;
    if let Some(model) = &model {
        chat.insert("model".to_owned(), model.clone().into());
    }
    let mut messages = Vec::new();
    if let Some(system) = fields.take("system") {
        let text = joined_text(system, "system", &mut left_out)?;
        messages.push(json!({"role": "system", "content": text}));
    }
    let list = fields.list("messages")?.ok_or_else(|| Unreadable("messages is missing".to_owned()))?;
    for message in list {
        add_message(message, &mut messages, &mut left_out)?;
    }
    chat.insert("messages".to_owned(), lead_with_system(messages).into());
    if let Some(tools) = fields.list("tools")? {
        let tools: Vec<Value> = tools
            .into_iter()
            .filter_map(|tool| tool_definition(tool, &mut left_out).transpose())
            .collect::<Result<_, _>>()?;
        if !tools.is_empty() {
            chat.insert("tools".to_owned(), tools.into());
        }
    }
    if let Some(choice) = fields.take("tool_choice") {
        add_tool_choice(choice, &mut chat, &mut left_out)?;
    }
    fit_tool_choice(&mut chat, "tool_choice", &mut left_out);
    for (key, chat_key) in [
        ("max_tokens", "max_tokens"),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        ("top_k", "top_k"),
        ("stop_sequences", "stop"),
    ] {
        fields.carry(key, &mut chat, chat_key);
    }
    let stream = fields.is_true("stream");
    fields.finish(&mut left_out);
    let voice = Voice { dialect: Dialect::Messages, stream, model, detail: Detail::Nothing };
    Ok(Translated { chat, left_out, voice })
}

/// A text, or a list of text blocks.
fn joined_text(content: Value, path: &str, left_out: &mut LeftOut) -> Result<String, Unreadable> {
    match content {
        Value::String(text) => Ok(text),
        Value::Array(blocks) => {
            let mut texts = Vec::new();
            for block in blocks {
                let mut block = Fields::of(block, &format!("{path}[]"))?;
                match block.needed_text("type")?.as_str() {
                    "text" => {
                        texts.push(block.needed_text("text")?);
                        block.finish(left_out);
                    }
                    other => {
                        left_out.insert(format!("{path}[].{other}"));
                    }
                }
            }
            Ok(texts.join("\n\n"))
        }
        _ => Err(Unreadable(format!("{path} must be a text or a list of blocks"))),
    }
}

fn add_message(message: Value, messages: &mut Vec<Value>, left_out: &mut LeftOut) -> Result<(), Unreadable> {
    let mut fields = Fields::of(message, "messages[]")?;
    let role = fields.needed_text("role")?;
    let content = fields.take("content").ok_or_else(|| Unreadable("messages[].content is missing".to_owned()))?;
    fields.finish(left_out);
    let blocks = match content {
        Value::String(text) => {
            messages.push(json!({"role": role, "content": text}));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        _ => return Err(Unreadable("messages[].content must be a text or a list of blocks".to_owned())),
    };
    match role.as_str() {
        "assistant" => messages.push(assistant(blocks, left_out)?),
        "user" => add_user(blocks, messages, left_out)?,
        _ => {
            let text = joined_text(Value::Array(blocks), "messages[].content", left_out)?;
            messages.push(json!({"role": role, "content": text}));
        }
    }
    Ok(())
}

const BLOCK: &str = "messages[].content[]";

fn assistant(blocks: Vec<Value>, left_out: &mut LeftOut) -> Result<Value, Unreadable> {
    let (mut texts, mut thoughts, mut calls) = (String::new(), String::new(), Vec::new());
    for block in blocks {
        let mut block = Fields::of(block, BLOCK)?;
        match block.needed_text("type")?.as_str() {
            "text" => texts += &block.needed_text("text")?,
            "thinking" => {
                thoughts += &block.needed_text("thinking")?;
                // Ours: it signs nothing.
                block.take("signature");
            }
            "tool_use" => {
                let arguments = block.take("input").unwrap_or_else(|| json!({}));
                calls.push(json!({"id": block.needed_text("id")?, "type": "function",
                    "function": {"name": block.needed_text("name")?, "arguments": arguments_text(&arguments)}}));
            }
            other => {
                left_out.insert(format!("{BLOCK}.{other}"));
                continue;
            }
        }
        block.finish(left_out);
    }
    let mut message = json!({"role": "assistant", "content": (!texts.is_empty()).then_some(texts)});
    if !thoughts.is_empty() {
        message["reasoning_content"] = thoughts.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    Ok(message)
}

/// Results of tools become messages of their own, before what the user says beside them.
fn add_user(blocks: Vec<Value>, messages: &mut Vec<Value>, left_out: &mut LeftOut) -> Result<(), Unreadable> {
    let mut parts = Vec::new();
    for block in blocks {
        let mut block = Fields::of(block, BLOCK)?;
        match block.needed_text("type")?.as_str() {
            "text" => parts.push(json!({"type": "text", "text": block.needed_text("text")?})),
            "image" => parts.extend(image(&mut block, left_out)?),
            "tool_result" => {
                let id = block.needed_text("tool_use_id")?;
                let (text, images) = tool_result(block.take("content"), left_out)?;
                // Chat completions have no mark for a result that is an error; its text mostly says so.
                let is_error = block.is_true("is_error");
                if is_error && !text.is_empty() {
                    left_out.insert(block.path("is_error"));
                }
                let text = if is_error && text.is_empty() { "error".to_owned() } else { text };
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
                parts.extend(images);
            }
            other => {
                left_out.insert(format!("{BLOCK}.{other}"));
                continue;
            }
        }
        block.finish(left_out);
    }
    let only_text = parts.iter().all(|part| part["type"] == "text");
    match (parts.len(), only_text) {
        (0, _) => {}
        (_, true) => {
            // Templates of text models expect a text, not parts.
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            messages.push(json!({"role": "user", "content": texts.join("\n\n")}));
        }
        (_, false) => messages.push(json!({"role": "user", "content": parts})),
    }
    Ok(())
}

fn image(block: &mut Fields, left_out: &mut LeftOut) -> Result<Option<Value>, Unreadable> {
    let source = block.take("source").ok_or_else(|| Unreadable(format!("{} is missing", block.path("source"))))?;
    let mut source = Fields::of(source, &block.path("source"))?;
    let url = match source.needed_text("type")?.as_str() {
        "base64" => format!("data:{};base64,{}", source.needed_text("media_type")?, source.needed_text("data")?),
        "url" => source.needed_text("url")?,
        other => {
            left_out.insert(source.path(other));
            return Ok(None);
        }
    };
    source.finish(left_out);
    Ok(Some(json!({"type": "image_url", "image_url": {"url": url}})))
}

fn tool_result(content: Option<Value>, left_out: &mut LeftOut) -> Result<(String, Vec<Value>), Unreadable> {
    let blocks = match content {
        None => return Ok((String::new(), Vec::new())),
        Some(Value::Array(blocks)) => blocks,
        Some(other) => return Ok((joined_text(other, BLOCK, left_out)?, Vec::new())),
    };
    let (mut texts, mut images) = (Vec::new(), Vec::new());
    for block in blocks {
        let path = format!("{BLOCK}.content[]");
        let mut block = Fields::of(block, &path)?;
        match block.needed_text("type")?.as_str() {
            "text" => texts.push(block.needed_text("text")?),
            "image" => images.extend(image(&mut block, left_out)?),
            other => {
                left_out.insert(format!("{path}.{other}"));
                continue;
            }
        }
        block.finish(left_out);
    }
    Ok((texts.join("\n\n"), images))
}

/// A function; tools that Anthropic's own servers would run are left out.
fn tool_definition(tool: Value, left_out: &mut LeftOut) -> Result<Option<Value>, Unreadable> {
    let mut tool = Fields::of(tool, "tools[]")?;
    let kind = tool.text("type")?;
    if kind.as_deref().is_some_and(|kind| kind != "custom") {
        left_out.insert(format!("tools[].{}", kind.unwrap_or_default()));
        return Ok(None);
    }
    let mut function = Map::from_iter([("name".to_owned(), tool.needed_text("name")?.into())]);
    tool.carry("description", &mut function, "description");
    tool.carry("input_schema", &mut function, "parameters");
    tool.carry("strict", &mut function, "strict");
    tool.finish(left_out);
    Ok(Some(json!({"type": "function", "function": function})))
}

fn add_tool_choice(choice: Value, chat: &mut Map<String, Value>, left_out: &mut LeftOut) -> Result<(), Unreadable> {
    let mut choice = Fields::of(choice, "tool_choice")?;
    let said = match choice.needed_text("type")?.as_str() {
        "any" => json!("required"),
        "tool" => json!({"type": "function", "function": {"name": choice.needed_text("name")?}}),
        kind @ ("auto" | "none") => json!(kind),
        other => return Err(Unreadable(format!("tool_choice.type {other:?} is none of auto, any, tool and none"))),
    };
    chat.insert("tool_choice".to_owned(), said);
    if choice.is_true("disable_parallel_tool_use") {
        chat.insert("parallel_tool_calls".to_owned(), false.into());
    }
    choice.finish(left_out);
    Ok(())
}

/// The answer as a message.
pub(crate) fn answer(answer: &ChatAnswer, model: Option<&str>, call_id: &str) -> Value {
    let mut content = Vec::new();
    if let Some(thinking) = &answer.reasoning {
        content.push(json!({"type": "thinking", "thinking": thinking, "signature": SIGNATURE}));
    }
    if let Some(text) = &answer.text {
        content.push(json!({"type": "text", "text": text}));
    }
    for call in &answer.tool_calls {
        content.push(json!({"type": "tool_use", "id": call.id, "name": call.name, "input": call.object()}));
    }
    let (stop_reason, stop_sequence) = match &answer.finish {
        Finish::Stop => ("end_turn", None),
        Finish::StopText(text) => ("stop_sequence", Some(text)),
        Finish::Length => ("max_tokens", None),
        Finish::ToolCalls => ("tool_use", None),
        Finish::Filtered => ("refusal", None),
    };
    json!({
        "id": format!("msg_{call_id}"), "type": "message", "role": "assistant",
        "model": model.unwrap_or(&answer.model), "content": content,
        "stop_reason": stop_reason, "stop_sequence": stop_sequence, "usage": usage(answer.usage),
    })
}

/// It signs nothing, but harnesses take thinking without a signature for text.
pub(super) const SIGNATURE: &str = "agl";

fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt.saturating_sub(usage.cached), "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached, "output_tokens": usage.completion,
    })
}

/// The message as a stream of events.
pub(crate) fn stream(message: &Value) -> String {
    let mut events = start(message);
    for (index, block) in message["content"].as_array().into_iter().flatten().enumerate() {
        let (empty, deltas) = block_deltas(block);
        let start = json!({"type": "content_block_start", "index": index, "content_block": empty});
        events += &sse::event("content_block_start", &start);
        for delta in deltas {
            let delta = json!({"type": "content_block_delta", "index": index, "delta": delta});
            events += &sse::event("content_block_delta", &delta);
        }
        events += &sse::event("content_block_stop", &json!({"type": "content_block_stop", "index": index}));
    }
    events + &end(message)
}

/// The event that begins a message.
pub(super) fn start(message: &Value) -> String {
    let mut start = message.clone();
    start["content"] = json!([]);
    start["stop_reason"] = Value::Null;
    start["stop_sequence"] = Value::Null;
    start["usage"]["output_tokens"] = 1.into();
    sse::event("message_start", &json!({"type": "message_start", "message": start}))
}

/// The events that end it.
pub(super) fn end(message: &Value) -> String {
    let delta = json!({"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]});
    let end = json!({"type": "message_delta", "delta": delta, "usage": message["usage"]});
    sse::event("message_delta", &end) + &sse::event("message_stop", &json!({"type": "message_stop"}))
}

/// A block as it begins, and what follows.
fn block_deltas(block: &Value) -> (Value, Vec<Value>) {
    let mut empty = block.clone();
    let deltas = match block["type"].as_str() {
        Some("thinking") => {
            empty["thinking"] = "".into();
            vec![
                json!({"type": "thinking_delta", "thinking": block["thinking"]}),
                json!({"type": "signature_delta", "signature": block["signature"]}),
            ]
        }
        Some("tool_use") => {
            empty["input"] = json!({});
            vec![json!({"type": "input_json_delta", "partial_json": block["input"].to_string()})]
        }
        _ => {
            empty["text"] = "".into();
            vec![json!({"type": "text_delta", "text": block["text"]})]
        }
    };
    (empty, deltas)
}

/// An error in the form that Anthropic's SDKs read.
pub(crate) fn error(status: StatusCode, message: &str) -> Value {
    let kind = match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        504 => "timeout_error",
        400..500 => "invalid_request_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": message}})
}
