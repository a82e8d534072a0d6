//! Rollouts: enqueued, listed, patched, ended, deleted.

use std::sync::Arc;

use agl_core::rollout::{Rollout, RolloutCreate, RolloutState, StatusPatch};
use agl_store::{RolloutQuery, StoreError, TerminalPage};
use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, Uri};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::input::{Object, Query, check_id, object, objects};
use crate::app::App;
use crate::clock;
use crate::error::ApiError;
use crate::proxy::read_body;

/// The message of a rollout that somebody cancelled.
const CANCELLED: &str = "cancelled";

/// `POST /api/rollouts`: a known id gives the existing rollout untouched.
pub(super) async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<(StatusCode, Json<Vec<Rollout>>), ApiError> {
    let creates: Vec<RolloutCreate> = objects(&read_body(&app, request).await?)?;
    let now = clock::now();
    let rollouts = creates.into_iter().enumerate().map(|(index, create)| {
        if let Some(id) = &create.rollout_id {
            check_id(id, vec!["body".into(), index.into(), "rollout_id".into()])?;
        }
        Ok(new_rollout(create, now))
    });
    let rollouts = rollouts.collect::<Result<_, ApiError>>()?;
    Ok((StatusCode::CREATED, Json(app.store.create_rollouts(rollouts).await?)))
}

fn new_rollout(mut create: RolloutCreate, now: f64) -> Rollout {
    // The original's metadata always has these two keys.
    let mut metadata =
        Map::from_iter([("batch_idx".to_owned(), Value::Null), ("sample_idx_in_batch".to_owned(), Value::Null)]);
    metadata.extend(create.metadata.take().unwrap_or_default());
    create.metadata = Some(metadata);
    let rollout_id = create.rollout_id.take().unwrap_or_else(|| uuid::Uuid::now_v7().simple().to_string());
    Rollout::new(create, rollout_id, now)
}

/// `GET /api/rollouts?state_in=…&limit=…&after=…&run_id=…`, oldest first; `after` is the last id of the page before.
pub(super) async fn list(State(app): State<Arc<App>>, uri: Uri) -> Result<Json<Vec<Rollout>>, ApiError> {
    let query = Query::of(&uri);
    let states = query.all("state_in").enumerate().map(|(index, name)| {
        RolloutState::from_name(name).ok_or_else(|| {
            let msg = "Input should be 'queuing', 'running', 'succeeded' or 'failed'";
            ApiError::invalid(vec!["query".into(), "state_in".into(), index.into()], msg, "enum")
        })
    });
    let states = states.collect::<Result<Vec<_>, _>>()?;
    if states.is_empty() {
        return Err(Query::missing("state_in"));
    }
    let limit = usize::try_from(query.integer("limit")?.unwrap_or(500)).unwrap_or(0);
    let (after, run_id) = (query.text("after").map(str::to_owned), query.text("run_id").map(str::to_owned));
    Ok(Json(app.store.list_rollouts(RolloutQuery { states, after, limit, run_id }).await?))
}

/// `GET /api/rollouts/terminal?after=&limit=`, in the order in which they ended.
pub(super) async fn terminal(State(app): State<Arc<App>>, uri: Uri) -> Result<Json<TerminalPage>, ApiError> {
    let query = Query::of(&uri);
    let after = u64::try_from(query.integer("after")?.unwrap_or(0)).unwrap_or(0);
    let limit = usize::try_from(query.integer("limit")?.unwrap_or(1000)).unwrap_or(0).max(1);
    Ok(Json(app.store.terminal(after, limit).await?))
}

/// A rollout and the attempts that have events.
#[derive(Serialize)]
pub(super) struct Detail {
    rollout: Rollout,
    attempts: Vec<String>,
}

/// `GET /api/rollouts/{id}`.
pub(super) async fn get(State(app): State<Arc<App>>, Path(rollout_id): Path<String>) -> Result<Json<Detail>, ApiError> {
    let rollout = app.store.rollout(&rollout_id).await?.ok_or_else(|| ApiError::not_found(&rollout_id))?;
    let attempts = app.store.attempts_with_events(&rollout_id).await?;
    Ok(Json(Detail { rollout, attempts }))
}

#[derive(Deserialize)]
struct Patch {
    #[serde(default)]
    status: Option<Object<StatusPatch>>,
}

/// `PATCH /api/rollouts/{id}` with `{"status": {…}}`.
pub(super) async fn patch(
    State(app): State<Arc<App>>,
    Path(rollout_id): Path<String>,
    request: Request,
) -> Result<Json<Rollout>, ApiError> {
    let Patch { status } = object(&read_body(&app, request).await?)?;
    Ok(Json(app.store.patch_rollout(&rollout_id, status.unwrap_or_default().0, clock::now()).await?))
}

/// `DELETE /api/rollouts/{id}`: idempotent.
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    Path(rollout_id): Path<String>,
) -> Result<StatusCode, ApiError> {
    app.delete_rollout(&rollout_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /api/rollouts/{id}/cancel`: ends it as failed. One that has ended stays as it is.
pub(super) async fn cancel(
    State(app): State<Arc<App>>,
    Path(rollout_id): Path<String>,
) -> Result<Json<Rollout>, ApiError> {
    let patch = StatusPatch {
        state: Some(RolloutState::Failed),
        error_message: Some(CANCELLED.to_owned()),
        ..StatusPatch::default()
    };
    match app.store.patch_rollout(&rollout_id, patch, clock::now()).await {
        Err(StoreError::Illegal(_)) => {
            let ended = app.store.rollout(&rollout_id).await?;
            ended.map(Json).ok_or_else(|| ApiError::not_found(&rollout_id))
        }
        patched => Ok(Json(patched?)),
    }
}

/// `POST /api/rollouts/{id}/retry`: another attempt of one that runs, in place of the one under way; of one that has ended a
/// new rollout of the same task, and it stays ended.
pub(super) async fn retry(
    State(app): State<Arc<App>>,
    Path(rollout_id): Path<String>,
) -> Result<(StatusCode, Json<Rollout>), ApiError> {
    let ended = app.store.rollout(&rollout_id).await?.ok_or_else(|| ApiError::not_found(&rollout_id))?;
    match ended.status.state {
        RolloutState::Queuing => {
            return Err(ApiError::conflict(format!(
                "Rollout {rollout_id} is queuing: its first attempt is still to come"
            )));
        }
        RolloutState::Running => {
            let (detail, _new) = app.store.create_attempt(&rollout_id, None, clock::now()).await?;
            let patch = StatusPatch { last_attempt_id: Some(detail.attempt.attempt_id), ..StatusPatch::default() };
            match app.store.patch_rollout(&rollout_id, patch, clock::now()).await {
                // It has ended since we looked.
                Err(StoreError::Illegal(_)) => {}
                patched => return Ok((StatusCode::OK, Json(patched?))),
            }
        }
        RolloutState::Succeeded | RolloutState::Failed => {}
    }
    let create = RolloutCreate {
        input: ended.input,
        is_train: ended.is_train,
        config: Some(ended.config),
        metadata: Some(ended.metadata),
        rollout_id: None,
        retry_of: Some(rollout_id),
    };
    let mut created = app.store.create_rollouts(vec![new_rollout(create, clock::now())]).await?;
    let rollout = created.pop().ok_or_else(|| ApiError::from(StoreError::Closed))?;
    Ok((StatusCode::CREATED, Json(rollout)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConsumedBody {
    run_id: String,
    step: u64,
    rollout_ids: Vec<String>,
}

/// `POST /api/rollouts/consumed`: the checkpoint of this step, which trained on these rollouts, is on disk. Idempotent.
pub(super) async fn consumed(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let ConsumedBody { run_id, step, rollout_ids } = object(&read_body(&app, request).await?)?;
    let marked = app.store.mark_consumed(&run_id, step, rollout_ids).await?;
    Ok(Json(json!({"status": "ok", "marked": marked})))
}
