//! The way of a model call: from the harness to an inference server and back.
//!
//! 1. [`forward`] checks who calls, reads and rewrites the body ([`request`]).
//! 2. [`upstream`] passes the gate, picks a server ([`servers`]) and sends, again if need be.
//! 3. [`answer`] finds token ids, log-probs and versions in what came back.
//! 4. [`recorder`] writes event, rows and bodies in one transaction.
//! 5. Only then the answer leaves, whole, and [`delivery`] tells the recorder whether it was taken.
//!
//! Steps 2 to 4 run in a task of their own: when the harness hangs up, they go on for a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use agl_core::rollout::Rollout;
use axum::extract::{FromRequest, Path, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::oneshot;

use crate::app::App;
use crate::clock;
use crate::config::duration;
use crate::error::ApiError;
use crate::keys::{Access, Scope};

pub(crate) mod answer;
pub(crate) mod delivery;
pub(crate) mod recorder;
pub(crate) mod request;
pub(crate) mod servers;
pub(crate) mod upstream;

use delivery::DeliveredBody;
use recorder::{AttemptKey, CallResult, Finished, Handover, RecordError};
use request::{Mode, RequestBody, UpstreamPath, digest};
use upstream::{Ask, End, Progress};

/// The status recorded for a call whose harness hung up and did not come back in time.
const CLIENT_CLOSED_REQUEST: u16 = 499;
/// Bodies larger than this are read on a blocking thread.
const LARGE_BODY_BYTES: usize = 256 * 1024;

/// `POST /proxy/rollout/{rollout}/attempt/{attempt}/mode/{mode}/openai/v1/{path}`.
pub(crate) async fn forward(
    State(app): State<Arc<App>>,
    Path((rollout_id, attempt_id, mode, path)): Path<(String, String, String, String)>,
    request: Request,
) -> Result<Response, ApiError> {
    let key = AttemptKey { rollout_id, attempt_id };
    let access = app.check_attempt(request.headers(), request.uri(), &key.rollout_id, &key.attempt_id).await?;
    if access == Access::Attempt(Scope::Reward) {
        return Err(ApiError::forbidden("The evaluator's key opens the attempt's events, not the model"));
    }
    let mode = Mode::from_name(&mode)
        .ok_or_else(|| ApiError::new(axum::http::StatusCode::NOT_FOUND, format!("Unsupported proxy mode: {mode}")))?;
    let path = UpstreamPath::from_name(&path).ok_or_else(|| {
        ApiError::new(axum::http::StatusCode::NOT_FOUND, format!("Unsupported upstream path: {path}"))
    })?;
    let rollout = app.store.rollout(&key.rollout_id).await?.ok_or_else(|| ApiError::not_found(&key.rollout_id))?;
    if matches!(access, Access::Attempt(_)) && mode.name() != rollout.mode() {
        return Err(ApiError::forbidden(format!(
            "Rollout {} is of mode {}: its agent's key does not open mode {}; use the base URL that the agent was given",
            rollout.rollout_id,
            rollout.mode(),
            mode.name()
        )));
    }
    let raw = read_body(&app, request).await?;
    let call = Call::prepare(&app, key, &rollout, mode, path, &raw).await?;

    let (present, gone) = oneshot::channel();
    let (answer, answered) = oneshot::channel();
    let running = Arc::clone(&app.calls).acquire_owned().await;
    tokio::spawn(async move {
        // Nobody takes the outcome where the harness has hung up: dropping it says so to the recorder.
        let _hung_up = answer.send(call.run(gone).await);
        drop(running);
    });
    let outcome = answered
        .await
        .unwrap_or_else(|_| Err(ApiError::new(axum::http::StatusCode::INTERNAL_SERVER_ERROR, "The call was lost")));
    drop::<oneshot::Sender<()>>(present);
    outcome.map(IntoResponse::into_response)
}

/// The whole body, up to the limit.
pub(crate) async fn read_body(app: &App, request: Request) -> Result<Bytes, ApiError> {
    Bytes::from_request(request, &()).await.map_err(|rejection| {
        if rejection.status() == axum::http::StatusCode::PAYLOAD_TOO_LARGE {
            let limit = app.config.body_limit;
            ApiError::new(rejection.status(), format!("Request body is larger than {limit} bytes; raise `body_limit`"))
        } else {
            ApiError::bad_request("The request body broke off")
        }
    })
}

/// A call that has been read and checked.
struct Call {
    app: Arc<App>,
    key: AttemptKey,
    call_id: String,
    ask: Ask,
    digest: [u8; 32],
}

/// What the harness gets.
pub(crate) struct Reply {
    call_id: String,
    end: End,
    handover: Option<Handover>,
}

impl Call {
    async fn prepare(
        app: &Arc<App>,
        key: AttemptKey,
        rollout: &Rollout,
        mode: Mode,
        path: UpstreamPath,
        raw: &Bytes,
    ) -> Result<Self, ApiError> {
        let (mut body, digest) = read_request(raw, mode, path).await?;
        if body.is_truthy("stream") {
            return Err(ApiError::bad_request("Streaming responses are not supported"));
        }
        let config = &app.config.default_proxy;
        body.prepare(&config.model_name, mode, path, config);
        let model = body.text("model").unwrap_or_else(|| config.model_name.clone());
        let number = app.recorder.begin_call(&key).await?;
        let seed = (!body.has("seed")).then(|| seed(rollout, number));
        let ask = Ask { rollout_id: key.rollout_id.clone(), model, path, body, seed };
        let call_id = format!("call-{}", uuid::Uuid::now_v7().simple());
        Ok(Self { app: Arc::clone(app), key, call_id, ask, digest })
    }

    /// Calls, records, and gives what is to be answered. `gone` resolves when the harness hangs up.
    async fn run(self, mut gone: oneshot::Receiver<()>) -> Result<Reply, ApiError> {
        let Self { app, key, call_id, ask, digest } = self;
        let model = ask.model.clone();
        let unsent = ask.body.to_bytes();
        let mut progress = Progress::default();
        let sent_any = AtomicBool::new(false);
        let started = Instant::now();
        let end = {
            let call = app.upstream.call(ask, &mut progress, &sent_any);
            let hung_up = async {
                // Resolves with an error: the sender is only ever dropped.
                let _dropped = (&mut gone).await;
                // A call that was still held has cost nothing yet.
                if sent_any.load(Ordering::SeqCst) {
                    tokio::time::sleep(duration(app.config.hangup_grace_seconds)).await;
                }
            };
            tokio::select! {
                end = call => Some(end),
                () = hung_up => None,
            }
        };
        let abandoned = end.is_none();
        if abandoned && progress.sent.is_none() {
            tracing::info!(
                rollout = key.rollout_id,
                attempt = key.attempt_id,
                "the harness hung up before its call was sent"
            );
            return Err(abandoned_error());
        }
        let end = end.unwrap_or_else(|| End::Failed(abandoned_error()));
        let client_present = !abandoned && matches!(gone.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        if !client_present {
            tracing::info!(
                rollout = key.rollout_id,
                attempt = key.attempt_id,
                call_id,
                abandoned,
                "the harness hung up"
            );
        }
        let version = progress.server.as_ref().map_or(0, |server| server.version);
        let (http_status, response, answer) = match &end {
            End::Answered(answer) => {
                (answer.status.as_u16(), answer.body.clone(), read_answer(&answer.body, version).await)
            }
            End::Failed(_) if abandoned => (CLIENT_CLOSED_REQUEST, Bytes::new(), answer::Answer::default()),
            End::Failed(error) => (error.status.as_u16(), error.body.to_string().into(), answer::Answer::default()),
        };
        let ok = http_status < 400;
        if ok && !answer.complaints.is_empty() {
            let endpoint = progress.server.as_ref().map_or("", |server| server.endpoint.as_str());
            tracing::warn!(
                server = endpoint,
                rollout = key.rollout_id,
                call_id,
                complaints = answer.complaints.join("; "),
                "this answer cannot be trained on as it is; the server must honour `return_token_ids` and `logprobs` (vLLM 0.10.2 or later does)"
            );
        }
        let policy = &app.config.default_proxy.model_name;
        let trainable = progress.server.as_ref().and_then(|server| server.trainable).unwrap_or(model == *policy);
        let latency = started.elapsed().as_secs_f64() * 1000.0;
        let finished = Finished {
            data: event_data(&model, &progress, &answer, latency, http_status),
            call_id: call_id.clone(),
            timestamp: clock::now(),
            request: progress.sent.unwrap_or(unsent),
            response,
            result: if ok { CallResult::Answered(answer.choices) } else { CallResult::Failed },
            digest,
            http_status,
            trainable,
            client_present,
            key,
        };
        let handover = app.recorder.record(finished).await?;
        match end {
            End::Failed(error) => Err(error),
            answered @ End::Answered(_) => Ok(Reply { call_id, end: answered, handover }),
        }
    }
}

fn abandoned_error() -> ApiError {
    let status = axum::http::StatusCode::from_u16(CLIENT_CLOSED_REQUEST).unwrap_or(axum::http::StatusCode::BAD_REQUEST);
    ApiError::new(status, "The client closed the connection")
}

async fn read_request(raw: &Bytes, mode: Mode, path: UpstreamPath) -> Result<(RequestBody, [u8; 32]), ApiError> {
    let raw = raw.clone();
    let large = raw.len() > LARGE_BODY_BYTES;
    let read = move || Ok((RequestBody::parse(&raw)?, digest(&raw, mode, path)));
    if large { tokio::task::spawn_blocking(read).await.map_err(|_| RecordError::Lost)? } else { read() }
}

async fn read_answer(body: &Bytes, version: u64) -> answer::Answer {
    if body.len() <= LARGE_BODY_BYTES {
        return answer::read(body, version);
    }
    let body = body.clone();
    tokio::task::spawn_blocking(move || answer::read(&body, version)).await.unwrap_or_default()
}

/// The payload of the event, in the order of the original's fields.
fn event_data(
    model: &str,
    progress: &Progress,
    answer: &answer::Answer,
    latency_ms: f64,
    http_status: u16,
) -> Map<String, Value> {
    let server = progress.server.as_ref();
    let mut data = Map::new();
    let mut put = |key: &str, value: Value| data.insert(key.to_owned(), value);
    put("model", server.map_or(model, |server| &server.model).into());
    put("model_version", server.map(|server| server.version).into());
    put("request", Value::Null);
    put("response", Value::Object(Map::new()));
    put(
        "server",
        server
            .map(|server| json!({"model": server.model, "endpoint": server.endpoint, "version": server.version}))
            .into(),
    );
    put("latency_ms", latency_ms.into());
    put("http_status", http_status.into());
    put("status", if http_status < 400 { "ok" } else { "error" }.into());
    put("retry_count", progress.retries.into());
    put("usage", answer.usage.clone().into());
    put("finish_reason", answer.finish_reason.clone().into());
    data
}

/// A seed that makes this call's answer repeatable: SHA-256 over (seed, step, task, group, sample, call), 63 bits. A run that
/// is repeated makes new rollout ids; where the trainer gave no seed or no sample index, the rollout's id stands in all the
/// same, so that siblings still differ.
fn seed(rollout: &Rollout, call: u64) -> u64 {
    let given = |key: &str| rollout.metadata.get(key).filter(|value| !value.is_null());
    let needed = |key: &str| given(key).map_or_else(|| json!(rollout.rollout_id).to_string(), Value::to_string);
    let optional = |key: &str| given(key).map(Value::to_string).unwrap_or_default();
    let task = match given("data_id") {
        Some(Value::String(id)) => id.clone(),
        Some(id) => id.to_string(),
        None => rollout.data_id(),
    };
    let parts = [needed("seed"), optional("step"), task, optional("group_idx"), needed("sample_idx"), call.to_string()];
    let digest: [u8; 32] = parts
        .iter()
        .fold(Sha256::new(), |hash, part| hash.chain_update((part.len() as u64).to_le_bytes()).chain_update(part))
        .finalize()
        .into();
    digest.first_chunk::<8>().map_or(0, |bytes| u64::from_be_bytes(*bytes) >> 1)
}

impl From<RecordError> for ApiError {
    fn from(error: RecordError) -> Self {
        match error {
            RecordError::Store(error) => error.into(),
            other => {
                tracing::error!(error = %other, "a call cannot be recorded");
                Self::new(axum::http::StatusCode::INTERNAL_SERVER_ERROR, other.to_string())
            }
        }
    }
}

impl IntoResponse for Reply {
    fn into_response(self) -> Response {
        let answer = match self.end {
            End::Answered(answer) => answer,
            End::Failed(error) => return error.into_response(),
        };
        let mut response = Response::new(axum::body::Body::new(DeliveredBody::new(answer.body, self.handover)));
        *response.status_mut() = answer.status;
        let headers = response.headers_mut();
        for (name, value) in [(header::CONTENT_TYPE, answer.content_type), (header::RETRY_AFTER, answer.retry_after)] {
            if let Some(value) = value {
                headers.insert(name, value);
            }
        }
        if let Ok(call_id) = self.call_id.parse() {
            headers.insert("x-agl-call-id", call_id);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use agl_core::rollout::RolloutCreate;

    use super::*;

    fn rollout(id: &str, metadata: Value) -> Rollout {
        let create: RolloutCreate =
            serde_json::from_value(json!({"input": {"data_id": "q1"}, "metadata": metadata})).unwrap();
        Rollout::new(create, id.to_owned(), 0.0)
    }

    #[test]
    fn a_seed_depends_on_seed_step_task_group_sample_and_call_but_not_on_the_rollouts_id() {
        let metadata = json!({"seed": 1, "step": 4, "group_idx": 2, "sample_idx": 0});
        let first = seed(&rollout("a", metadata.clone()), 0);
        assert_eq!(first, seed(&rollout("b", metadata.clone()), 0));
        for (key, value) in [
            ("seed", json!(2)),
            ("step", json!(5)),
            ("group_idx", json!(3)),
            ("sample_idx", json!(1)),
            ("data_id", json!("q2")),
        ] {
            let mut other = metadata.clone();
            other[key] = value;
            assert_ne!(seed(&rollout("a", other), 0), first, "{key}");
        }
        assert_ne!(seed(&rollout("a", metadata), 1), first);
        assert!(first <= u64::MAX >> 1);
    }

    #[test]
    fn the_task_that_the_trainer_names_goes_before_that_of_the_input() {
        let named = json!({"seed": 1, "sample_idx": 0, "data_id": "q1"});
        let unnamed = json!({"seed": 1, "sample_idx": 0});
        assert_eq!(seed(&rollout("a", named), 0), seed(&rollout("b", unnamed), 0));
    }

    #[test]
    fn siblings_without_a_sample_index_still_differ() {
        assert_ne!(seed(&rollout("a", json!({"seed": 1})), 0), seed(&rollout("b", json!({"seed": 1})), 0));
    }
}
