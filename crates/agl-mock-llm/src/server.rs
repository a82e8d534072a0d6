//! The running server and the handle on it.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{ConnectInfo, DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use futures_util::stream;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::answer::{Asked, choose, read_request, response};
use crate::connection::{ResetSwitch, ResettableListener};
use crate::script::{Answer, Fault, FaultRule, Script, Shape};
use crate::tokenizer::{parse, write};
use crate::{llamacpp, stream as chunked};

/// A mock server that runs inside this process until it is dropped.
#[derive(Debug)]
pub struct MockLlm {
    address: SocketAddr,
    shared: Arc<Mutex<Shared>>,
    task: JoinHandle<()>,
}

/// A request as `/mock/requests` shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Received {
    /// Counted from 0 since the start of the server.
    pub number: u64,
    /// Path of the request.
    pub path: String,
    /// The `Authorization` header.
    pub authorization: Option<String>,
    /// The `traceparent` header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
    /// The body; a text where it was no JSON.
    pub body: Value,
    /// What was made to go wrong.
    pub fault: Option<Fault>,
}

/// A std mutex around it: it is never held across an await.
#[derive(Debug)]
struct Shared {
    script: Script,
    /// The next answer of [`crate::Select::Next`].
    next_answer: usize,
    received: u64,
    in_flight: usize,
    newest: VecDeque<Received>,
    /// Streams stop after their first words while this is true.
    held: watch::Sender<bool>,
}

type SharedState = Arc<Mutex<Shared>>;

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MockLlm {
    /// Starts on a free port of the loopback interface.
    ///
    /// # Errors
    /// Where no port can be had.
    pub async fn start(script: Script) -> std::io::Result<Self> {
        Self::start_on(SocketAddr::from(([127, 0, 0, 1], 0)), script).await
    }

    /// Starts on `address`.
    ///
    /// # Errors
    /// Where the address is taken.
    pub async fn start_on(address: SocketAddr, script: Script) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Mutex::new(Shared {
            script,
            next_answer: 0,
            received: 0,
            in_flight: 0,
            newest: VecDeque::new(),
            held: watch::Sender::new(false),
        }));
        let router = Router::new()
            .route("/v1/chat/completions", post(chat))
            .route("/v1/completions", post(completions))
            .route("/v1/models", get(models))
            .route("/tokenize", post(tokenize))
            .route("/detokenize", post(detokenize))
            .route("/apply-template", post(apply_template))
            .route("/mock/faults", get(faults).post(set_faults))
            .route("/mock/requests", get(requests))
            .layer(DefaultBodyLimit::disable())
            .with_state(shared.clone());
        let service = router.into_make_service_with_connect_info::<ResetSwitch>();
        let task = tokio::spawn(async move {
            // Never ends by itself.
            let _ = axum::serve(ResettableListener(listener), service).await;
        });
        Ok(Self { address, shared, task })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The endpoint to register as a model: `http://HOST:PORT/v1`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// The newest requests, oldest first.
    #[must_use]
    pub fn requests(&self) -> Vec<Received> {
        lock(&self.shared).newest.iter().cloned().collect()
    }

    /// How many requests have come so far.
    #[must_use]
    pub fn received(&self) -> u64 {
        lock(&self.shared).received
    }

    /// How many requests wait for their answer now.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        lock(&self.shared).in_flight
    }

    /// Replaces all faults from the next request on.
    pub fn set_faults(&self, faults: Vec<FaultRule>) {
        lock(&self.shared).script.faults = faults;
    }

    /// While `held`, streams stop after their first words.
    pub fn hold_streams(&self, held: bool) {
        lock(&self.shared).held.send_replace(held);
    }

    /// Runs until the task is stopped from outside.
    pub async fn wait(mut self) {
        let _ = (&mut self.task).await;
    }
}

impl Drop for MockLlm {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Counts a request as in flight until its handler has ended, also when the client hangs up.
struct InFlight(SharedState);

impl InFlight {
    fn enter(shared: &SharedState) -> Self {
        lock(shared).in_flight += 1;
        Self(shared.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        lock(&self.0).in_flight -= 1;
    }
}

async fn chat(
    State(shared): State<SharedState>,
    ConnectInfo(switch): ConnectInfo<ResetSwitch>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    serve(&shared, &switch, true, &uri, &headers, &body).await
}

async fn completions(
    State(shared): State<SharedState>,
    ConnectInfo(switch): ConnectInfo<ResetSwitch>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    serve(&shared, &switch, false, &uri, &headers, &body).await
}

async fn serve(
    shared: &SharedState,
    switch: &ResetSwitch,
    chat: bool,
    uri: &Uri,
    headers: &HeaderMap,
    body: &[u8],
) -> Response {
    let in_flight = InFlight::enter(shared);
    let parsed: Option<Value> = serde_json::from_slice(body).ok();
    let named = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let (authorization, traceparent) = (named(header::AUTHORIZATION.as_str()), named("traceparent"));
    let (number, fault) = {
        let mut shared = lock(shared);
        let number = shared.received;
        shared.received += 1;
        let fault = strike(&shared.script, number);
        let body = parsed.clone().unwrap_or_else(|| json!(String::from_utf8_lossy(body)));
        let received =
            Received { number, path: uri.path().to_owned(), authorization, traceparent, body, fault: fault.clone() };
        shared.newest.push_back(received);
        let surplus = shared.newest.len().saturating_sub(shared.script.keep_requests);
        shared.newest.drain(..surplus);
        (number, fault)
    };
    match &fault {
        Some(Fault::Delay { seconds }) => {
            tokio::time::sleep(Duration::try_from_secs_f64(*seconds).unwrap_or(Duration::MAX)).await;
        }
        Some(Fault::Status { status, retry_after }) => return error_status(*status, *retry_after),
        Some(Fault::Reset) => {
            switch.throw();
            return StatusCode::INTERNAL_SERVER_ERROR.into_response();
        }
        Some(Fault::WrongJson) => {
            return ([(header::CONTENT_TYPE, "application/json")], "{\"choices\": [nonsense").into_response();
        }
        Some(Fault::Hang) => std::future::pending().await,
        _ => {}
    }
    let Some(parsed) = parsed else {
        return refuse(StatusCode::BAD_REQUEST, "the body is not JSON");
    };
    let shape = lock(shared).script.shape;
    let asked = match read_request(chat, &parsed, shape) {
        Ok(asked) => asked,
        Err(message) => return refuse(StatusCode::BAD_REQUEST, &message),
    };
    let (script, answers) = {
        let mut shared = lock(shared);
        let count = asked.prompts.len() * asked.choices;
        let first = shared.next_answer;
        shared.next_answer += count;
        let answers: Option<Vec<Answer>> =
            (first..first + count).map(|next| choose(&shared.script, &asked, next)).collect();
        (shared.script.clone(), answers)
    };
    let Some(answers) = answers else {
        return refuse(StatusCode::INTERNAL_SERVER_ERROR, "the script is at its end");
    };
    if let Some(Answer::Raw { raw, status }) = answers.first() {
        let status = StatusCode::from_u16(*status).unwrap_or(StatusCode::OK);
        return (status, [(header::CONTENT_TYPE, "application/json")], raw.clone()).into_response();
    }
    if let Some(include_usage) = asked.stream {
        let whole = response(&script, &Asked { return_token_ids: true, ..asked.clone() }, &answers, number, None);
        let events = chunked::events(&whole, &asked, include_usage, fault.as_ref());
        return streamed(events, matches!(fault, Some(Fault::Truncated)), in_flight);
    }
    let body = match shape {
        Shape::Vllm => response(&script, &asked, &answers, number, fault.as_ref()),
        Shape::LlamaCpp => {
            let whole = response(&script, &Asked { return_token_ids: true, ..asked.clone() }, &answers, number, None);
            llamacpp::body(whole, &asked, fault.as_ref())
        }
    };
    if matches!(fault, Some(Fault::Truncated)) { truncated(&body.to_string()) } else { Json(body).into_response() }
}

/// The first fault whose rule applies to the request of this number.
fn strike(script: &Script, number: u64) -> Option<Fault> {
    script.faults.iter().enumerate().find_map(|(index, rule)| {
        let seed = script.seed ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ ((index as u64) << 56);
        let drawn = || StdRng::seed_from_u64(seed).random::<f64>() < rule.probability;
        (rule.at.contains(&number) || drawn()).then(|| rule.fault.clone())
    })
}

fn error_status(status: u16, retry_after: Option<u64>) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = refuse(status, "a fault on demand");
    if let Some(seconds) = retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

fn refuse(status: StatusCode, message: &str) -> Response {
    let body = json!({"error": {"message": message, "type": status.canonical_reason(), "param": null, "code": status.as_u16()}});
    (status, Json(body)).into_response()
}

/// Promises the whole body and gives half of it.
fn truncated(body: &str) -> Response {
    let half = Bytes::copy_from_slice(&body.as_bytes()[..body.len() / 2]);
    let parts = stream::unfold(Some(half), |state| async move {
        match state {
            Some(half) => Some((Ok(half), None)),
            None => {
                // Let the first half leave before the connection breaks.
                tokio::time::sleep(Duration::from_millis(20)).await;
                Some((Err(std::io::Error::from(ErrorKind::BrokenPipe)), None))
            }
        }
    });
    let headers =
        [(header::CONTENT_TYPE, "application/json".to_owned()), (header::CONTENT_LENGTH, body.len().to_string())];
    (headers, Body::from_stream(parts)).into_response()
}

/// A stream, which may stop after its first words for a while, or break in the middle.
fn streamed(events: Vec<String>, breaks: bool, in_flight: InFlight) -> Response {
    let held = lock(&in_flight.0).held.subscribe();
    let whole = events.len();
    let events: VecDeque<String> = events.into_iter().take(if breaks { whole / 2 } else { whole }).collect();
    let parts = stream::unfold((events, 0_usize, in_flight), move |(mut events, sent, in_flight)| {
        let mut held = held.clone();
        async move {
            if sent == FIRST_WORDS {
                let _gone = held.wait_for(|held| !held).await;
            }
            match events.pop_front() {
                Some(event) => Some((Ok(Bytes::from(event)), (events, sent + 1, in_flight))),
                None if breaks && sent < whole => {
                    // Let what was said leave before the connection breaks.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    Some((Err(std::io::Error::from(ErrorKind::BrokenPipe)), (events, whole, in_flight)))
                }
                None => None,
            }
        }
    });
    ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(parts)).into_response()
}

/// So many events come before a stream stops that is held: who speaks, that it thinks, and the first piece of what.
const FIRST_WORDS: usize = 3;

/// llama.cpp's: the prompt of a conversation as text.
async fn apply_template(State(shared): State<SharedState>, body: Bytes) -> Response {
    if lock(&shared).script.shape != Shape::LlamaCpp {
        return StatusCode::NOT_FOUND.into_response();
    }
    let asked = serde_json::from_slice(&body).map_err(|error| error.to_string());
    match asked.and_then(|body| read_request(true, &body, Shape::LlamaCpp)) {
        Ok(asked) => Json(json!({"prompt": write(&asked.prompts[0])})).into_response(),
        Err(message) => refuse(StatusCode::BAD_REQUEST, &message),
    }
}

async fn tokenize(State(shared): State<SharedState>, body: Bytes) -> Response {
    let asked: Result<Value, String> = serde_json::from_slice(&body).map_err(|error| error.to_string());
    if lock(&shared).script.shape == Shape::LlamaCpp {
        let content = asked.ok().and_then(|body| body["content"].as_str().map(parse)).unwrap_or_default();
        return Json(json!({"tokens": content})).into_response();
    }
    match asked.and_then(|body| read_request(true, &body, Shape::Vllm)) {
        Ok(asked) => {
            let tokens = asked.prompts.into_iter().next().unwrap_or_default();
            Json(json!({"count": tokens.len(), "max_model_len": 1 << 20, "tokens": tokens})).into_response()
        }
        Err(message) => (StatusCode::BAD_REQUEST, Json(json!({"error": {"message": message}}))).into_response(),
    }
}

#[derive(Deserialize)]
struct Tokens {
    tokens: Vec<u32>,
}

async fn detokenize(Json(asked): Json<Tokens>) -> Json<Value> {
    Json(json!({"prompt": crate::tokenizer::decode_with_frames(&asked.tokens)}))
}

async fn models(State(shared): State<SharedState>) -> Json<Value> {
    let model = lock(&shared).script.model.clone();
    Json(json!({"object": "list", "data": [
        {"id": model, "object": "model", "created": 1_700_000_000, "owned_by": "agl-mock-llm", "max_model_len": 1_048_576}]}))
}

async fn faults(State(shared): State<SharedState>) -> Json<Vec<FaultRule>> {
    Json(lock(&shared).script.faults.clone())
}

/// Replaces all faults; an empty list ends them.
async fn set_faults(State(shared): State<SharedState>, Json(faults): Json<Vec<FaultRule>>) -> Json<Vec<FaultRule>> {
    lock(&shared).script.faults.clone_from(&faults);
    Json(faults)
}

async fn requests(State(shared): State<SharedState>) -> Json<Value> {
    let shared = lock(&shared);
    Json(json!({"received": shared.received, "in_flight": shared.in_flight, "requests": shared.newest}))
}
