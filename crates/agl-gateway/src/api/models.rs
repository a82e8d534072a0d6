//! Inference servers: registered, listed, removed.

use std::sync::Arc;

use agl_store::RegisteredModel;
use axum::Json;
use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri};
use serde_json::Value;

use super::input::{Query, objects};
use super::ok;
use crate::app::App;
use crate::error::ApiError;
use crate::proxy::kind::Kind;
use crate::proxy::read_body;
use crate::proxy::through::{SYNTHESISE, THROUGH};

/// `POST /api/models`: replaces registrations of equal model and endpoint. Answers once every gateway on the store knows.
pub(super) async fn register(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<(StatusCode, Json<Vec<RegisteredModel>>), ApiError> {
    let models: Vec<RegisteredModel> = objects(&read_body(&app, request).await?)?;
    for (index, model) in models.iter().enumerate() {
        check_endpoint(&model.endpoint, index)?;
        check_stream(check_kind(&model.kind, index)?, model.stream.as_deref(), index)?;
        // Otherwise anybody could have any variable of this process sent to an address of theirs.
        if model.api_key_env.is_some() && app.config.key.is_empty() {
            return Err(ApiError::forbidden("`api_key_env` needs a gateway with a server key: set `key`"));
        }
    }
    app.servers.register(models.clone()).await?;
    app.peers.agree().await?;
    Ok((StatusCode::CREATED, Json(models)))
}

/// Refuses at registration what every later call would fail on.
fn check_endpoint(endpoint: &str, index: usize) -> Result<(), ApiError> {
    let loc = vec!["body".into(), index.into(), "endpoint".into()];
    let problem = match reqwest::Url::parse(endpoint) {
        Ok(url) if matches!(url.scheme(), "http" | "https") && url.has_host() => return Ok(()),
        _ => "Input should be the server's base URL, such as http://HOST:PORT/v1",
    };
    Err(ApiError::invalid(loc, problem, "url_parsing"))
}

fn check_kind(kind: &str, index: usize) -> Result<Kind, ApiError> {
    if let Some(kind) = Kind::from_name(kind) {
        return Ok(kind);
    }
    let known = Kind::ALL.map(Kind::name).join(", ");
    let loc = vec!["body".into(), index.into(), "kind".into()];
    Err(ApiError::invalid(loc, format!("Input should be one of {known}"), "enum"))
}

fn check_stream(kind: Kind, stream: Option<&str>, index: usize) -> Result<(), ApiError> {
    let problem = match stream {
        None | Some(SYNTHESISE) => return Ok(()),
        Some(THROUGH) if kind.streams() => return Ok(()),
        Some(THROUGH) => format!(
            "Input should be {SYNTHESISE}: servers of kind {} lose tokens when they stream, or do not stream",
            kind.name()
        ),
        Some(_) => format!("Input should be {SYNTHESISE} or {THROUGH}"),
    };
    Err(ApiError::invalid(vec!["body".into(), index.into(), "stream".into()], problem, "enum"))
}

/// `GET /api/models`.
pub(super) async fn list(State(app): State<Arc<App>>) -> Json<Vec<RegisteredModel>> {
    Json(app.servers.list())
}

/// `DELETE /api/models`: the policy's servers. `?model=` another model's, `?model=&endpoint=` one server.
pub(super) async fn remove(State(app): State<Arc<App>>, uri: Uri) -> Result<Json<Value>, ApiError> {
    let query = Query::of(&uri);
    let model = query.text("model").unwrap_or(&app.config.default_proxy.model_name);
    app.servers.remove(model, query.text("endpoint")).await?;
    app.peers.agree().await?;
    Ok(ok())
}
