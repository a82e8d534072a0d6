//! OpenAI's Responses (`POST /v1/responses`), without the state that OpenAI's own servers keep: every request carries its
//! whole input.

use serde_json::{Map, Value, json};

use super::answer::{ChatAnswer, Finish, ToolCall};
use super::fields::{Fields, LeftOut, Unreadable};
use super::{Detail, Dialect, Translated, Voice, fit_tool_choice, lead_with_system};
mod events;

pub(crate) use events::{Events, stream};

/// What the answer repeats of the request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Echo {
    /// As the request had them.
    repeated: Map<String, Value>,
    /// Tools that take free text: functions of one text for the model.
    free_text: Vec<String>,
    /// The harness sends thoughts back only if they are sealed.
    seals_thoughts: bool,
}

/// What a harness includes that cannot read thoughts but wants them to stay in the conversation (Codex).
const SEALED_THOUGHTS: &str = "reasoning.encrypted_content";
/// Marks a thought that we have sealed, which is to say: written there.
const SEAL: &str = "agl:";

/// The argument that holds what a free-text tool is to be given.
const FREE_TEXT: &str = "input";

const REPEATED: [&str; 10] = [
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
];

/// The request as chat completions.
pub(crate) fn request(body: Value) -> Result<Translated, Unreadable> {
    let mut left_out = LeftOut::new();
    let repeated = REPEATED.iter().filter_map(|&key| Some((key.to_owned(), body.get(key)?.clone()))).collect();
    let mut fields = Fields::of(body, "")?;
    for stateful in ["previous_response_id", "conversation"] {
        if fields.take(stateful).is_some() {
            return Err(Unreadable(format!(
                "{stateful} asks for a conversation kept by the server: send the whole input instead (`store: false` in most SDKs)"
            )));
        }
    }
    if fields.is_true("background") {
        return Err(Unreadable("background: responses are not kept, so that one cannot be fetched later".to_owned()));
    }
    let mut chat = Map::new();
    let model = fields.text("model")?;
    if let Some(model) = &model {
        chat.insert("model".to_owned(), model.clone().into());
    }
    let mut conversation = Conversation::default();
    if let Some(instructions) = fields.text("instructions")? {
        conversation.messages.push(json!({"role": "system", "content": instructions}));
    }
    match fields.take("input") {
        Some(Value::String(text)) => conversation.messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => {
            for item in items {
                conversation.add(item, &mut left_out)?;
            }
        }
        _ => return Err(Unreadable("input must be a text or a list of items".to_owned())),
    }
    chat.insert("messages".to_owned(), lead_with_system(conversation.messages).into());
    let mut echo = Echo { repeated, ..Echo::default() };
    if let Some(include) = fields.list("include")? {
        for what in include {
            match what.as_str() {
                Some(SEALED_THOUGHTS) => echo.seals_thoughts = true,
                other => {
                    left_out.insert(format!("include[].{}", other.unwrap_or("?")));
                }
            }
        }
    }
    let mut tools = Vec::new();
    for tool in fields.list("tools")?.into_iter().flatten() {
        tools.extend(tool_definition(tool, &mut echo, &mut left_out)?);
    }
    if !tools.is_empty() {
        chat.insert("tools".to_owned(), tools.into());
    }
    if let Some(choice) = fields.take("tool_choice") {
        match tool_choice(&choice) {
            Some(said) => drop(chat.insert("tool_choice".to_owned(), said)),
            None => drop(left_out.insert("tool_choice".to_owned())),
        }
    }
    fields.carry("parallel_tool_calls", &mut chat, "parallel_tool_calls");
    fit_tool_choice(&mut chat, "tool_choice", &mut left_out);
    for (key, chat_key) in [("max_output_tokens", "max_tokens"), ("temperature", "temperature"), ("top_p", "top_p")] {
        fields.carry(key, &mut chat, chat_key);
    }
    if let Some(text) = fields.take("text") {
        let mut text = Fields::of(text, "text")?;
        match text.take("format").map(response_format) {
            Some(Format::Said(format)) => drop(chat.insert("response_format".to_owned(), format)),
            Some(Format::Unknown) => drop(left_out.insert("text.format".to_owned())),
            Some(Format::Plain) | None => {}
        }
        text.finish(&mut left_out);
    }
    if let Some(reasoning) = fields.take("reasoning") {
        let mut reasoning = Fields::of(reasoning, "reasoning")?;
        reasoning.carry("effort", &mut chat, "reasoning_effort");
        reasoning.finish(&mut left_out);
    }
    let stream = fields.is_true("stream");
    // Nothing is stored on either side of this answer: `store` changes nothing.
    fields.take("store");
    fields.finish(&mut left_out);
    let voice = Voice { dialect: Dialect::Responses, stream, model, detail: Detail::Responses(Box::new(echo)) };
    Ok(Translated { chat, left_out, voice })
}

/// Items one after the other become messages; what the assistant thought, said and called in one turn becomes one.
#[derive(Default)]
struct Conversation {
    messages: Vec<Value>,
    /// The last message is an assistant's that may still grow.
    is_open: bool,
}

impl Conversation {
    fn add(&mut self, item: Value, left_out: &mut LeftOut) -> Result<(), Unreadable> {
        let mut fields = Fields::of(item, "input[]")?;
        let kind = fields.text("type")?.unwrap_or_else(|| "message".to_owned());
        // The items' own ids and states name nothing that a model reads.
        for key in ["id", "status", "phase"] {
            fields.take(key);
        }
        match kind.as_str() {
            "message" => self.add_message(&mut fields, left_out)?,
            "reasoning" => {
                let thought = reasoning_text(&mut fields, left_out)?;
                if !thought.is_empty() {
                    let before = self.assistant()["reasoning_content"].as_str().unwrap_or_default().to_owned();
                    self.assistant()["reasoning_content"] = (before + &thought).into();
                }
            }
            "function_call" => {
                let arguments = fields.text("arguments")?.unwrap_or_default();
                self.add_call(&mut fields, arguments)?;
            }
            "custom_tool_call" => {
                let arguments = json!({FREE_TEXT: fields.text("input")?.unwrap_or_default()}).to_string();
                self.add_call(&mut fields, arguments)?;
            }
            "function_call_output" | "custom_tool_call_output" => {
                let id = fields.needed_text("call_id")?;
                let output = fields.take("output").unwrap_or_default();
                let (text, images) = parts(output, "input[].output", left_out)?;
                self.is_open = false;
                self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
                if !images.is_empty() {
                    self.messages.push(json!({"role": "user", "content": images}));
                }
            }
            "item_reference" => {
                return Err(Unreadable("input[].item_reference: items are not kept; send the item itself".to_owned()));
            }
            other => {
                left_out.insert(format!("input[].{other}"));
                return Ok(());
            }
        }
        fields.finish(left_out);
        Ok(())
    }

    fn add_message(&mut self, fields: &mut Fields, left_out: &mut LeftOut) -> Result<(), Unreadable> {
        let role = fields.needed_text("role")?;
        let content = fields.take("content").unwrap_or_default();
        let (text, images) = parts(content, "input[].content", left_out)?;
        if role == "assistant" {
            let before = self.assistant()["content"].as_str().unwrap_or_default().to_owned();
            self.assistant()["content"] = (before + &text).into();
            return Ok(());
        }
        self.is_open = false;
        // Chat templates know no developer.
        let role = if role == "developer" { "system".to_owned() } else { role };
        let content = if images.is_empty() {
            json!(text)
        } else {
            let said = (!text.is_empty()).then(|| json!({"type": "text", "text": text}));
            said.into_iter().chain(images).collect()
        };
        self.messages.push(json!({"role": role, "content": content}));
        Ok(())
    }

    fn add_call(&mut self, fields: &mut Fields, arguments: String) -> Result<(), Unreadable> {
        let call = json!({"id": fields.needed_text("call_id")?, "type": "function",
            "function": {"name": fields.needed_text("name")?, "arguments": arguments}});
        match self.assistant()["tool_calls"].as_array_mut() {
            Some(calls) => calls.push(call),
            None => self.assistant()["tool_calls"] = json!([call]),
        }
        Ok(())
    }

    /// The assistant's message that grows, begun if there is none.
    fn assistant(&mut self) -> &mut Value {
        if !self.is_open || self.messages.is_empty() {
            self.messages.push(json!({"role": "assistant", "content": null}));
            self.is_open = true;
        }
        let last = self.messages.len() - 1;
        &mut self.messages[last]
    }
}

/// The texts of a content, and its images as parts of a chat message.
fn parts(content: Value, path: &str, left_out: &mut LeftOut) -> Result<(String, Vec<Value>), Unreadable> {
    let list = match content {
        Value::String(text) => return Ok((text, Vec::new())),
        Value::Null => return Ok(Default::default()),
        Value::Array(list) => list,
        other => return Ok((other.to_string(), Vec::new())),
    };
    let (mut text, mut images) = (String::new(), Vec::new());
    for part in list {
        let mut part = Fields::of(part, &format!("{path}[]"))?;
        match part.needed_text("type")?.as_str() {
            "input_text" | "output_text" | "text" => {
                text += &part.needed_text("text")?;
                for empty in ["annotations", "logprobs"] {
                    part.take(empty);
                }
            }
            "refusal" => text += &part.needed_text("refusal")?,
            "input_image" => match part.text("image_url")? {
                Some(url) => images.push(json!({"type": "image_url", "image_url": {"url": url}})),
                None => {
                    left_out.insert(part.path("input_image"));
                }
            },
            other => {
                left_out.insert(format!("{path}[].{other}"));
                continue;
            }
        }
        part.finish(left_out);
    }
    Ok((text, images))
}

/// The thought itself, where the answer was ours; a summary otherwise.
fn reasoning_text(fields: &mut Fields, left_out: &mut LeftOut) -> Result<String, Unreadable> {
    let mut texts = |list: Option<Value>, path: &str| -> Result<String, Unreadable> {
        let mut text = String::new();
        for part in list.and_then(|list| list.as_array().cloned()).into_iter().flatten() {
            let mut part = Fields::of(part, path)?;
            part.take("type");
            text += &part.text("text")?.unwrap_or_default();
            part.finish(left_out);
        }
        Ok(text)
    };
    let sealed = fields.text("encrypted_content")?;
    let sealed = sealed.as_deref().and_then(|text| text.strip_prefix(SEAL)).map(str::to_owned);
    let (summary, content) = (fields.take("summary"), fields.take("content"));
    let content = texts(content, "input[].content[]")?;
    let summary = texts(summary, "input[].summary[]")?;
    Ok(match sealed {
        _ if !content.is_empty() => content,
        Some(thought) => thought,
        None => summary,
    })
}

fn tool_definition(tool: Value, echo: &mut Echo, left_out: &mut LeftOut) -> Result<Option<Value>, Unreadable> {
    let mut fields = Fields::of(tool, "tools[]")?;
    let kind = fields.needed_text("type")?;
    let mut function = Map::new();
    match kind.as_str() {
        "function" => {
            function.insert("name".to_owned(), fields.needed_text("name")?.into());
            for key in ["description", "parameters", "strict"] {
                fields.carry(key, &mut function, key);
            }
        }
        "custom" => {
            let name = fields.needed_text("name")?;
            echo.free_text.push(name.clone());
            function.insert("name".to_owned(), name.into());
            fields.carry("description", &mut function, "description");
            let schema =
                json!({"type": "object", "properties": {FREE_TEXT: {"type": "string"}}, "required": [FREE_TEXT]});
            function.insert("parameters".to_owned(), schema);
        }
        other => {
            left_out.insert(format!("tools[].{other}"));
            return Ok(None);
        }
    }
    fields.finish(left_out);
    Ok(Some(json!({"type": "function", "function": function})))
}

/// `None` where chat completions have no such choice.
fn tool_choice(choice: &Value) -> Option<Value> {
    match (choice, choice["type"].as_str()) {
        (Value::String(_), _) => Some(choice.clone()),
        (_, Some("function" | "custom")) => Some(json!({"type": "function", "function": {"name": choice["name"]}})),
        _ => None,
    }
}

enum Format {
    /// Text, which needs no word.
    Plain,
    Said(Value),
    Unknown,
}

/// `text.format` names the schema beside its type; chat completions put it one level down.
fn response_format(format: Value) -> Format {
    let Value::Object(mut fields) = format else { return Format::Unknown };
    let kind = fields.shift_remove("type");
    match kind.as_ref().and_then(Value::as_str) {
        Some("text") => Format::Plain,
        Some("json_schema") => Format::Said(json!({"type": "json_schema", "json_schema": fields})),
        Some("json_object") => Format::Said(json!({"type": "json_object"})),
        _ => Format::Unknown,
    }
}

/// The answer as a response object.
pub(crate) fn answer(answer: &ChatAnswer, echo: &Echo, call_id: &str) -> Value {
    let mut output = Vec::new();
    if let Some(text) = &answer.reasoning {
        output.push(thought(text, call_id, "completed", echo));
    }
    let cut = match answer.finish {
        Finish::Length => Some("max_output_tokens"),
        Finish::Filtered => Some("content_filter"),
        Finish::Stop | Finish::StopText(_) | Finish::ToolCalls => None,
    };
    let status = if cut.is_some() { "incomplete" } else { "completed" };
    // An answer of nothing at all is still a message.
    if answer.text.is_some() || answer.tool_calls.is_empty() {
        output.push(message(answer.text.as_deref().unwrap_or_default(), call_id, status));
    }
    let calls = answer.tool_calls.iter().enumerate();
    output.extend(calls.map(|(index, call)| tool_call(call, &format!("{call_id}_{index}"), status, echo)));
    let usage = answer.usage;
    let mut response = json!({
        "id": format!("resp_{call_id}"), "object": "response", "created_at": answer.created, "status": status,
        "error": null, "incomplete_details": cut.map(|reason| json!({"reason": reason})),
        "instructions": null, "max_output_tokens": null, "metadata": {}, "model": answer.model, "output": output,
        "parallel_tool_calls": true, "previous_response_id": null, "reasoning": {"effort": null, "summary": null},
        "store": false, "temperature": null, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
        "top_p": null, "truncation": "disabled",
        "usage": {
            "input_tokens": usage.prompt, "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion, "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt.saturating_add(usage.completion),
        },
    });
    for (key, value) in &echo.repeated {
        if !value.is_null() {
            response[key.as_str()] = value.clone();
        }
    }
    response
}

pub(super) fn thought(text: &str, id: &str, status: &str, echo: &Echo) -> Value {
    let mut item = json!({"id": format!("rs_{id}"), "type": "reasoning", "summary": [],
        "content": [{"type": "reasoning_text", "text": text}], "status": status});
    if echo.seals_thoughts {
        item["encrypted_content"] = format!("{SEAL}{text}").into();
    }
    item
}

pub(super) fn message(text: &str, id: &str, status: &str) -> Value {
    json!({"id": format!("msg_{id}"), "type": "message", "status": status, "role": "assistant",
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]})
}

pub(super) fn tool_call(call: &ToolCall, id: &str, status: &str, echo: &Echo) -> Value {
    let object = call.object();
    match object.get(FREE_TEXT).and_then(Value::as_str) {
        Some(text) if echo.free_text.contains(&call.name) => json!({"id": format!("ctc_{id}"),
            "type": "custom_tool_call", "status": status, "call_id": call.id, "name": call.name, "input": text}),
        _ => json!({"id": format!("fc_{id}"), "type": "function_call", "status": status,
            "arguments": call.arguments, "call_id": call.id, "name": call.name}),
    }
}

impl Echo {
    /// True for a tool that takes free text.
    pub(super) fn takes_free_text(&self, tool: &str) -> bool {
        self.free_text.iter().any(|name| name == tool)
    }
}
