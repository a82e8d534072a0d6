//! Its HTTP interface: lists by pages, watches that resume, objects.

use std::collections::HashMap;
use std::convert::Infallible;

use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};

use super::{Kubelet, Shared, exited, running};

pub(super) fn router(shared: Shared) -> Router {
    let collection = get(list).post(create);
    let object = get(get_one).put(replace).delete(delete);
    let mut router = Router::new();
    for prefix in ["/apis/batch/v1", "/api/v1", "/apis/coordination.k8s.io/v1"] {
        router = router
            .route(&format!("{prefix}/namespaces/{{namespace}}/{{plural}}"), collection.clone())
            .route(&format!("{prefix}/namespaces/{{namespace}}/{{plural}}/{{name}}"), object.clone());
    }
    router.route("/api/v1/namespaces/{namespace}/pods/{name}/log", get(log)).with_state(shared)
}

fn refuse(code: u16, reason: &str, message: &str) -> Response {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message});
    (StatusCode::from_u16(code).unwrap(), Json(status)).into_response()
}

fn matches(object: &Value, selector: &str) -> bool {
    selector.split(',').filter(|part| !part.is_empty()).all(|part| {
        let (name, value) = part.split_once('=').unwrap();
        object["metadata"]["labels"][name] == value
    })
}

async fn list(
    State(shared): State<Shared>,
    Path((_, plural)): Path<(String, String)>,
    Query(query): Query<HashMap<String, String>>,
) -> Response {
    let selector = query.get("labelSelector").cloned().unwrap_or_default();
    let number = |name: &str| query.get(name).and_then(|text| text.parse::<u64>().ok());
    if query.get("watch").is_some_and(|watch| watch == "true") {
        return follow(shared, plural, selector, number("resourceVersion").unwrap_or(0));
    }
    let mut inside = shared.inside.lock().unwrap();
    inside.lists.push(format!("{plural} {}", query.get("continue").map_or("0", String::as_str)));
    if let Some(fault) = inside.fault(&format!("LIST {plural}")) {
        return fault;
    }
    let from = number("continue").unwrap_or(0) as usize;
    let limit = number("limit").unwrap_or(u64::MAX) as usize;
    let all: Vec<Value> = inside
        .objects
        .iter()
        .filter(|((known, _), object)| *known == plural && matches(object, &selector))
        .map(|(_, object)| object.clone())
        .collect();
    let page: Vec<&Value> = all.iter().skip(from).take(limit).collect();
    let next = (from + page.len() < all.len()).then(|| (from + page.len()).to_string());
    let metadata = json!({"resourceVersion": inside.version.to_string(), "continue": next.unwrap_or_default()});
    Json(json!({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": page})).into_response()
}

fn follow(shared: Shared, plural: String, selector: String, from: u64) -> Response {
    let epoch = {
        let inside = shared.inside.lock().unwrap();
        if from < inside.forgotten {
            let status =
                json!({"kind": "Status", "code": 410, "reason": "Expired", "status": "Failure", "message": "too old"});
            return Body::from(json!({"type": "ERROR", "object": status}).to_string() + "\n").into_response();
        }
        inside.watch_epoch
    };
    let changed = shared.changed.subscribe();
    let stream = futures_util::stream::unfold((shared, changed, from), move |mut state| {
        let (plural, selector) = (plural.clone(), selector.clone());
        async move {
            loop {
                let text = {
                    let inside = state.0.inside.lock().unwrap();
                    if inside.watch_epoch != epoch {
                        return None;
                    }
                    let start = inside.changes.partition_point(|change| change.0 <= state.2);
                    let news = &inside.changes[start..];
                    state.2 = news.last().map_or(state.2, |last| last.0);
                    let ours = news.iter().filter(|change| change.1 == plural && matches(&change.3, &selector));
                    ours.map(|change| json!({"type": change.2, "object": change.3}).to_string() + "\n")
                        .collect::<String>()
                };
                if !text.is_empty() {
                    return Some((Ok::<_, Infallible>(text), state));
                }
                state.1.changed().await.ok()?;
            }
        }
    });
    Body::from_stream(stream).into_response()
}

async fn get_one(State(shared): State<Shared>, Path((_, plural, name)): Path<(String, String, String)>) -> Response {
    let inside = shared.inside.lock().unwrap();
    match inside.objects.get(&(plural, name)) {
        Some(object) => Json(object.clone()).into_response(),
        None => refuse(404, "NotFound", "not found"),
    }
}

async fn create(
    State(shared): State<Shared>,
    Path((_, plural)): Path<(String, String)>,
    Json(object): Json<Value>,
) -> Response {
    let name = object["metadata"]["name"].as_str().unwrap().to_owned();
    let (answer, kubelet) = shared.change(|inside| {
        if let Some(fault) = inside.fault(&format!("POST {plural}")) {
            return (fault, Kubelet::Test);
        }
        if inside.objects.contains_key(&(plural.clone(), name.clone())) {
            return (refuse(409, "AlreadyExists", "already exists"), Kubelet::Test);
        }
        inside.calls.push(format!("POST {plural} {name}"));
        let made = inside.insert(&plural, object);
        if plural == "jobs" {
            inside.created.push(std::time::Instant::now());
            inside.insert_pod(&made);
        }
        ((StatusCode::CREATED, Json(made)).into_response(), inside.kubelet)
    });
    if let (Kubelet::Succeeds(after), "secrets") = (kubelet, plural.as_str()) {
        tokio::spawn(async move {
            shared.change(|inside| inside.pod_status(&name, running()));
            tokio::time::sleep(after).await;
            shared.change(|inside| inside.pod_status(&name, exited(0, "Completed")));
        });
    } else if let (Kubelet::Vanishes(after), "secrets") = (kubelet, plural.as_str()) {
        tokio::spawn(async move {
            shared.change(|inside| inside.pod_status(&name, running()));
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            shared.change(|inside| inside.pod_status(&name, exited(0, "Completed")));
            tokio::time::sleep(after).await;
            shared.change(|inside| inside.delete("jobs", &name, false));
        });
    }
    answer
}

async fn replace(
    State(shared): State<Shared>,
    Path((_, plural, name)): Path<(String, String, String)>,
    Json(object): Json<Value>,
) -> Response {
    shared.change(|inside| {
        if let Some(fault) = inside.fault(&format!("PUT {plural}")) {
            return fault;
        }
        let Some(known) = inside.objects.get(&(plural.clone(), name.clone())) else {
            return refuse(404, "NotFound", "");
        };
        if known["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
            return refuse(409, "Conflict", "the object has been modified");
        }
        inside.objects.insert((plural.clone(), name.clone()), object);
        Json(inside.tell(&plural, "MODIFIED", &name)).into_response()
    })
}

async fn delete(
    State(shared): State<Shared>,
    Path((_, plural, name)): Path<(String, String, String)>,
    body: String,
) -> Response {
    let foreground = body.contains("Foreground");
    shared.change(|inside| {
        if let Some(fault) = inside.fault(&format!("DELETE {plural}")) {
            return fault;
        }
        let Some(object) = inside.objects.get(&(plural.clone(), name.clone())).cloned() else {
            return refuse(404, "NotFound", "not found");
        };
        inside.calls.push(format!("DELETE {plural} {name}"));
        inside.delete(&plural, &name, foreground);
        Json(object).into_response()
    })
}

async fn log(State(shared): State<Shared>, Path((_, name)): Path<(String, String)>) -> Response {
    let inside = shared.inside.lock().unwrap();
    let job =
        inside.objects.get(&("pods".to_owned(), name)).and_then(|pod| pod["metadata"]["labels"]["job-name"].as_str());
    job.and_then(|job| inside.logs.get(job)).cloned().unwrap_or_default().into_response()
}
