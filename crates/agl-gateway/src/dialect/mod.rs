//! What harnesses speak, and what the inference servers understand: every dialect becomes chat completions on the way in and
//! is itself again on the way out.
//!
//! * [`fields`] — takes a request apart and names what no one took.
//! * [`chat`], [`responses`], [`messages`], [`gemini`] — one dialect each: the request, the whole answer, the streamed one.
//! * [`answer`] — the parts of a chat completion that the others retell.
//! * [`sse`] — server-sent events.
//!
//! A stream is made from the complete answer, because servers are known to lose token ids when they stream.

use axum::http::StatusCode;
use bytes::Bytes;
use serde_json::{Map, Value, json};

pub(crate) mod answer;
pub(crate) mod chat;
pub(crate) mod fields;
pub(crate) mod gemini;
pub(crate) mod live;
pub(crate) mod messages;
pub(crate) mod responses;
pub(crate) mod sse;

use crate::error::ApiError;
use answer::ChatAnswer;
use fields::{LeftOut, Unreadable};

/// What a harness speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// OpenAI's chat completions, which pass as they are.
    Chat,
    /// OpenAI's completions, which pass as they are.
    Completions,
    /// OpenAI's Responses.
    Responses,
    /// Anthropic's Messages.
    Messages,
    /// Google's `generateContent`.
    Gemini,
}

/// A request in the words of chat completions.
#[derive(Debug)]
pub(crate) struct Translated {
    pub(crate) chat: Map<String, Value>,
    /// What of it could not be said.
    pub(crate) left_out: LeftOut,
    pub(crate) voice: Voice,
}

/// How the answer is to be told.
#[derive(Clone, Debug)]
pub(crate) struct Voice {
    pub(crate) dialect: Dialect,
    /// As server-sent events.
    pub(crate) stream: bool,
    /// The model's name as the harness wrote it, which it may want to read again.
    pub(crate) model: Option<String>,
    /// What only the dialect itself needs.
    pub(crate) detail: Detail,
}

/// See [`Voice::detail`].
#[derive(Clone, Debug, Default)]
pub(crate) enum Detail {
    #[default]
    Nothing,
    /// Chat completions and completions: end the stream with the usage.
    IncludeUsage,
    /// Responses: what the answer repeats of the request, and which tools take free text.
    Responses(Box<responses::Echo>),
    /// Gemini: a stream is a JSON list unless `alt=sse`.
    JsonList,
}

/// An answer in the harness's own words.
pub(crate) struct Told {
    pub(crate) content_type: &'static str,
    pub(crate) body: Bytes,
}

const JSON: &str = "application/json";

impl Dialect {
    /// The name in events and logs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Chat => "openai.chat",
            Self::Completions => "openai.completions",
            Self::Responses => "openai.responses",
            Self::Messages => "anthropic.messages",
            Self::Gemini => "gemini",
        }
    }

    /// An error in the form that the dialect's clients read. OpenAI's own two keep the form of Agent Lightning v1.0.
    pub(crate) fn error(self, error: ApiError) -> ApiError {
        let status = error.status;
        let message = || message_of(&error.body);
        match self {
            Self::Chat | Self::Completions => error,
            Self::Responses => {
                let body =
                    json!({"error": {"message": message(), "type": openai_type(status), "param": null, "code": null}});
                error.say(body)
            }
            Self::Messages => {
                let body = messages::error(status, &message());
                error.say(body)
            }
            Self::Gemini => {
                let body = gemini::error(status, &message());
                error.say(body)
            }
        }
    }
}

impl Voice {
    /// True where the server's answer is passed on byte for byte.
    pub(crate) fn passes_whole(&self) -> bool {
        !self.stream && matches!(self.dialect, Dialect::Chat | Dialect::Completions)
    }

    /// Retells a complete answer of the server; `None` where it is no chat completion, or has no choice.
    pub(crate) fn tell(&self, answer: &[u8], call_id: &str) -> Option<Told> {
        let whole: Value = serde_json::from_slice(answer).ok()?;
        let streamed = |body: String| Told { content_type: sse::CONTENT_TYPE, body: body.into() };
        let plain = |body: &Value| Told { content_type: JSON, body: body.to_string().into() };
        Some(match self.dialect {
            Dialect::Chat | Dialect::Completions => {
                streamed(chat::stream(&whole, self.dialect, matches!(self.detail, Detail::IncludeUsage))?)
            }
            Dialect::Responses => {
                let Detail::Responses(echo) = &self.detail else { return None };
                let response = responses::answer(&ChatAnswer::read(&whole)?, echo, call_id);
                if self.stream { streamed(responses::stream(&response)) } else { plain(&response) }
            }
            Dialect::Messages => {
                let message = messages::answer(&ChatAnswer::read(&whole)?, self.model.as_deref(), call_id);
                if self.stream { streamed(messages::stream(&message)) } else { plain(&message) }
            }
            Dialect::Gemini => {
                let content = gemini::answer(&whole, self.model.as_deref(), call_id)?;
                match (self.stream, &self.detail) {
                    (true, Detail::JsonList) => plain(&json!([content])),
                    (true, _) => streamed(sse::data(&content)),
                    (false, _) => plain(&content),
                }
            }
        })
    }

    /// What is sent now and then while a stream waits, so that nobody on the way takes the connection for dead.
    pub(crate) fn keep_alive(&self) -> &'static str {
        match self.dialect {
            Dialect::Messages => "event: ping\ndata: {\"type\": \"ping\"}\n\n",
            // Google's clients take a comment for an answer. An empty line means nothing, in a list of events or of JSON.
            Dialect::Gemini => "\n",
            _ => ": waiting for the model\n\n",
        }
    }

    /// An error as an event of a stream that has begun.
    pub(crate) fn stream_error(&self, error: &ApiError) -> String {
        let error = self.dialect.error(error.clone());
        match self.dialect {
            Dialect::Chat | Dialect::Completions => sse::data(&json!({"error": {
                "message": message_of(&error.body), "type": openai_type(error.status), "param": null, "code": error.status.as_u16()
            }})),
            Dialect::Responses => sse::event(
                "error",
                &json!({"type": "error", "sequence_number": 0, "code": error.status.as_u16().to_string(),
                        "message": message_of(&error.body), "param": null}),
            ),
            Dialect::Messages => sse::event("error", &error.body),
            Dialect::Gemini if matches!(self.detail, Detail::JsonList) => json!([error.body]).to_string(),
            Dialect::Gemini => sse::data(&error.body),
        }
    }
}

/// Leaves out what cannot be chosen: a choice among no tools, or of a tool that was itself left out. Servers refuse both.
pub(crate) fn fit_tool_choice(chat: &mut Map<String, Value>, path: &str, left_out: &mut LeftOut) {
    let tools = chat.get("tools").and_then(Value::as_array).into_iter().flatten();
    let names: Vec<Value> = tools.map(|tool| tool["function"]["name"].clone()).collect();
    let is_possible = match chat.get("tool_choice") {
        None => true,
        Some(Value::String(_)) => !names.is_empty(),
        Some(choice) => names.contains(&choice["function"]["name"]),
    };
    if !is_possible {
        let choice = chat.shift_remove("tool_choice");
        // Without tools these two say what is so anyway.
        if !choice.is_some_and(|choice| choice == "auto" || choice == "none") {
            left_out.insert(path.to_owned());
        }
    }
    if names.is_empty() {
        chat.shift_remove("parallel_tool_calls");
    }
}

/// One system message, first: templates refuse others. What the system says later is the user's then.
pub(crate) fn lead_with_system(messages: Vec<Value>) -> Vec<Value> {
    let is_system = |message: &Value| message["role"] == "system" && message["content"].is_string();
    let first = messages.iter().position(|message| !is_system(message)).unwrap_or(messages.len());
    let texts: Vec<&str> = messages[..first].iter().filter_map(|message| message["content"].as_str()).collect();
    let mut led = Vec::with_capacity(messages.len());
    if !texts.is_empty() {
        led.push(json!({"role": "system", "content": texts.join("\n\n")}));
    }
    led.extend(messages.into_iter().skip(first).map(|mut message| {
        if message["role"] == "system" {
            message["role"] = "user".into();
        }
        message
    }));
    led
}

/// The text of an error, wherever a server or the gateway itself put it.
pub(crate) fn message_of(body: &Value) -> String {
    let places = [&body["error"]["message"], &body["message"], &body["detail"], &body["error"]];
    let found = places.into_iter().find_map(Value::as_str);
    found.map_or_else(|| body.to_string(), str::to_owned)
}

fn openai_type(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "server_error",
    }
}

impl From<Unreadable> for ApiError {
    fn from(Unreadable(what): Unreadable) -> Self {
        Self::bad_request(what)
    }
}
