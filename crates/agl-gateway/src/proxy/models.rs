//! The models that a harness is told of.

use axum::Json;
use serde_json::{Value, json};

use crate::app::App;

/// The policy, and where harnesses may choose every other registered model.
fn names(app: &App) -> Vec<String> {
    let policy = app.config.default_proxy.model_name.clone();
    if app.config.default_proxy.override_model {
        return vec![policy];
    }
    let mut others: Vec<String> = app.servers.list().into_iter().map(|server| server.model).collect();
    others.sort_unstable();
    others.dedup();
    others.retain(|name| *name != policy);
    std::iter::once(policy).chain(others).collect()
}

/// In the form of OpenAI's `GET /v1/models`.
pub(crate) fn openai(app: &App) -> Json<Value> {
    let models: Vec<Value> = names(app)
        .into_iter()
        .map(|id| json!({"id": id, "object": "model", "created": 0, "owned_by": "agl"}))
        .collect();
    Json(json!({"object": "list", "data": models}))
}

/// In the form of Anthropic's `GET /v1/models`.
pub(crate) fn anthropic(app: &App) -> Json<Value> {
    let models: Vec<Value> = names(app)
        .into_iter()
        .map(|id| json!({"type": "model", "id": id, "display_name": id, "created_at": "1970-01-01T00:00:00Z"}))
        .collect();
    let end = |index: usize| models.get(index).map(|model| model["id"].clone());
    let (first, last) = (end(0), end(models.len().saturating_sub(1)));
    Json(json!({"data": models, "has_more": false, "first_id": first, "last_id": last}))
}
