//! Attempts: made with their keys, listed, patched.

use std::sync::Arc;

use agl_core::attempt::AttemptPatch;
use agl_store::AttemptDetail;
use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};

use super::input::{check_id, object};
use crate::app::App;
use crate::clock;
use crate::error::ApiError;
use crate::keys::Scope;
use crate::proxy::read_body;

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    #[serde(default)]
    attempt_id: Option<String>,
}

/// An attempt, and since when there has been this gateway to call.
#[derive(Serialize)]
pub(super) struct Told {
    #[serde(flatten)]
    detail: AttemptDetail,
    /// Seconds since the epoch. An attempt that is older has lived through a restart of the gateway; where several share the
    /// store, through the start or the end of one.
    gateway_started_at: f64,
}

impl Told {
    fn new(app: &App, detail: AttemptDetail) -> Self {
        Self { detail, gateway_started_at: app.peers.last_upheaval() }
    }
}

/// A new attempt with the keys for its agent and its evaluator.
#[derive(Serialize)]
pub(super) struct Grant {
    #[serde(flatten)]
    told: Told,
    /// Opens the attempt's proxy and event URLs until the agent has ended.
    key: String,
    /// Opens the attempt's event URL until the attempt has ended.
    reward_key: String,
}

/// `POST /api/rollouts/{id}/attempts`: the id given or the next number. A known id gives the existing attempt and its keys.
pub(super) async fn create(
    State(app): State<Arc<App>>,
    Path(rollout_id): Path<String>,
    request: Request,
) -> Result<(StatusCode, Json<Grant>), ApiError> {
    let raw = read_body(&app, request).await?;
    let Create { attempt_id } = if raw.is_empty() { Create::default() } else { object(&raw)? };
    if let Some(id) = &attempt_id {
        check_id(id, vec!["body".into(), "attempt_id".into()])?;
    }
    let (detail, _new) = app.store.create_attempt(&rollout_id, attempt_id, clock::now()).await?;
    let mint = |scope| app.keys.mint(scope, &rollout_id, &detail.attempt.attempt_id);
    let (key, reward_key) = (mint(Scope::Agent), mint(Scope::Reward));
    Ok((StatusCode::CREATED, Json(Grant { told: Told::new(&app, detail), key, reward_key })))
}

/// `GET /api/rollouts/{id}/attempts`, oldest first.
pub(super) async fn list(
    State(app): State<Arc<App>>,
    Path(rollout_id): Path<String>,
) -> Result<Json<Vec<Told>>, ApiError> {
    let attempts = app.store.attempts(&rollout_id).await?;
    Ok(Json(attempts.into_iter().map(|detail| Told::new(&app, detail)).collect()))
}

/// `PATCH /api/rollouts/{id}/attempts/{aid}`.
pub(super) async fn patch(
    State(app): State<Arc<App>>,
    Path((rollout_id, attempt_id)): Path<(String, String)>,
    request: Request,
) -> Result<Json<Told>, ApiError> {
    let patch: AttemptPatch = object(&read_body(&app, request).await?)?;
    let detail = app.store.patch_attempt(&rollout_id, &attempt_id, patch, clock::now()).await?;
    Ok(Json(Told::new(&app, detail)))
}
