//! A scripted answer as llama.cpp's server gives it: ids beside the log-probs, and every token that was sampled in `__verbose`
//! for those who ask. Of several choices it tells the tokens and the usage of the first only.

use serde_json::{Value, json};

use crate::answer::{Asked, log_prob};
use crate::script::Fault;
use crate::tokenizer::{display, write};

/// The answer out of one in vLLM's shape that has all its token ids. `fault` may spoil ids and log-probs.
#[must_use]
pub fn body(mut whole: Value, asked: &Asked, fault: Option<&Fault>) -> Value {
    let prompt = asked.prompts.first().cloned().unwrap_or_default();
    let mut first = None;
    for choice in whole["choices"].as_array_mut().into_iter().flatten() {
        let sampled: Vec<u32> = choice["token_ids"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|id| u32::try_from(id.as_u64()?).ok())
            .collect();
        let missing = usize::from(matches!(fault, Some(Fault::CountMismatch)));
        let content: Vec<Value> = sampled[..sampled.len().saturating_sub(missing)]
            .iter()
            .enumerate()
            .map(|(index, &token)| {
                let mut entry = json!({"id": token, "token": display(token), "bytes": [],
                    "logprob": log_prob(prompt.len() + index, token), "top_logprobs": []});
                if matches!(fault, Some(Fault::MissingIds)) {
                    entry["id"].take();
                }
                entry
            })
            .collect();
        let with_logprobs = asked.logprobs && !matches!(fault, Some(Fault::MissingLogprobs));
        choice["logprobs"] = if with_logprobs { json!({"content": content}) } else { Value::Null };
        for other in ["token_ids", "prompt_token_ids", "stop_reason"] {
            choice.as_object_mut().map(|choice| choice.remove(other));
        }
        first.get_or_insert(sampled);
    }
    let mut tokens = first.unwrap_or_default();
    whole["usage"] = json!({"prompt_tokens": prompt.len(), "completion_tokens": tokens.len(),
                            "total_tokens": prompt.len() + tokens.len()});
    for other in ["prompt_token_ids", "prompt_logprobs"] {
        whole.as_object_mut().map(|whole| whole.remove(other));
    }
    if asked.return_token_ids && !matches!(fault, Some(Fault::MissingIds)) {
        let cached = prompt.len() + tokens.len().saturating_sub(1);
        if matches!(fault, Some(Fault::LostIds)) {
            tokens.pop();
        }
        whole["__verbose"] =
            json!({"tokens": tokens, "prompt": write(&prompt), "truncated": false, "tokens_cached": cached});
    }
    whole
}
