//! The management interface, compatible in shape with Agent Lightning v1.0: same paths, fields, defaults and status codes.

use std::sync::Arc;

use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{RawPathParams, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, patch, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tracing::Instrument;

use crate::app::App;
use crate::error::ApiError;
use crate::keys::presented;
use crate::proxy::entry;
use crate::traces;

mod attempts;
mod events;
mod health;
mod input;
mod models;
mod openapi;
mod pause;
mod rollouts;
mod sequences;
mod triplet;
mod watch;

/// Every route. Management routes need the server key; those of an attempt check their own.
pub(crate) fn router(app: Arc<App>) -> Router {
    let management = Router::new()
        .route("/api/rollouts", get(rollouts::list).post(rollouts::create))
        .route("/api/rollouts/terminal", get(rollouts::terminal))
        .route("/api/rollouts/watch", get(watch::watch))
        .route("/api/rollouts/consumed", post(rollouts::consumed))
        .route("/api/rollouts/{rollout_id}", get(rollouts::get).patch(rollouts::patch).delete(rollouts::delete))
        .route("/api/rollouts/{rollout_id}/cancel", post(rollouts::cancel))
        .route("/api/rollouts/{rollout_id}/retry", post(rollouts::retry))
        .route("/api/rollouts/{rollout_id}/attempts", get(attempts::list).post(attempts::create))
        .route("/api/rollouts/{rollout_id}/attempts/{attempt_id}", patch(attempts::patch))
        .route("/api/rollouts/{rollout_id}/events", get(events::list))
        .route("/api/rollouts/{rollout_id}/sequences", get(sequences::get))
        .route("/api/models", delete(models::remove).get(models::list).post(models::register))
        .route("/proxy/pause", post(pause::pause))
        .route("/proxy/resume", post(pause::resume))
        .route("/proxy/state", get(pause::state))
        .route("/metrics", get(health::metrics))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&app), require_server_key));
    let events = Router::new().route("/api/rollouts/{rollout_id}/attempt/{attempt_id}/events", post(events::append));
    let requests = management.merge(events).route_layer(middleware::from_fn(traces::traced));
    // A model call has a span of its own, which knows more.
    let calls = Router::new()
        .merge(harnesses("/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}"))
        .merge(harnesses("/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}/agent/{agent}"));
    let of_rollouts = requests.merge(calls).route_layer(middleware::from_fn(with_ids));
    Router::new()
        .route("/healthz", get(async || Json(json!({"status": "ok"}))))
        .route("/readyz", get(health::ready))
        .route("/openapi.json", get(openapi::get))
        .merge(of_rollouts)
        .fallback(async || ApiError::new(StatusCode::NOT_FOUND, "Not Found"))
        .method_not_allowed_fallback(async || ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed"))
        .with_state(app)
}

/// The routes of a harness, one base URL for each dialect.
fn harnesses(place: &str) -> Router<Arc<App>> {
    let at = |path: &str| format!("{place}/{path}");
    Router::new()
        .route(&at("openai/v1/models"), get(entry::openai_models))
        .route(&at("openai/v1/{*path}"), post(entry::openai))
        // Claude Code asks first whether anybody is there.
        .route(&at("anthropic"), get(async || StatusCode::OK))
        .route(&at("anthropic/"), get(async || StatusCode::OK))
        .route(&at("anthropic/v1/models"), get(entry::anthropic_models))
        .route(&at("anthropic/v1/messages"), post(entry::anthropic))
        .route(&at("anthropic/v1/messages/count_tokens"), post(entry::anthropic_count))
        .route(&at("gemini/v1beta/models/{*path}"), post(entry::gemini))
        .route(&at("gemini/v1/models/{*path}"), post(entry::gemini))
}

async fn require_server_key(State(app): State<Arc<App>>, request: Request, next: Next) -> Result<Response, ApiError> {
    app.keys.check(&presented(request.headers(), request.uri()), None)?;
    Ok(next.run(request).await)
}

/// Gives every log line of the request the ids in its path, at every level that is logged.
async fn with_ids(
    ids: Result<RawPathParams, RawPathParamsRejection>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let ids = ids.map_err(|_| ApiError::bad_request("The path is not UTF-8"))?;
    let id = |name| ids.iter().find_map(|(key, value)| (key == name).then_some(value));
    let Some(rollout_id) = id("rollout_id") else { return Ok(next.run(request).await) };
    let span = tracing::error_span!("request", rollout_id, attempt_id = id("attempt_id"));
    Ok(next.run(request).instrument(span).await)
}

/// An answer that may be large: built and written as JSON on a blocking thread.
async fn large_json<T: serde::Serialize>(
    build: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let lost = || ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "The answer could not be put together");
    let write = move || serde_json::to_vec(&build()?).map_err(|_| lost());
    let json = tokio::task::spawn_blocking(write).await.map_err(|_| lost())??;
    Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
}

fn ok() -> Json<Value> {
    Json(json!({"status": "ok"}))
}
