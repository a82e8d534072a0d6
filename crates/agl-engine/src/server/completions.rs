//! `POST /v1/completions`.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use futures_util::future::try_join_all;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::answer::{created, finish_reason, stop_reason, token_text, unique_id, usage};
use super::error::ApiError;
use super::request::{Sampling, parse, unsupported};
use crate::{ChatTokenizer, Engine, GenerateOutput, GenerateRequest};

/// What OpenAI and vLLM assume.
const DEFAULT_MAX_TOKENS: usize = 16;

#[derive(Debug, Deserialize)]
struct CompletionRequest {
    prompt: Prompts,
    #[serde(default)]
    logprobs: Option<usize>,
    #[serde(default)]
    echo: Option<bool>,
    #[serde(default)]
    suffix: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a text, a list of texts, a list of token ids, or a list of such lists")]
enum Prompts {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    IdLists(Vec<Vec<u32>>),
}

impl Prompts {
    fn ids(self, tokenizer: &ChatTokenizer) -> Result<Vec<Vec<u32>>, ApiError> {
        match self {
            Self::Text(text) => Ok(vec![tokenizer.encode_whole(&text)?]),
            Self::Texts(texts) => texts.iter().map(|text| Ok(tokenizer.encode_whole(text)?)).collect(),
            Self::Ids(ids) => Ok(vec![ids]),
            Self::IdLists(lists) => Ok(lists),
        }
    }
}

pub(super) async fn create(State(engine): State<Engine>, body: Bytes) -> Result<Json<Value>, ApiError> {
    let request: CompletionRequest = parse(&body)?;
    let mut sampling: Sampling = parse(&body)?;
    sampling.max_tokens = sampling.max_tokens.or(Some(DEFAULT_MAX_TOKENS));
    if request.echo == Some(true) {
        return Err(unsupported("echo"));
    }
    if request.suffix.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(unsupported("suffix"));
    }
    let (params, n) = sampling.params(request.logprobs.unwrap_or(0))?;
    let prompts = request.prompt.ids(engine.tokenizer())?;
    let with_ids = sampling.return_token_ids.unwrap_or(false);
    let engine = &engine;
    // Choices of the first prompt, then those of the second, as OpenAI orders them.
    let jobs = prompts.iter().flat_map(|prompt| (0..n).map(move |choice| (prompt, choice)));
    let outputs = try_join_all(jobs.map(|(prompt, choice)| {
        let sampling = Sampling::for_choice(&params, choice);
        engine.generate(GenerateRequest { prompt: prompt.clone(), sampling })
    }))
    .await
    .map_err(|error| ApiError::from(error).renamed("messages", "prompt"))?;
    let mut choices = Vec::with_capacity(outputs.len());
    for (index, output) in outputs.iter().enumerate() {
        let log_probs = match request.logprobs {
            Some(_) => log_probs(output, engine.tokenizer())?,
            None => Value::Null,
        };
        let mut choice = json!({
            "index": index,
            "text": output.text,
            "logprobs": log_probs,
            "finish_reason": finish_reason(output),
            "stop_reason": stop_reason(output),
            "policy_versions": output.policy_versions,
        });
        if with_ids {
            choice["token_ids"] = json!(output.token_ids);
            choice["prompt_token_ids"] = json!(prompts[index / n]);
        }
        choices.push(choice);
    }
    Ok(Json(json!({
        "id": unique_id("cmpl-"),
        "object": "text_completion",
        "created": created(),
        "model": engine.model_name(),
        "choices": choices,
        "usage": usage(prompts.iter().map(Vec::len).sum(), n, &outputs),
        "policy_version": engine.policy_version(),
    })))
}

fn log_probs(output: &GenerateOutput, tokenizer: &ChatTokenizer) -> Result<Value, ApiError> {
    let mut tokens = Vec::new();
    let mut top_log_probs = Vec::new();
    let mut text_offset = Vec::new();
    let mut offset = 0;
    for (id, top) in output.token_ids.iter().zip(&output.top_log_probs) {
        let text = token_text(tokenizer, *id)?;
        text_offset.push(offset);
        offset += text.chars().count();
        tokens.push(text);
        let mut by_text = Map::new();
        for (id, log_prob) in top {
            by_text.insert(token_text(tokenizer, *id)?, json!(log_prob));
        }
        top_log_probs.push(by_text);
    }
    Ok(json!({
        "tokens": tokens,
        "token_logprobs": output.log_probs,
        "top_logprobs": top_log_probs,
        "text_offset": text_offset,
    }))
}
