//! Gemini: every chunk is an answer of its own with the parts that are new. Calls of functions come with the last.

use serde_json::{Value, json};

use super::{Part, parts};
use crate::dialect::{Voice, gemini, sse};
use crate::error::ApiError;

/// See the [module](self).
pub(crate) struct Live {
    model: Option<String>,
    call_id: String,
    /// A JSON list instead of events.
    as_list: bool,
    begun: bool,
}

impl Live {
    pub(super) fn new(model: Option<String>, call_id: &str, as_list: bool) -> Self {
        Self { model, call_id: call_id.to_owned(), as_list, begun: false }
    }

    pub(super) fn tell(&mut self, chunk: &Value) -> String {
        let candidates: Vec<Value> = chunk["choices"].as_array().into_iter().flatten().filter_map(candidate).collect();
        if candidates.is_empty() {
            return String::new();
        }
        let model = self.model.as_deref().or_else(|| chunk["model"].as_str());
        let content = json!({"candidates": candidates, "modelVersion": model, "responseId": self.call_id});
        self.say(&content)
    }

    pub(super) fn finish(&mut self, whole: &Value) -> String {
        let mut last = gemini::answer(whole, self.model.as_deref(), &self.call_id).unwrap_or_default();
        for candidate in last["candidates"].as_array_mut().into_iter().flatten() {
            // The texts have been told.
            if let Some(parts) = candidate.pointer_mut("/content/parts").and_then(Value::as_array_mut) {
                parts.retain(|part| part.get("functionCall").is_some());
            }
        }
        let told = self.say(&last);
        if self.as_list { told + "]" } else { told }
    }

    pub(super) fn fail(&mut self, voice: &Voice, error: &ApiError) -> String {
        if !self.as_list || !self.begun {
            return voice.stream_error(error);
        }
        format!(",{}]", voice.dialect.error(error.clone()).body)
    }

    fn say(&mut self, content: &Value) -> String {
        let is_first = !std::mem::replace(&mut self.begun, true);
        match (self.as_list, is_first) {
            (false, _) => sse::data(content),
            (true, true) => format!("[{content}"),
            (true, false) => format!(",{content}"),
        }
    }
}

fn candidate(choice: &Value) -> Option<Value> {
    let said: Vec<Value> = parts(choice)
        .into_iter()
        .filter_map(|part| match part {
            Part::Thought(text) => Some(json!({"text": text, "thought": true})),
            Part::Text(text) => Some(json!({"text": text})),
            Part::Call { .. } => None,
        })
        .collect();
    let index = choice["index"].as_u64().unwrap_or_default();
    (!said.is_empty()).then(|| json!({"content": {"role": "model", "parts": said}, "index": index}))
}
