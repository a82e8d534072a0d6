//! A gateway of one file: the real state machine of rollouts and attempts behind the endpoints that a controller uses.
//! It notes every call, and what it says about an agent's model calls is scripted.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agl_core::attempt::{Attempt, AttemptPatch, AttemptState};
use agl_core::rollout::{Rollout, RolloutState, StatusPatch};
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

#[derive(Default)]
struct Inside {
    rollouts: Vec<Rollout>,
    attempts: BTreeMap<(String, String), Attempt>,
    changes: Vec<Value>,
    calls: Vec<String>,
    events: Vec<Value>,
    /// What is said about the model calls of attempts with this id; others made one that was answered.
    model_calls: HashMap<String, (u64, u16)>,
    /// Calls, named as in `calls`, that are answered with 500 the next so many times.
    broken: HashMap<String, u32>,
    started_at: f64,
}

impl Inside {
    /// Notes a call and tells whether it is to fail.
    fn breaks(&mut self, call: String) -> bool {
        let left = self.broken.get_mut(&call).filter(|left| **left > 0);
        let breaks = left.map(|left| *left -= 1).is_some();
        if !breaks {
            self.calls.push(call);
        }
        breaks
    }
}

#[derive(Clone)]
struct Shared {
    inside: Arc<Mutex<Inside>>,
    changed: Arc<watch::Sender<usize>>,
}

pub struct FakeGateway {
    pub url: String,
    shared: Shared,
    task: JoinHandle<()>,
}

pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

impl FakeGateway {
    pub async fn start() -> Self {
        let shared = Shared { inside: Arc::default(), changed: Arc::new(watch::Sender::new(0)) };
        let router = Router::new()
            .route("/api/rollouts", get(list_rollouts))
            .route("/api/rollouts/watch", get(watch_rollouts))
            .route("/api/rollouts/{id}", get(get_rollout).patch(patch_rollout))
            .route("/api/rollouts/{id}/attempts", get(list_attempts).post(create_attempt))
            .route("/api/rollouts/{id}/attempts/{attempt}", axum::routing::patch(patch_attempt))
            .route("/api/rollouts/{id}/attempt/{attempt}/events", post(post_event))
            .route("/proxy/{*path}", get(|| async { "a model answers" }))
            .with_state(shared.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { url, shared, task }
    }

    /// Creates a queued rollout and returns its id.
    pub fn create(&self, config: Value) -> String {
        let mut inside = self.shared.inside.lock().unwrap();
        let id = format!("r{}", inside.rollouts.len());
        let create = serde_json::from_value(json!({"input": {"question": "2+2?"}, "config": config})).unwrap();
        inside.rollouts.push(Rollout::new(create, id.clone(), now()));
        self.shared.announce(&mut inside, "created", &id);
        id
    }

    /// What the attempts of this number are said to have called.
    pub fn say_calls(&self, attempt_id: &str, count: u64, last_status: u16) {
        self.shared.inside.lock().unwrap().model_calls.insert(attempt_id.to_owned(), (count, last_status));
    }

    /// The next `times` calls of this name fail inside the gateway.
    pub fn break_call(&self, call: &str, times: u32) {
        self.shared.inside.lock().unwrap().broken.insert(call.to_owned(), times);
    }

    pub fn is_still_to_break(&self, call: &str) -> bool {
        self.shared.inside.lock().unwrap().broken.get(call).is_some_and(|left| *left > 0)
    }

    /// From now on it says that it has just been started.
    pub fn say_restarted(&self) {
        self.shared.inside.lock().unwrap().started_at = now();
    }

    /// What the gateway makes of `retry` for a rollout that runs.
    pub fn ask_for_another_attempt(&self, id: &str) {
        self.ask_for_another_attempt_silently(id);
        let mut inside = self.shared.inside.lock().unwrap();
        self.shared.announce(&mut inside, "updated", id);
    }

    /// The same; the watch does not tell of it.
    pub fn ask_for_another_attempt_silently(&self, id: &str) {
        let mut inside = self.shared.inside.lock().unwrap();
        let number = inside.attempts.keys().filter(|(of, _)| of == id).count();
        let attempt = Attempt::new(id.to_owned(), number.to_string(), now());
        inside.attempts.insert((id.to_owned(), number.to_string()), attempt);
        let patch = StatusPatch { last_attempt_id: Some(number.to_string()), ..StatusPatch::default() };
        inside.rollouts.iter_mut().find(|rollout| rollout.rollout_id == id).unwrap().apply(&patch, now()).unwrap();
    }

    /// Ends a rollout from outside; the watch does not tell of it.
    pub fn cancel_silently(&self, id: &str) {
        let patch = StatusPatch { state: Some(RolloutState::Failed), ..StatusPatch::default() };
        let mut inside = self.shared.inside.lock().unwrap();
        inside.rollouts.iter_mut().find(|rollout| rollout.rollout_id == id).unwrap().apply(&patch, now()).unwrap();
    }

    /// Makes an attempt as a controller does that dies right after.
    pub fn begin_attempt(&self, id: &str, attempt_id: &str, state: AttemptState) {
        let mut inside = self.shared.inside.lock().unwrap();
        let mut attempt = Attempt::new(id.to_owned(), attempt_id.to_owned(), now());
        attempt.state = state;
        inside.attempts.insert((id.to_owned(), attempt_id.to_owned()), attempt);
        let patch = StatusPatch {
            state: Some(RolloutState::Running),
            last_attempt_id: Some(attempt_id.to_owned()),
            ..StatusPatch::default()
        };
        inside.rollouts.iter_mut().find(|rollout| rollout.rollout_id == id).unwrap().apply(&patch, now()).unwrap();
    }

    /// Ends a rollout from outside.
    pub fn cancel(&self, id: &str) {
        let patch = StatusPatch {
            state: Some(RolloutState::Failed),
            error_message: Some("cancelled".into()),
            ..StatusPatch::default()
        };
        let mut inside = self.shared.inside.lock().unwrap();
        inside.rollouts.iter_mut().find(|rollout| rollout.rollout_id == id).unwrap().apply(&patch, now()).unwrap();
        self.shared.announce(&mut inside, "updated", id);
    }

    pub fn rollout(&self, id: &str) -> Rollout {
        let inside = self.shared.inside.lock().unwrap();
        inside.rollouts.iter().find(|rollout| rollout.rollout_id == id).unwrap().clone()
    }

    /// How many there are.
    pub fn rollouts(&self) -> usize {
        self.shared.inside.lock().unwrap().rollouts.len()
    }

    pub fn attempts(&self, id: &str) -> Vec<Attempt> {
        let inside = self.shared.inside.lock().unwrap();
        inside.attempts.values().filter(|attempt| attempt.rollout_id == id).cloned().collect()
    }

    /// All calls so far that change something.
    pub fn calls(&self) -> Vec<String> {
        self.shared.inside.lock().unwrap().calls.clone()
    }

    pub fn events(&self) -> Vec<Value> {
        self.shared.inside.lock().unwrap().events.clone()
    }

    /// Waits until `condition` holds.
    pub async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let waited = tokio::time::timeout(Duration::from_secs(30), async {
            while !condition(self) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        assert!(waited.await.is_ok(), "waited in vain until {what}; calls so far: {:#?}", self.calls());
    }

    /// Waits until a rollout has ended.
    pub async fn ended(&self, id: &str) -> Rollout {
        self.until(&format!("{id} ends"), |gateway| gateway.rollout(id).status.state.is_terminal()).await;
        self.rollout(id)
    }
}

impl Drop for FakeGateway {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Shared {
    fn announce(&self, inside: &mut Inside, kind: &str, id: &str) {
        let rollout = inside.rollouts.iter().find(|rollout| rollout.rollout_id == id);
        let change = json!({"cursor": inside.changes.len() + 1, "kind": kind, "rollout_id": id, "rollout": rollout});
        inside.changes.push(change);
        self.changed.send_replace(inside.changes.len());
    }
}

fn refuse(status: StatusCode, detail: impl ToString) -> Response {
    (status, Json(json!({"detail": detail.to_string()}))).into_response()
}

fn sse(change: &Value) -> String {
    format!("id: {}\nevent: rollout\ndata: {change}\n\n", change["cursor"])
}

async fn watch_rollouts(State(shared): State<Shared>, Query(query): Query<HashMap<String, usize>>) -> Response {
    let (first, cursor) = {
        let inside = shared.inside.lock().unwrap();
        match query.get("after") {
            Some(after) => (String::new(), *after),
            None => {
                let cursor = inside.changes.len();
                let open = inside.rollouts.iter().filter(|rollout| !rollout.status.state.is_terminal());
                let snapshot = open.map(|rollout| {
                    sse(&json!({"cursor": cursor, "kind": "snapshot", "rollout_id": rollout.rollout_id, "rollout": rollout}))
                });
                (snapshot.collect::<String>() + ": snapshot ends\n\n", cursor)
            }
        }
    };
    let changed = shared.changed.subscribe();
    let stream = futures_util::stream::unfold((shared, changed, cursor, Some(first)), async |mut state| {
        if let Some(first) = state.3.take() {
            return Some((Ok::<_, Infallible>(first), state));
        }
        loop {
            let news: String = state.0.inside.lock().unwrap().changes[state.2..].iter().map(sse).collect();
            if !news.is_empty() {
                state.2 += news.matches("\n\n").count();
                return Some((Ok(news), state));
            }
            state.1.changed().await.ok()?;
        }
    });
    ([("content-type", "text/event-stream")], Body::from_stream(stream)).into_response()
}

/// Those that have not ended, oldest first.
async fn list_rollouts(State(shared): State<Shared>, Query(query): Query<HashMap<String, String>>) -> Json<Value> {
    let inside = shared.inside.lock().unwrap();
    let open = |rollout: &&Rollout| !rollout.status.state.is_terminal();
    let after = query.get("after");
    let skip = after.map_or(0, |after| 1 + inside.rollouts.iter().position(|it| it.rollout_id == *after).unwrap());
    let page: Vec<&Rollout> =
        inside.rollouts.iter().skip(skip).filter(open).take(query["limit"].parse().unwrap()).collect();
    Json(json!(page))
}

async fn get_rollout(State(shared): State<Shared>, Path(id): Path<String>) -> Response {
    let inside = shared.inside.lock().unwrap();
    match inside.rollouts.iter().find(|rollout| rollout.rollout_id == id) {
        Some(rollout) => Json(json!({"rollout": rollout, "attempts": []})).into_response(),
        None => refuse(StatusCode::NOT_FOUND, "Rollout not found"),
    }
}

async fn patch_rollout(State(shared): State<Shared>, Path(id): Path<String>, Json(body): Json<Value>) -> Response {
    let patch: StatusPatch = serde_json::from_value(body["status"].clone()).unwrap();
    let mut inside = shared.inside.lock().unwrap();
    let state = patch.state.map(|state| state.to_string()).unwrap_or_default();
    let attempt = patch.last_attempt_id.as_deref().unwrap_or_default();
    if inside.breaks(format!("PATCH {id} {state} {attempt}").trim_end().to_owned()) {
        return refuse(StatusCode::INTERNAL_SERVER_ERROR, "broken on purpose");
    }
    let rollout = inside.rollouts.iter_mut().find(|rollout| rollout.rollout_id == id).unwrap();
    if let Err(error) = rollout.apply(&patch, now()) {
        return refuse(StatusCode::CONFLICT, error);
    }
    let answer = Json(rollout.clone()).into_response();
    shared.announce(&mut inside, "updated", &id);
    answer
}

fn detail(inside: &Inside, attempt: &Attempt) -> Value {
    let (calls, status) = inside.model_calls.get(&attempt.attempt_id).copied().unwrap_or((1, 200));
    let mut value = serde_json::to_value(attempt).unwrap();
    value["calls"] = json!(calls);
    value["gateway_started_at"] = json!(inside.started_at);
    value["last_call"] = match calls {
        0 => Value::Null,
        _ => json!({"http_status": status, "status": if status < 400 { "ok" } else { "error" }}),
    };
    value
}

async fn list_attempts(State(shared): State<Shared>, Path(id): Path<String>) -> Json<Value> {
    let inside = shared.inside.lock().unwrap();
    let of_this = inside.attempts.values().filter(|attempt| attempt.rollout_id == id);
    Json(of_this.map(|attempt| detail(&inside, attempt)).collect())
}

async fn create_attempt(State(shared): State<Shared>, Path(id): Path<String>, Json(body): Json<Value>) -> Response {
    let mut inside = shared.inside.lock().unwrap();
    let attempt_id = body["attempt_id"].as_str().unwrap().to_owned();
    if inside.breaks(format!("POST {id}/{attempt_id}")) {
        return refuse(StatusCode::INTERNAL_SERVER_ERROR, "broken on purpose");
    }
    let key = (id.clone(), attempt_id.clone());
    let attempt =
        inside.attempts.entry(key).or_insert_with(|| Attempt::new(id.clone(), attempt_id.clone(), now())).clone();
    let mut grant = detail(&inside, &attempt);
    grant["key"] = json!(format!("agent-{id}-{attempt_id}"));
    grant["reward_key"] = json!(format!("reward-{id}-{attempt_id}"));
    (StatusCode::CREATED, Json(grant)).into_response()
}

async fn patch_attempt(
    State(shared): State<Shared>,
    Path((id, attempt_id)): Path<(String, String)>,
    Json(patch): Json<AttemptPatch>,
) -> Response {
    let mut inside = shared.inside.lock().unwrap();
    let state = patch.state.map(|state| state.as_str()).unwrap_or_default();
    let ended = if patch.agent_ended == Some(true) { "agent_ended" } else { "" };
    let class = patch.failure.map(|class| format!(" {class:?}").to_lowercase()).unwrap_or_default();
    if inside.breaks(format!("PATCH {id}/{attempt_id} {state}{ended}{class}")) {
        return refuse(StatusCode::INSUFFICIENT_STORAGE, "broken on purpose");
    }
    let attempt = inside.attempts.get_mut(&(id, attempt_id)).unwrap();
    if let Err(error) = attempt.apply(&patch, now()) {
        return refuse(StatusCode::CONFLICT, error);
    }
    let attempt = attempt.clone();
    Json(detail(&inside, &attempt)).into_response()
}

async fn post_event(
    State(shared): State<Shared>,
    Path((id, attempt_id)): Path<(String, String)>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> Response {
    let key = headers.get("authorization").map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default();
    let mut inside = shared.inside.lock().unwrap();
    inside.calls.push(format!("EVENT {id}/{attempt_id}"));
    let event = json!({"key": key, "rollout": id, "attempt": attempt_id, "body": body});
    inside.events.push(event.clone());
    Json(event).into_response()
}
