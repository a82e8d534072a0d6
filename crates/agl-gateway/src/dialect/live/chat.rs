//! Chat completions and completions: the server's chunks pass as they are.

use serde_json::Value;

use crate::dialect::sse;

/// See the [module](self).
pub(crate) struct Live {
    include_usage: bool,
    /// The chunks that end a choice, and the usage.
    kept: String,
}

impl Live {
    pub(super) fn new(include_usage: bool) -> Self {
        Self { include_usage, kept: String::new() }
    }

    pub(super) fn tell(&mut self, chunk: &Value) -> String {
        let choices = chunk["choices"].as_array().map(Vec::as_slice).unwrap_or_default();
        if choices.is_empty() {
            if self.include_usage {
                self.kept += &sse::data(chunk);
            }
            return String::new();
        }
        let told = if self.include_usage || chunk.get("usage").is_none() {
            sse::data(chunk)
        } else {
            let mut chunk = chunk.clone();
            if let Some(fields) = chunk.as_object_mut() {
                fields.shift_remove("usage");
            }
            sse::data(&chunk)
        };
        if choices.iter().any(|choice| choice["finish_reason"].is_string()) {
            self.kept += &told;
            return String::new();
        }
        told
    }

    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.kept) + "data: [DONE]\n\n"
    }
}
