//! How many tokens a request would be. The gateway has no tokenizer: it asks the server (`POST /tokenize` beside `/v1`, as vLLM
//! and `agl models serve` have it), and estimates where the server cannot say.

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::entry::Caller;
use super::routes::target;
use crate::app::App;
use crate::dialect::Translated;
use crate::error::ApiError;

/// Bytes of JSON per token of English prose and code, roughly; used where no server counts.
const BYTES_PER_TOKEN: usize = 4;
/// Set on an answer that is an estimate.
const ESTIMATED: (&str, &str) = ("x-agl-estimated", "true");

/// In the form of Anthropic's `count_tokens`.
pub(crate) async fn messages(app: &App, caller: &Caller, request: Translated) -> Result<Response, ApiError> {
    Ok(answer(count(app, caller, request).await, |tokens| json!({"input_tokens": tokens})))
}

/// In the form of Google's `countTokens`.
pub(crate) async fn gemini(app: &App, caller: &Caller, request: Translated) -> Result<Response, ApiError> {
    Ok(answer(count(app, caller, request).await, |tokens| json!({"totalTokens": tokens})))
}

fn answer(count: Count, body: impl Fn(u64) -> Value) -> Response {
    match count {
        Count::Exact(tokens) => Json(body(tokens)).into_response(),
        Count::Estimate(tokens) => ([ESTIMATED], Json(body(tokens))).into_response(),
    }
}

enum Count {
    Exact(u64),
    Estimate(u64),
}

async fn count(app: &App, caller: &Caller, request: Translated) -> Count {
    let asked = request.voice.model.as_deref();
    let model = target(&app.config, asked, caller.agent.as_deref()).model;
    let mut body = json!({"model": model, "add_generation_prompt": true});
    for key in ["messages", "tools"] {
        if let Some(value) = request.chat.get(key) {
            body[key] = value.clone();
        }
    }
    match app.upstream.count_tokens(&model, &caller.key.rollout_id, &mut body).await {
        Some(tokens) => Count::Exact(tokens),
        None => {
            let said = body["messages"].to_string().len() + body["tools"].to_string().len();
            Count::Estimate((said / BYTES_PER_TOKEN) as u64)
        }
    }
}
