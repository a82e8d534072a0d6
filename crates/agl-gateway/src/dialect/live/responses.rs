//! OpenAI's Responses: an item after the other, each begun with its first piece and ended by the next one's.

use serde_json::Value;

use super::{OutOfOrder, Part, first_choice};
use crate::dialect::answer::{ChatAnswer, ToolCall};
use crate::dialect::responses::{self, Echo, Events};
use crate::error::ApiError;

/// See the [module](self).
pub(crate) struct Live {
    echo: Echo,
    call_id: String,
    begun: bool,
    events: Events,
    /// The items that have ended.
    items: Vec<Value>,
    open: Option<Open>,
    /// How many tool calls have begun.
    calls: u64,
}

/// The item that is being told.
enum Open {
    Thought(String),
    Text(String),
    Call(ToolCall),
}

impl Live {
    pub(super) fn new(echo: Echo, call_id: &str) -> Self {
        Self {
            echo,
            call_id: call_id.to_owned(),
            begun: false,
            events: Events::default(),
            items: Vec::new(),
            open: None,
            calls: 0,
        }
    }

    pub(super) fn tell(&mut self, chunk: &Value) -> Result<String, OutOfOrder> {
        self.begin(chunk);
        for part in first_choice(chunk) {
            match part {
                Part::Thought(text) => {
                    if !matches!(self.open, Some(Open::Thought(_))) {
                        self.open(Open::Thought(String::new()));
                    }
                    self.piece(text);
                }
                Part::Text(text) => {
                    if !matches!(self.open, Some(Open::Text(_))) {
                        self.open(Open::Text(String::new()));
                    }
                    self.piece(text);
                }
                Part::Call { index, id, name, arguments } => {
                    if index == self.calls {
                        self.calls += 1;
                        let (id, name) = (id.to_owned(), name.to_owned());
                        self.open(Open::Call(ToolCall { id, name, arguments: String::new() }));
                    }
                    if !matches!(self.open, Some(Open::Call(_))) || index + 1 != self.calls {
                        return Err(OutOfOrder);
                    }
                    self.piece(arguments);
                }
            }
        }
        Ok(self.events.take())
    }

    pub(super) fn finish(&mut self, whole: &Value) -> String {
        self.begin(whole);
        let answer = ChatAnswer::read(whole).unwrap_or_default();
        let mut response = responses::answer(&answer, &self.echo, &self.call_id);
        // An answer of nothing at all is still a message.
        if self.items.is_empty() && self.open.is_none() {
            self.open(Open::Text(String::new()));
        }
        self.close(if response["status"] == "incomplete" { "incomplete" } else { "completed" });
        response["output"] = std::mem::take(&mut self.items).into();
        self.events.end(&response);
        self.events.take()
    }

    pub(super) fn fail(&mut self, error: &ApiError) -> String {
        self.events.fail(error);
        self.events.take()
    }

    fn begin(&mut self, chunk: &Value) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let answer = ChatAnswer {
            model: chunk["model"].as_str().unwrap_or_default().to_owned(),
            created: chunk["created"].as_u64().unwrap_or_default(),
            ..ChatAnswer::default()
        };
        self.events.begin(&responses::answer(&answer, &self.echo, &self.call_id));
    }

    fn open(&mut self, open: Open) {
        self.close("completed");
        let item = self.item(&open, "in_progress");
        // Free text comes out of its arguments once they are complete.
        if !self.is_free_text(&open) {
            self.events.added(self.items.len(), &item);
        }
        self.open = Some(open);
    }

    fn piece(&mut self, text: &str) {
        let index = self.items.len();
        let Some(mut open) = self.open.take() else { return };
        let is_told = !self.is_free_text(&open) && !text.is_empty();
        let item = is_told.then(|| self.item(&open, "in_progress"));
        match &mut open {
            Open::Thought(said) | Open::Text(said) => said.push_str(text),
            Open::Call(call) => call.arguments.push_str(text),
        }
        if let Some(item) = item {
            self.events.delta(index, &item, text);
        }
        self.open = Some(open);
    }

    fn close(&mut self, status: &str) {
        let Some(open) = self.open.take() else { return };
        let (item, index) = (self.item(&open, status), self.items.len());
        if self.is_free_text(&open) {
            self.events.item(index, &item);
        } else {
            self.events.done(index, &item);
        }
        self.items.push(item);
    }

    fn is_free_text(&self, open: &Open) -> bool {
        matches!(open, Open::Call(call) if self.echo.takes_free_text(&call.name))
    }

    /// The item as it would be told whole. A second thought or text is named by its place.
    fn item(&self, open: &Open, status: &str) -> Value {
        let again = |kind: &str| {
            let place = self.items.len();
            let is_first = self.items.iter().all(|item| item["type"] != kind);
            if is_first { self.call_id.clone() } else { format!("{}_{place}", self.call_id) }
        };
        match open {
            Open::Thought(text) => responses::thought(text, &again("reasoning"), status, &self.echo),
            Open::Text(text) => responses::message(text, &again("message"), status),
            Open::Call(call) => {
                let id = format!("{}_{}", self.call_id, self.calls.saturating_sub(1));
                responses::tool_call(call, &id, status, &self.echo)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chunk(delta: Value) -> Value {
        json!({"model": "m", "choices": [{"index": 0, "delta": delta}]})
    }

    #[test]
    fn a_call_that_goes_on_after_the_next_has_begun_cannot_be_told() {
        let mut live = Live::new(Echo::default(), "c");
        let call = |index: u64, id: &str| {
            chunk(json!({"tool_calls": [{"index": index, "id": id, "function": {"name": "f", "arguments": "{"}}]}))
        };
        assert!(live.tell(&call(0, "a")).is_ok() && live.tell(&call(1, "b")).is_ok());
        assert_eq!(live.tell(&call(0, "")), Err(OutOfOrder));
    }
}
