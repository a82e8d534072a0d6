//! The policy over HTTP, in the dialect of OpenAI with the extensions of vLLM that training needs.
//!
//! `POST /v1/chat/completions`, `POST /v1/completions`, `GET /v1/models`, `POST /tokenize`, `GET /health`.
//!
//! Sampling fields are those of OpenAI and vLLM, among them `top_k`, `min_p`, `presence_penalty`, `frequency_penalty`,
//! `repetition_penalty`, `logit_bias`, `stop_token_ids` and `ignore_eos`; what cannot be honoured is refused with the field's
//! name. Log-probs are those of the policy at the request's temperature whatever else is set
//! ([`crate::GenerateOutput::log_probs`]).
//!
//! One model is served; the request's `model` is not looked at. Beyond OpenAI's fields: `return_token_ids` adds
//! `prompt_token_ids` (top level for chat, per choice for completions) and `choices[].token_ids`, which include the token
//! that ended the answer. Always there are `policy_version` and `choices[].policy_versions`, one per sampled token.

mod answer;
mod chat;
mod completions;
mod error;
mod request;

use std::future::Future;

use axum::extract::{DefaultBodyLimit, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::Engine;
use error::ApiError;

/// Largest request body, the gateway's own limit.
const BODY_LIMIT: usize = 64 * 1024 * 1024;

/// Serves `engine` on `listener` until `shutdown` completes; requests in progress are then finished.
///
/// # Errors
/// If the listener breaks.
pub async fn serve(
    engine: Engine,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    axum::serve(listener, router(engine)).with_graceful_shutdown(shutdown).await
}

/// The routes, for those who bring their own server.
pub fn router(engine: Engine) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/models", get(models))
        .route("/tokenize", post(chat::tokenize))
        .route("/detokenize", post(chat::detokenize))
        .route("/health", get(async || ()))
        .fallback(async || ApiError::not_found())
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(engine)
}

async fn models(State(engine): State<Engine>) -> Json<Value> {
    Json(json!({
        "object": "list",
        "data": [{
            "id": engine.model_name(),
            "object": "model",
            "created": 0,
            "owned_by": "agl",
            "max_model_len": engine.max_model_len(),
            "policy_version": engine.policy_version(),
        }],
    }))
}
