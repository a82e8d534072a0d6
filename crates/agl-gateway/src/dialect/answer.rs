//! The parts of a chat completion that other dialects retell.

use std::io::Write;

use serde::Serialize;
use serde_json::ser::Formatter;
use serde_json::{Value, json};

/// The first choice of a chat completion.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ChatAnswer {
    pub(crate) model: String,
    /// Unix seconds.
    pub(crate) created: u64,
    pub(crate) reasoning: Option<String>,
    pub(crate) text: Option<String>,
    pub(crate) tool_calls: Vec<ToolCall>,
    pub(crate) finish: Finish,
    pub(crate) usage: Usage,
}

/// A call of a tool, its arguments as the model wrote them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ToolCall {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) arguments: String,
}

/// Why the model stopped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Finish {
    #[default]
    Stop,
    /// At one of the request's stop texts.
    StopText(String),
    Length,
    ToolCalls,
    Filtered,
}

/// Tokens used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt: u64,
    pub(crate) cached: u64,
    pub(crate) completion: u64,
    pub(crate) reasoning: u64,
}

impl ChatAnswer {
    /// `None` where `body` is no chat completion with at least one choice.
    pub(crate) fn read(body: &Value) -> Option<Self> {
        let choice = body["choices"].as_array()?.first()?;
        Some(Self {
            model: body["model"].as_str().unwrap_or_default().to_owned(),
            created: body["created"].as_u64().unwrap_or_default(),
            usage: Usage::read(&body["usage"]),
            ..Self::of_choice(choice)
        })
    }

    /// One choice, without what belongs to the whole answer.
    pub(crate) fn of_choice(choice: &Value) -> Self {
        let message = &choice["message"];
        let text = |key: &str| message[key].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let tool_calls: Vec<ToolCall> =
            message["tool_calls"].as_array().into_iter().flatten().map(ToolCall::read).collect();
        let finish = match (choice["finish_reason"].as_str(), choice["stop_reason"].as_str()) {
            (Some("length"), _) => Finish::Length,
            (Some("content_filter"), _) => Finish::Filtered,
            _ if !tool_calls.is_empty() => Finish::ToolCalls,
            (_, Some(stop)) => Finish::StopText(stop.to_owned()),
            _ => Finish::Stop,
        };
        Self {
            // vLLM renamed the field; servers of either age answer.
            reasoning: text("reasoning_content").or_else(|| text("reasoning")),
            text: text("content"),
            tool_calls,
            finish,
            ..Self::default()
        }
    }
}

impl ToolCall {
    /// A call of a chat message.
    pub(crate) fn read(call: &Value) -> Self {
        let function = &call["function"];
        let arguments = match &function["arguments"] {
            Value::String(text) => text.clone(),
            Value::Null => "{}".to_owned(),
            other => other.to_string(),
        };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Self { id: text(&call["id"]), name: text(&function["name"]), arguments }
    }

    /// The arguments as an object. What the model wrote that is none is passed on under `invalid_arguments`, for the harness
    /// to refuse in its own words.
    pub(crate) fn object(&self) -> Value {
        if self.arguments.trim().is_empty() {
            return json!({});
        }
        match serde_json::from_str(&self.arguments) {
            Ok(object @ Value::Object(_)) => object,
            _ => json!({"invalid_arguments": self.arguments}),
        }
    }
}

impl Usage {
    fn read(usage: &Value) -> Self {
        let number = |value: &Value| value.as_u64().unwrap_or_default();
        Self {
            prompt: number(&usage["prompt_tokens"]),
            cached: number(&usage["prompt_tokens_details"]["cached_tokens"]),
            completion: number(&usage["completion_tokens"]),
            reasoning: number(&usage["completion_tokens_details"]["reasoning_tokens"]),
        }
    }
}

/// As the model wrote it where it wrote no object; see [`ToolCall::object`].
pub(super) fn arguments_text(arguments: &Value) -> String {
    match arguments.get("invalid_arguments") {
        Some(Value::String(text)) if arguments.as_object().is_some_and(|object| object.len() == 1) => text.clone(),
        _ => spaced_json(arguments),
    }
}

/// JSON as Python's `json.dumps` and chat templates write it, and as most models therefore do: `{"a": 1, "b": [2, 3]}`.
fn spaced_json(value: &Value) -> String {
    struct Spaced;
    impl Formatter for Spaced {
        fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
            if first { Ok(()) } else { writer.write_all(b", ") }
        }
        fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
            if first { Ok(()) } else { writer.write_all(b", ") }
        }
        fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
            writer.write_all(b": ")
        }
    }
    let mut bytes = Vec::new();
    let written = value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced));
    match written.map(|()| String::from_utf8(bytes)) {
        Ok(Ok(text)) => text,
        // Cannot be: a JSON value is always written as UTF-8.
        _ => value.to_string(),
    }
}
