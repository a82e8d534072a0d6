//! Answers told while they come: each chunk of the server's stream in the harness's own words at once.
//!
//! What ends an answer for its reader — the finish reason, the usage, the closing event — is kept for [`Teller::finish`], so that it
//! can leave after the call has been recorded. Every dialect tells the same in pieces as it would tell whole, but for arguments of
//! tools: Messages and Gemini know them as objects only, so that a call is told there once its arguments are complete.

use serde_json::Value;

use super::{Detail, Dialect, Voice};
use crate::error::ApiError;

mod chat;
mod gemini;
mod messages;
mod responses;

/// Tells one answer.
pub(crate) enum Teller {
    Chat(chat::Live),
    Responses(Box<responses::Live>),
    Messages(messages::Live),
    Gemini(gemini::Live),
}

/// A chunk that continues what its dialect cannot go back to: a tool call after the next has begun.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OutOfOrder;

impl Teller {
    pub(crate) fn new(voice: &Voice, call_id: &str) -> Self {
        let model = voice.model.clone();
        match (voice.dialect, &voice.detail) {
            (Dialect::Chat | Dialect::Completions, detail) => {
                Self::Chat(chat::Live::new(matches!(detail, Detail::IncludeUsage)))
            }
            (Dialect::Responses, Detail::Responses(echo)) => {
                Self::Responses(Box::new(responses::Live::new((**echo).clone(), call_id)))
            }
            (Dialect::Responses, _) => Self::Responses(Box::new(responses::Live::new(Default::default(), call_id))),
            (Dialect::Messages, _) => Self::Messages(messages::Live::new(model, call_id)),
            (Dialect::Gemini, detail) => {
                Self::Gemini(gemini::Live::new(model, call_id, matches!(detail, Detail::JsonList)))
            }
        }
    }

    /// What is told of a chunk; nothing of some.
    pub(crate) fn tell(&mut self, chunk: &Value) -> Result<String, OutOfOrder> {
        match self {
            Self::Chat(live) => Ok(live.tell(chunk)),
            Self::Responses(live) => live.tell(chunk),
            Self::Messages(live) => live.tell(chunk),
            Self::Gemini(live) => Ok(live.tell(chunk)),
        }
    }

    /// The last words, of an answer that came to be `whole`.
    pub(crate) fn finish(&mut self, whole: &Value) -> String {
        match self {
            Self::Chat(live) => live.finish(),
            Self::Responses(live) => live.finish(whole),
            Self::Messages(live) => live.finish(whole),
            Self::Gemini(live) => live.finish(whole),
        }
    }

    /// The last words of an answer that breaks off.
    pub(crate) fn fail(&mut self, voice: &Voice, error: &ApiError) -> String {
        match self {
            Self::Responses(live) => live.fail(error),
            Self::Gemini(live) => live.fail(voice, error),
            Self::Chat(_) | Self::Messages(_) => voice.stream_error(error),
        }
    }
}

/// A piece of what a choice says.
#[derive(Debug, PartialEq, Eq)]
enum Part<'a> {
    Thought(&'a str),
    Text(&'a str),
    /// `id` and `name` come with a call's first piece.
    Call {
        index: u64,
        id: &'a str,
        name: &'a str,
        arguments: &'a str,
    },
}

/// What a chunk says of its first choice, the only one that most dialects know.
fn first_choice(chunk: &Value) -> Vec<Part<'_>> {
    let choices = chunk["choices"].as_array().into_iter().flatten();
    choices.filter(|choice| choice["index"].as_u64().unwrap_or_default() == 0).flat_map(parts).collect()
}

fn parts(choice: &Value) -> Vec<Part<'_>> {
    let delta = &choice["delta"];
    let text = |key: &str| delta[key].as_str().filter(|text| !text.is_empty());
    let mut parts = Vec::new();
    parts.extend(text("reasoning_content").or_else(|| text("reasoning")).map(Part::Thought));
    parts.extend(text("content").map(Part::Text));
    parts.extend(delta["tool_calls"].as_array().into_iter().flatten().map(|call| Part::Call {
        index: call["index"].as_u64().unwrap_or_default(),
        id: call["id"].as_str().unwrap_or_default(),
        name: call["function"]["name"].as_str().unwrap_or_default(),
        arguments: call["function"]["arguments"].as_str().unwrap_or_default(),
    }));
    parts
}
