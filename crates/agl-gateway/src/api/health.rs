//! For whoever watches over the gateway: is it ready, and how is it doing.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::app::App;

/// A store that takes longer than this to read one row is stuck.
const STORE_PATIENCE: Duration = Duration::from_secs(5);

/// `GET /readyz`: 200 while the store answers and the gateway is not stopping; 503 with the reason otherwise. No key is needed.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    let problem = if *app.stopping.borrow() {
        Some("the gateway is stopping".to_owned())
    } else {
        match tokio::time::timeout(STORE_PATIENCE, app.store.pause()).await {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(format!("the store fails: {error}")),
            Err(_) => Some(format!("the store has not answered for {} seconds", STORE_PATIENCE.as_secs())),
        }
    };
    match problem {
        None => Json(json!({"status": "ready"})).into_response(),
        Some(detail) => (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"detail": detail}))).into_response(),
    }
}

/// `GET /metrics`, in Prometheus' text form.
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let text = app.metrics.render(&app.gate.view(), app.places.waiting(), &app.watchdog.stuck());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}
