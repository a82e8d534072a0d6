//! Google's `generateContent` and `streamGenerateContent` (Gemini API, v1beta). Its JSON may spell every name in two ways.

use axum::http::StatusCode;
use serde_json::{Map, Value, json};

use super::answer::{ChatAnswer, Finish, ToolCall, arguments_text};
use super::fields::{Fields, LeftOut, Unreadable};
use super::{Detail, Dialect, Translated, Voice, fit_tool_choice};

/// The request as chat completions. Model and streaming stand in the URL.
pub(crate) fn request(body: Value, model: &str, stream: bool, as_events: bool) -> Result<Translated, Unreadable> {
    let mut left_out = LeftOut::new();
    let mut fields = Fields::of(body, "")?;
    let mut chat = Map::from_iter([("model".to_owned(), model.into())]);
    let mut messages = Vec::new();
    if let Some(system) = fields.take_either("systemInstruction", "system_instruction") {
        let text = instruction_text(system, &mut left_out)?;
        messages.push(json!({"role": "system", "content": text}));
    }
    let mut calls = OpenCalls::default();
    let contents = fields.take("contents").ok_or_else(|| Unreadable("contents is missing".to_owned()))?;
    let Value::Array(contents) = contents else { return Err(Unreadable("contents must be a list".to_owned())) };
    for content in contents {
        add_content(content, &mut calls, &mut messages, &mut left_out)?;
    }
    chat.insert("messages".to_owned(), messages.into());
    let mut tools = Vec::new();
    for tool in fields.list("tools")?.into_iter().flatten() {
        let mut tool = Fields::of(tool, "tools[]")?;
        if let Some(Value::Array(declarations)) = tool.take_either("functionDeclarations", "function_declarations") {
            for declaration in declarations {
                tools.push(function(declaration, &mut left_out)?);
            }
        }
        tool.finish(&mut left_out);
    }
    if !tools.is_empty() {
        chat.insert("tools".to_owned(), tools.into());
    }
    if let Some(config) = fields.take_either("toolConfig", "tool_config") {
        add_tool_config(config, &mut chat, &mut left_out)?;
    }
    fit_tool_choice(&mut chat, "toolConfig", &mut left_out);
    if let Some(config) = fields.take_either("generationConfig", "generation_config") {
        add_generation_config(config, &mut chat, &mut left_out)?;
    }
    fields.finish(&mut left_out);
    let detail = if stream && !as_events { Detail::JsonList } else { Detail::Nothing };
    let voice = Voice { dialect: Dialect::Gemini, stream, model: Some(model.to_owned()), detail };
    Ok(Translated { chat, left_out, voice })
}

/// A request to count tokens: the contents themselves, or a whole request under `generateContentRequest`.
pub(crate) fn count_request(body: Value, model: &str) -> Result<Translated, Unreadable> {
    let inner = body.get("generateContentRequest").or_else(|| body.get("generate_content_request")).cloned();
    request(inner.unwrap_or(body), model, false, false)
}

/// Calls of functions that wait for their response. The interface may leave ids out: then a response answers the oldest call
/// of its name.
#[derive(Default)]
struct OpenCalls {
    count: usize,
    open: Vec<(String, String)>,
}

impl OpenCalls {
    fn begin(&mut self, id: Option<String>, name: &str) -> String {
        let id = id.unwrap_or_else(|| format!("call_{}", self.count));
        self.count += 1;
        self.open.push((id.clone(), name.to_owned()));
        id
    }

    fn end(&mut self, id: Option<String>, name: &str) -> String {
        let matches = |(open, of): &(String, String)| id.as_ref().map_or(of == name, |id| id == open);
        match self.open.iter().position(matches) {
            Some(position) => self.open.remove(position).0,
            None => id.unwrap_or_else(|| format!("call_of_{name}")),
        }
    }
}

fn instruction_text(system: Value, left_out: &mut LeftOut) -> Result<String, Unreadable> {
    if let Value::String(text) = system {
        return Ok(text);
    }
    let mut system = Fields::of(system, "systemInstruction")?;
    system.take("role");
    let mut texts = Vec::new();
    for part in system.list("parts")?.into_iter().flatten() {
        let mut part = Fields::of(part, "systemInstruction.parts[]")?;
        texts.extend(part.text("text")?);
        part.finish(left_out);
    }
    system.finish(left_out);
    Ok(texts.join("\n\n"))
}

const PART: &str = "contents[].parts[]";

fn add_content(
    content: Value,
    calls: &mut OpenCalls,
    messages: &mut Vec<Value>,
    left_out: &mut LeftOut,
) -> Result<(), Unreadable> {
    let mut content = Fields::of(content, "contents[]")?;
    let is_model = content.text("role")?.as_deref() == Some("model");
    let parts = content.list("parts")?.unwrap_or_default();
    content.finish(left_out);
    let (mut said, mut texts, mut thoughts, mut tool_calls) = (Vec::new(), String::new(), String::new(), Vec::new());
    for part in parts {
        let mut part = Fields::of(part, PART)?;
        let is_thought = part.is_true("thought");
        // Ours, and empty.
        part.take_either("thoughtSignature", "thought_signature");
        if let Some(text) = part.text("text")? {
            match (is_model, is_thought) {
                (true, true) => thoughts += &text,
                (true, false) => texts += &text,
                (false, _) => said.push(json!({"type": "text", "text": text})),
            }
        }
        if let Some(call) = part.take_either("functionCall", "function_call") {
            let mut call = Fields::of(call, &format!("{PART}.functionCall"))?;
            let name = call.needed_text("name")?;
            let id = calls.begin(call.text("id")?, &name);
            let arguments = call.take("args").unwrap_or_else(|| json!({}));
            tool_calls.push(json!({"id": id, "type": "function",
                "function": {"name": name, "arguments": arguments_text(&arguments)}}));
            call.finish(left_out);
        }
        if let Some(response) = part.take_either("functionResponse", "function_response") {
            let mut response = Fields::of(response, &format!("{PART}.functionResponse"))?;
            let name = response.needed_text("name")?;
            let id = calls.end(response.text("id")?, &name);
            let text = response_text(response.take("response").unwrap_or_else(|| json!({})));
            messages.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
            response.finish(left_out);
        }
        if let Some(data) = part.take_either("inlineData", "inline_data") {
            let mut data = Fields::of(data, &format!("{PART}.inlineData"))?;
            let kind = data.take_either("mimeType", "mime_type").and_then(|kind| kind.as_str().map(str::to_owned));
            let (kind, bytes) = (kind.unwrap_or_default(), data.needed_text("data")?);
            if kind.starts_with("image/") && !is_model {
                let url = format!("data:{kind};base64,{bytes}");
                said.push(json!({"type": "image_url", "image_url": {"url": url}}));
            } else {
                left_out.insert(format!("{PART}.inlineData.{kind}"));
            }
            data.finish(left_out);
        }
        part.finish(left_out);
    }
    if is_model {
        let mut message = json!({"role": "assistant", "content": (!texts.is_empty()).then_some(texts)});
        if !thoughts.is_empty() {
            message["reasoning_content"] = thoughts.into();
        }
        if !tool_calls.is_empty() {
            message["tool_calls"] = tool_calls.into();
        }
        messages.push(message);
    } else if said.iter().all(|part| part["type"] == "text") {
        let texts: Vec<&str> = said.iter().filter_map(|part| part["text"].as_str()).collect();
        if !texts.is_empty() {
            messages.push(json!({"role": "user", "content": texts.join("\n\n")}));
        }
    } else {
        messages.push(json!({"role": "user", "content": said}));
    }
    Ok(())
}

/// What a function returned. SDKs wrap a plain text as `{"result": …}` or `{"output": …}`.
fn response_text(response: Value) -> String {
    if let Value::Object(object) = &response
        && object.len() == 1
        && let Some(Value::String(text)) = object.get("result").or_else(|| object.get("output"))
    {
        return text.clone();
    }
    response.to_string()
}

fn function(declaration: Value, left_out: &mut LeftOut) -> Result<Value, Unreadable> {
    let mut fields = Fields::of(declaration, "tools[].functionDeclarations[]")?;
    let mut function = Map::from_iter([("name".to_owned(), fields.needed_text("name")?.into())]);
    fields.carry("description", &mut function, "description");
    let schema = fields.take_either("parametersJsonSchema", "parameters_json_schema");
    if let Some(schema) = schema.or_else(|| fields.take("parameters").map(json_schema)) {
        function.insert("parameters".to_owned(), schema);
    }
    fields.finish(left_out);
    Ok(json!({"type": "function", "function": function}))
}

/// Google's schemas are JSON schemas with their types in capitals.
fn json_schema(schema: Value) -> Value {
    match schema {
        Value::Object(object) => Value::Object(
            object
                .into_iter()
                .map(|(key, value)| match value {
                    Value::String(kind) if key == "type" => (key, kind.to_lowercase().into()),
                    value => (key, json_schema(value)),
                })
                .collect(),
        ),
        Value::Array(list) => list.into_iter().map(json_schema).collect(),
        other => other,
    }
}

fn add_tool_config(config: Value, chat: &mut Map<String, Value>, left_out: &mut LeftOut) -> Result<(), Unreadable> {
    let mut config = Fields::of(config, "toolConfig")?;
    if let Some(calling) = config.take_either("functionCallingConfig", "function_calling_config") {
        let mut calling = Fields::of(calling, "toolConfig.functionCallingConfig")?;
        let allowed = calling.take_either("allowedFunctionNames", "allowed_function_names");
        let names = allowed.as_ref().and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let mode = calling.text("mode")?.unwrap_or_default();
        let choice = match (mode.as_str(), names) {
            ("ANY", [name]) => json!({"type": "function", "function": {"name": name}}),
            ("ANY", _) => json!("required"),
            ("NONE", _) => json!("none"),
            _ => json!("auto"),
        };
        let is_said = names.is_empty() || (mode == "ANY" && names.len() == 1);
        if !is_said {
            left_out.insert(calling.path("allowedFunctionNames"));
        }
        chat.insert("tool_choice".to_owned(), choice);
        calling.finish(left_out);
    }
    config.finish(left_out);
    Ok(())
}

fn add_generation_config(
    config: Value,
    chat: &mut Map<String, Value>,
    left_out: &mut LeftOut,
) -> Result<(), Unreadable> {
    let mut config = Fields::of(config, "generationConfig")?;
    for (camel, snake, chat_key) in [
        ("temperature", "temperature", "temperature"),
        ("topP", "top_p", "top_p"),
        ("topK", "top_k", "top_k"),
        ("maxOutputTokens", "max_output_tokens", "max_tokens"),
        ("stopSequences", "stop_sequences", "stop"),
        ("candidateCount", "candidate_count", "n"),
        ("seed", "seed", "seed"),
        ("presencePenalty", "presence_penalty", "presence_penalty"),
        ("frequencyPenalty", "frequency_penalty", "frequency_penalty"),
    ] {
        if let Some(value) = config.take_either(camel, snake) {
            chat.insert(chat_key.to_owned(), value);
        }
    }
    let kind = config.take_either("responseMimeType", "response_mime_type");
    let schema = config
        .take_either("responseJsonSchema", "response_json_schema")
        .or_else(|| config.take_either("responseSchema", "response_schema").map(json_schema));
    if let Some(schema) = schema {
        let format = json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}});
        chat.insert("response_format".to_owned(), format);
    } else if kind.as_ref().is_some_and(|kind| kind == "application/json") {
        chat.insert("response_format".to_owned(), json!({"type": "json_object"}));
    }
    config.finish(left_out);
    Ok(())
}

/// The answer, or `None` where it has no choices.
pub(crate) fn answer(whole: &Value, model: Option<&str>, call_id: &str) -> Option<Value> {
    let first = ChatAnswer::read(whole)?;
    let candidates: Vec<Value> = whole["choices"].as_array()?.iter().enumerate().map(candidate).collect();
    let usage = first.usage;
    let mut counts = json!({
        "promptTokenCount": usage.prompt, "candidatesTokenCount": usage.completion.saturating_sub(usage.reasoning),
        "totalTokenCount": usage.prompt.saturating_add(usage.completion),
    });
    if usage.cached > 0 {
        counts["cachedContentTokenCount"] = usage.cached.into();
    }
    if usage.reasoning > 0 {
        counts["thoughtsTokenCount"] = usage.reasoning.into();
    }
    Some(json!({
        "candidates": candidates, "usageMetadata": counts, "modelVersion": model.unwrap_or(&first.model), "responseId": call_id,
    }))
}

fn candidate((index, choice): (usize, &Value)) -> Value {
    let answer = ChatAnswer::of_choice(choice);
    let mut parts = Vec::new();
    if let Some(thought) = &answer.reasoning {
        parts.push(json!({"text": thought, "thought": true}));
    }
    if let Some(text) = &answer.text {
        parts.push(json!({"text": text}));
    }
    parts.extend(answer.tool_calls.iter().map(function_call));
    let finish = match answer.finish {
        Finish::Length => "MAX_TOKENS",
        Finish::Filtered => "SAFETY",
        Finish::Stop | Finish::StopText(_) | Finish::ToolCalls => "STOP",
    };
    json!({"content": {"role": "model", "parts": parts}, "finishReason": finish, "index": index})
}

fn function_call(call: &ToolCall) -> Value {
    json!({"functionCall": {"id": call.id, "name": call.name, "args": call.object()}})
}

/// An error in the form that Google's SDKs read.
pub(crate) fn error(status: StatusCode, message: &str) -> Value {
    let name = match status.as_u16() {
        400 | 422 => "INVALID_ARGUMENT",
        401 => "UNAUTHENTICATED",
        403 => "PERMISSION_DENIED",
        404 => "NOT_FOUND",
        409 => "ABORTED",
        429 => "RESOURCE_EXHAUSTED",
        503 => "UNAVAILABLE",
        504 => "DEADLINE_EXCEEDED",
        _ => "INTERNAL",
    };
    json!({"error": {"code": status.as_u16(), "message": message, "status": name}})
}
