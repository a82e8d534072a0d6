//! The training sequences of a rollout.

use std::sync::Arc;

use agl_core::event::{self, REWARD};
use agl_core::trajectory::{Assembly, Level};
use axum::extract::{Path, State};
use axum::http::Uri;
use axum::response::Response;
use serde::Serialize;

use super::input::Query;
use super::large_json;
use crate::app::App;
use crate::error::ApiError;
use crate::proxy::recorder::AttemptKey;

/// The sequences of an attempt and its rewards.
#[derive(Serialize)]
pub(super) struct Sequences {
    rollout_id: String,
    attempt_id: String,
    /// The outcome: the last reward that names no call.
    reward: Option<f64>,
    /// Rewards that name their call, in the order they came.
    call_rewards: Vec<(String, f64)>,
    #[serde(flatten)]
    assembly: Assembly,
}

/// `GET /api/rollouts/{id}/sequences?level=trajectory|transition&attempt_id=`; by default of the attempt that counts.
pub(super) async fn get(
    State(app): State<Arc<App>>,
    Path(rollout_id): Path<String>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let query = Query::of(&uri);
    let level = match query.text("level") {
        None | Some("trajectory") => Level::Trajectory,
        Some("transition") => Level::Transition,
        Some(_) => {
            let loc = vec!["query".into(), "level".into()];
            return Err(ApiError::invalid(loc, "Input should be 'trajectory' or 'transition'", "enum"));
        }
    };
    let rollout = app.store.rollout(&rollout_id).await?.ok_or_else(|| ApiError::not_found(&rollout_id))?;
    let attempt_id = query.text("attempt_id").unwrap_or_else(|| rollout.current_attempt()).to_owned();
    let rewards = app.store.events(&rollout_id, &attempt_id, Some(REWARD)).await?;
    let rewards: Vec<_> = rewards.into_iter().map(|stored| stored.event).collect();
    let call_rewards = event::call_rewards(&rewards).map(|(call_id, value)| (call_id.to_owned(), value)).collect();
    let key = AttemptKey { rollout_id, attempt_id };
    let assembly = app.recorder.sequences(&key, level).await?;
    let AttemptKey { rollout_id, attempt_id } = key;
    let reward = event::outcome(&rewards);
    large_json(move || Ok(Sequences { rollout_id, attempt_id, reward, call_rewards, assembly })).await
}
