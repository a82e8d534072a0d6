//! A response as the events of its stream, whole or as it comes.

use serde_json::{Map, Value, json};

use crate::dialect::{message_of, sse};
use crate::error::ApiError;

/// The response as a stream of events.
pub(crate) fn stream(response: &Value) -> String {
    let mut events = Events::default();
    events.begin(response);
    for (index, item) in response["output"].as_array().into_iter().flatten().enumerate() {
        events.item(index, item);
    }
    events.end(response);
    events.take()
}

/// The events of one stream, numbered.
#[derive(Default)]
pub(crate) struct Events {
    text: String,
    count: u64,
}

/// What is told of an item in pieces.
struct Pieces {
    /// The events' name, without its `.delta` and `.done`.
    event: &'static str,
    /// Where the item has it.
    key: &'static str,
    /// It is a part of the item's content.
    is_part: bool,
}

impl Pieces {
    fn of(item: &Value) -> Option<Self> {
        let (event, key, is_part) = match item["type"].as_str()? {
            "message" => ("response.output_text", "text", true),
            "reasoning" => ("response.reasoning_text", "text", true),
            "function_call" => ("response.function_call_arguments", "arguments", false),
            "custom_tool_call" => ("response.custom_tool_call_input", "input", false),
            _ => return None,
        };
        Some(Self { event, key, is_part })
    }

    fn text<'a>(&self, item: &'a Value) -> &'a Value {
        if self.is_part { &item["content"][0][self.key] } else { &item[self.key] }
    }

    /// Which item, and which part of it.
    fn place(&self, index: usize, item: &Value) -> Value {
        let mut place = json!({"item_id": item["id"], "output_index": index});
        if self.is_part {
            place["content_index"] = 0.into();
        }
        place
    }

    /// The SDKs expect them beside every piece of a text.
    fn add_log_probs(&self, event: &mut Value) {
        if self.event == "response.output_text" {
            event["logprobs"] = json!([]);
        }
    }
}

impl Events {
    /// What was written since the last time.
    pub(crate) fn take(&mut self) -> String {
        std::mem::take(&mut self.text)
    }

    /// Writes an event: its type, its number, and the fields.
    fn push(&mut self, name: &str, fields: Value) {
        let mut event =
            Map::from_iter([("type".to_owned(), name.into()), ("sequence_number".to_owned(), self.count.into())]);
        if let Value::Object(fields) = fields {
            event.extend(fields);
        }
        self.text += &sse::event(name, &Value::Object(event));
        self.count += 1;
    }

    pub(crate) fn begin(&mut self, response: &Value) {
        let mut begun = response.clone();
        begun["status"] = "in_progress".into();
        begun["output"] = json!([]);
        begun["usage"] = Value::Null;
        begun["incomplete_details"] = Value::Null;
        self.push("response.created", json!({"response": begun}));
        self.push("response.in_progress", json!({"response": begun}));
    }

    pub(crate) fn end(&mut self, response: &Value) {
        let end = if response["status"] == "incomplete" { "response.incomplete" } else { "response.completed" };
        self.push(end, json!({"response": response}));
    }

    pub(crate) fn fail(&mut self, error: &ApiError) {
        let code = error.status.as_u16().to_string();
        self.push("error", json!({"code": code, "message": message_of(&error.body), "param": null}));
    }

    /// A whole item, in one piece.
    pub(crate) fn item(&mut self, index: usize, item: &Value) {
        self.added(index, item);
        if let Some(pieces) = Pieces::of(item) {
            let text = pieces.text(item).as_str().unwrap_or_default().to_owned();
            self.delta(index, item, &text);
        }
        self.done(index, item);
    }

    /// An item that begins.
    pub(crate) fn added(&mut self, index: usize, item: &Value) {
        let mut begun = item.clone();
        begun["status"] = "in_progress".into();
        for (key, empty) in [("content", json!([])), ("arguments", json!("")), ("input", json!(""))] {
            if begun.get(key).is_some() {
                begun[key] = empty;
            }
        }
        self.push("response.output_item.added", json!({"output_index": index, "item": begun}));
        if let Some(pieces) = Pieces::of(item).filter(|pieces| pieces.is_part) {
            let mut empty = item["content"][0].clone();
            empty["text"] = "".into();
            self.push("response.content_part.added", with(&pieces.place(index, item), "part", &empty));
        }
    }

    /// A piece of it.
    pub(crate) fn delta(&mut self, index: usize, item: &Value, text: &str) {
        let Some(pieces) = Pieces::of(item) else { return };
        let mut delta = with(&pieces.place(index, item), "delta", &text.into());
        pieces.add_log_probs(&mut delta);
        self.push(&format!("{}.delta", pieces.event), delta);
    }

    /// Its end.
    pub(crate) fn done(&mut self, index: usize, item: &Value) {
        if let Some(pieces) = Pieces::of(item) {
            let place = pieces.place(index, item);
            let mut done = with(&place, pieces.key, pieces.text(item));
            pieces.add_log_probs(&mut done);
            if item["type"] == "function_call" {
                done["name"] = item["name"].clone();
            }
            self.push(&format!("{}.done", pieces.event), done);
            if pieces.is_part {
                self.push("response.content_part.done", with(&place, "part", &item["content"][0]));
            }
        }
        self.push("response.output_item.done", json!({"output_index": index, "item": item}));
    }
}

fn with(place: &Value, key: &str, value: &Value) -> Value {
    let mut fields = place.clone();
    fields[key] = value.clone();
    fields
}
