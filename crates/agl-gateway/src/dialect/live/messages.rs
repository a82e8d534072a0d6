//! Anthropic's Messages: a block after the other, each begun with its first piece and ended by the next one's.

use serde_json::{Value, json};

use super::{OutOfOrder, Part, first_choice};
use crate::dialect::answer::{ChatAnswer, ToolCall, Usage};
use crate::dialect::{messages, sse};

/// See the [module](self).
pub(crate) struct Live {
    model: Option<String>,
    call_id: String,
    begun: bool,
    /// How many blocks have ended.
    blocks: u64,
    open: Option<Open>,
    /// How many tool calls have begun.
    calls: u64,
}

/// The block that is being told.
enum Open {
    Thinking,
    Text,
    Call(ToolCall),
}

impl Live {
    pub(super) fn new(model: Option<String>, call_id: &str) -> Self {
        Self { model, call_id: call_id.to_owned(), begun: false, blocks: 0, open: None, calls: 0 }
    }

    pub(super) fn tell(&mut self, chunk: &Value) -> Result<String, OutOfOrder> {
        let mut told = String::new();
        self.begin(chunk, &mut told);
        for part in first_choice(chunk) {
            match part {
                Part::Thought(text) => {
                    if !matches!(self.open, Some(Open::Thinking)) {
                        self.open(
                            Open::Thinking,
                            json!({"type": "thinking", "thinking": "", "signature": ""}),
                            &mut told,
                        );
                    }
                    self.delta(json!({"type": "thinking_delta", "thinking": text}), &mut told);
                }
                Part::Text(text) => {
                    if !matches!(self.open, Some(Open::Text)) {
                        self.open(Open::Text, json!({"type": "text", "text": ""}), &mut told);
                    }
                    self.delta(json!({"type": "text_delta", "text": text}), &mut told);
                }
                Part::Call { index, id, name, arguments } => {
                    if index == self.calls {
                        self.calls += 1;
                        let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                        let call = ToolCall { id: id.to_owned(), name: name.to_owned(), arguments: String::new() };
                        self.open(Open::Call(call), block, &mut told);
                    }
                    match &mut self.open {
                        Some(Open::Call(call)) if index + 1 == self.calls => call.arguments += arguments,
                        _ => return Err(OutOfOrder),
                    }
                }
            }
        }
        Ok(told)
    }

    pub(super) fn finish(&mut self, whole: &Value) -> String {
        let mut told = String::new();
        self.begin(whole, &mut told);
        self.close(&mut told);
        let answer = ChatAnswer::read(whole).unwrap_or_default();
        let message = messages::answer(&answer, self.model.as_deref(), &self.call_id);
        told + &messages::end(&message)
    }

    fn begin(&mut self, chunk: &Value, told: &mut String) {
        if self.begun {
            return;
        }
        self.begun = true;
        // The usage itself comes last; the prompt's ids come first.
        let prompt = chunk["prompt_token_ids"].as_array().map_or(0, Vec::len) as u64;
        let model = chunk["model"].as_str().unwrap_or_default().to_owned();
        let answer = ChatAnswer { model, usage: Usage { prompt, ..Usage::default() }, ..ChatAnswer::default() };
        *told += &messages::start(&messages::answer(&answer, self.model.as_deref(), &self.call_id));
    }

    fn open(&mut self, open: Open, block: Value, told: &mut String) {
        self.close(told);
        let start = json!({"type": "content_block_start", "index": self.blocks, "content_block": block});
        *told += &sse::event("content_block_start", &start);
        self.open = Some(open);
    }

    fn delta(&self, delta: Value, told: &mut String) {
        let delta = json!({"type": "content_block_delta", "index": self.blocks, "delta": delta});
        *told += &sse::event("content_block_delta", &delta);
    }

    fn close(&mut self, told: &mut String) {
        match self.open.take() {
            None => return,
            Some(Open::Thinking) => {
                self.delta(json!({"type": "signature_delta", "signature": messages::SIGNATURE}), told);
            }
            Some(Open::Text) => {}
            Some(Open::Call(call)) => {
                let input = call.object().to_string();
                self.delta(json!({"type": "input_json_delta", "partial_json": input}), told);
            }
        }
        let stop = json!({"type": "content_block_stop", "index": self.blocks});
        *told += &sse::event("content_block_stop", &stop);
        self.blocks += 1;
    }
}
