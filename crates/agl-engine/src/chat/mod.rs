//! Between conversations and token ids: tokenizer, chat template, tool calls in text.

mod python_json;
mod python_text;
mod template;
pub(crate) mod tokenizer;
pub(crate) mod tool_calls;
