//! The event log of an attempt.

use std::sync::Arc;

use agl_core::event::{Event, EventCreate, MODEL_REQUEST, REWARD};
use agl_core::rollout::RewardSource;
use agl_store::StoredEvent;
use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::Uri;
use axum::response::Response;

use super::input::{Query, object};
use super::{large_json, triplet};
use crate::app::App;
use crate::clock;
use crate::error::ApiError;
use crate::keys::Access;
use crate::proxy::read_body;
use crate::proxy::recorder::AttemptKey;
use crate::watchdog::Wait;

/// `POST /api/rollouts/{id}/attempt/{aid}/events`.
pub(super) async fn append(
    State(app): State<Arc<App>>,
    Path((rollout_id, attempt_id)): Path<(String, String)>,
    request: Request,
) -> Result<Json<Event>, ApiError> {
    let access = app.check_attempt(request.headers(), request.uri(), &rollout_id, &attempt_id).await?;
    let event: EventCreate = object(&read_body(&app, request).await?)?;
    check_access(&app, access, &rollout_id, &event).await?;
    // However much an agent has said, its evaluator still has a word.
    if access.is_agent() || event.event_type != REWARD {
        app.quota.check(&rollout_id).await?;
    }
    let key = AttemptKey { rollout_id, attempt_id };
    let _watched = app.watchdog.watch(Wait::Commit, &key, &app.shown_store);
    let appended = app.store.append_event(&key.rollout_id, &key.attempt_id, event, clock::now()).await?;
    app.quota.note(&key.rollout_id);
    Ok(Json(appended))
}

/// What an agent under training must not be able to say, not by leaving out its key either.
async fn check_access(app: &App, access: Access, rollout_id: &str, event: &EventCreate) -> Result<(), ApiError> {
    if matches!(access, Access::Attempt(_)) && event.event_type == MODEL_REQUEST {
        return Err(ApiError::forbidden("Events of type model_request are written by the gateway"));
    }
    if access.is_agent() && event.event_type == REWARD {
        let rollout = app.store.rollout(rollout_id).await?.ok_or_else(|| ApiError::not_found(rollout_id))?;
        if rollout.config.reward_source == Some(RewardSource::Evaluator) {
            return Err(ApiError::forbidden(
                "The reward of this rollout is accepted from its evaluator only: the evaluator's key is needed, which it \
                 finds in AGL_KEY",
            ));
        }
    }
    Ok(())
}

/// `GET /api/rollouts/{id}/events?event_type=&format=triplet&attempt_id=`; by default those of the attempt that counts.
pub(super) async fn list(
    State(app): State<Arc<App>>,
    Path(rollout_id): Path<String>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let query = Query::of(&uri);
    let rollout = app.store.rollout(&rollout_id).await?.ok_or_else(|| ApiError::not_found(&rollout_id))?;
    let attempt_id = query.text("attempt_id").unwrap_or_else(|| rollout.current_attempt());
    let stored = app.store.events(&rollout_id, attempt_id, query.text("event_type")).await?;
    let as_triplets = query.text("format") == Some("triplet");
    large_json(move || {
        let stored = stored.into_iter();
        if as_triplets {
            let triplets = stored.map(triplet::of_stored).collect::<Result<_, _>>()?;
            return Ok(triplet::last_per_prompt(triplets));
        }
        Ok(stored.map(StoredEvent::into_event).collect::<Result<Vec<_>, _>>()?)
    })
    .await
}
