//! Parts of an answer that both kinds of completions share.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::error::ApiError;
use crate::{ChatTokenizer, FinishReason, GenerateOutput, StopReason};

pub(super) fn finish_reason(output: &GenerateOutput) -> &'static str {
    match output.finish_reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

/// vLLM's `stop_reason`: the id or text that ended the answer, null for the model's own end token.
pub(super) fn stop_reason(output: &GenerateOutput) -> Value {
    match &output.stop_reason {
        None => Value::Null,
        Some(StopReason::Token(id)) => json!(id),
        Some(StopReason::Text(text)) => json!(text),
    }
}

/// `outputs` holds `n` choices of every prompt, in order. A prompt's tokens count once whatever `n` is, and as cached where no
/// choice had to process them.
pub(super) fn usage(prompt_tokens: usize, n: usize, outputs: &[GenerateOutput]) -> Value {
    let cached = |choices: &[GenerateOutput]| choices.iter().map(|choice| choice.cached_tokens).min().unwrap_or(0);
    let cached_tokens: usize = outputs.chunks(n).map(cached).sum();
    let completion_tokens: usize = outputs.iter().map(|output| output.token_ids.len()).sum();
    json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    })
}

/// A token's own text, special tokens included.
pub(super) fn token_text(tokenizer: &ChatTokenizer, id: u32) -> Result<String, ApiError> {
    Ok(tokenizer.decode(&[id], false)?)
}

/// Seconds since 1970.
pub(super) fn created() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

pub(super) fn unique_id(prefix: &str) -> String {
    format!("{prefix}{}", uuid::Uuid::new_v4().simple())
}
