//! Server-sent events, as HTML's standard writes them. JSON on one line has no line breaks to escape.

use serde_json::Value;

pub(crate) const CONTENT_TYPE: &str = "text/event-stream";

/// A nameless event.
pub(crate) fn data(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// A named event.
pub(crate) fn event(name: &str, value: &Value) -> String {
    format!("event: {name}\ndata: {value}\n\n")
}
