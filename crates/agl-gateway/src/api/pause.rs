//! The pause around a weight update: persisted, with an owner and a lease, and one for all gateways on the store.

use std::sync::Arc;

use agl_store::Pause;
use axum::Json;
use axum::extract::{Request, State};
use serde::{Deserialize, Serialize};

use super::input::object;
use crate::app::App;
use crate::clock;
use crate::config::seconds_to_duration;
use crate::error::ApiError;
use crate::gate::GateView;
use crate::proxy::read_body;

/// What a caller that cannot be held is told to wait, unless the pause says otherwise.
const RETRY_AFTER_SECONDS: u64 = 5;

#[derive(Deserialize)]
struct PauseBody {
    #[serde(default = "default_retry_after")]
    retry_after_seconds: u64,
    #[serde(default)]
    reason: Option<String>,
    #[serde(default)]
    owner: Option<String>,
    #[serde(default)]
    lease_seconds: Option<f64>,
}

fn default_retry_after() -> u64 {
    RETRY_AFTER_SECONDS
}

#[derive(Default, Deserialize)]
struct ResumeBody {
    #[serde(default)]
    owner: Option<String>,
}

/// The state of the proxy. The first four fields are the original's.
#[derive(Serialize)]
pub(super) struct ProxyState {
    paused: bool,
    retry_after_seconds: u64,
    reason: Option<String>,
    inflight: usize,
    held: usize,
    waiting: usize,
    owner: Option<String>,
    lease_expires_at: Option<f64>,
}

async fn view(app: &App) -> Result<Json<ProxyState>, ApiError> {
    let GateView { pause, inflight, held } = app.peers.view().await?;
    let waiting = app.places.waiting();
    let paused = pause.is_some();
    let lease_expires_at = pause.as_ref().map(|pause| pause.lease_expires_at);
    let retry_after_seconds = pause.as_ref().map_or(RETRY_AFTER_SECONDS, |pause| pause.retry_after_seconds);
    let (reason, owner) = pause.map_or((None, None), |pause| (pause.reason, pause.owner));
    Ok(Json(ProxyState { paused, retry_after_seconds, reason, inflight, held, waiting, owner, lease_expires_at }))
}

/// `GET /proxy/state`.
pub(super) async fn state(State(app): State<Arc<App>>) -> Result<Json<ProxyState>, ApiError> {
    view(&app).await
}

/// `POST /proxy/pause`. The owner of a live pause may renew it; a pause without an owner may be taken over by anyone. Answers
/// once every gateway on the store keeps the pause: what `inflight` counts from here on was there before it.
pub(super) async fn pause(State(app): State<Arc<App>>, request: Request) -> Result<Json<ProxyState>, ApiError> {
    let asked: PauseBody = object(&read_body(&app, request).await?)?;
    let lease = asked.lease_seconds.unwrap_or(app.config.pause_lease_seconds);
    if seconds_to_duration(lease).is_none() {
        let loc = vec!["body".into(), "lease_seconds".into()];
        return Err(ApiError::invalid(loc, "Input should be a number of seconds from 0 up to a year", "value_error"));
    }
    let _one_at_a_time = app.pausing.lock().await;
    let pause = loop {
        let before = app.store.pause().await?;
        if let Some(held_by) = other_owner(live(before.as_ref()), asked.owner.as_deref()) {
            return Err(held_by_another(held_by));
        }
        let pause = Pause {
            retry_after_seconds: asked.retry_after_seconds,
            reason: asked.reason.clone(),
            owner: asked.owner.clone(),
            lease_expires_at: clock::now() + lease,
        };
        // Otherwise another gateway was faster: what it has written counts.
        if app.store.put_pause(before, Some(pause.clone())).await? {
            break pause;
        }
    };
    app.gate.pause(pause);
    app.peers.agree().await?;
    view(&app).await
}

/// `POST /proxy/resume`: with an owner ends that owner's pause only, without one any pause.
pub(super) async fn resume(State(app): State<Arc<App>>, request: Request) -> Result<Json<ProxyState>, ApiError> {
    let raw = read_body(&app, request).await?;
    let ResumeBody { owner } = if raw.is_empty() { ResumeBody::default() } else { object(&raw)? };
    let _one_at_a_time = app.pausing.lock().await;
    loop {
        let before = app.store.pause().await?;
        if let Some(owner) = owner.as_deref()
            && let Some(pause) = live(before.as_ref())
            && pause.owner.as_deref() != Some(owner)
        {
            return Err(held_by_another(pause.owner.as_deref().unwrap_or("nobody in particular")));
        }
        if before.is_none() || app.store.put_pause(before, None).await? {
            break;
        }
    }
    app.gate.resume();
    view(&app).await
}

/// The pause, unless its lease is over.
fn live(pause: Option<&Pause>) -> Option<&Pause> {
    pause.filter(|pause| pause.lease_expires_at > clock::now())
}

fn other_owner<'a>(live: Option<&'a Pause>, asking: Option<&str>) -> Option<&'a str> {
    let owner = live?.owner.as_deref()?;
    (asking != Some(owner)).then_some(owner)
}

fn held_by_another(owner: &str) -> ApiError {
    ApiError::conflict(format!(
        "The gateway is paused by '{owner}'. Wait for its resume or the end of its lease, or end any pause with POST /proxy/resume without an owner"
    ))
}
