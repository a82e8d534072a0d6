//! The answer on its last steps: told in the harness's dialect, and given to the connection or left behind by a harness that
//! hung up.
//!
//! A stream that has to wait begins with its headers and is kept alive by comments; its answer, or its error, comes as events
//! then. Until that moment it is answered like any other call, so that errors keep their status and clients their retries.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use agl_core::event::MODEL_REQUEST;
use agl_store::StoredEvent;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep};
use tracing::Instrument;

use super::LARGE_BODY_BYTES;
use super::answer;
use super::aside::aside;
use super::attempt_tree::Recorded;
use super::call::Call;
use super::deliveries::Handover;
use super::entry::{Asked, Caller, Prepared};
use super::flights::Outcome;
use super::live::{Heard, Line, Listener, Words};
use super::recorder::AttemptKey;
use super::upstream::UpstreamAnswer;
use crate::app::App;
use crate::config::duration;
use crate::dialect::{Detail, Dialect, Voice, sse};
use crate::error::ApiError;
use crate::metrics::Repeated;
use crate::traces::CallTrace;

/// What the harness gets.
pub(crate) struct Reply {
    status: StatusCode,
    content_type: Option<HeaderValue>,
    retry_after: Option<HeaderValue>,
    body: Bytes,
    handover: Option<Handover>,
    /// Where the answer is told while it comes.
    line: Option<Line>,
}

impl Reply {
    /// An answer that is told while it comes.
    pub(crate) fn live(line: Line) -> Self {
        Self { line: Some(line), ..Self::of(StatusCode::OK, None, None, Bytes::new()) }
    }

    /// The end of an answer that has been told as it came.
    pub(crate) fn last_words(words: Bytes) -> Self {
        Self::of(StatusCode::OK, None, None, words)
    }

    fn of(
        status: StatusCode,
        content_type: Option<HeaderValue>,
        retry_after: Option<HeaderValue>,
        body: Bytes,
    ) -> Self {
        Self { status, content_type, retry_after, body, handover: None, line: None }
    }

    /// As the last piece of what a connection is being told.
    pub(crate) fn into_last_words(self) -> Words {
        Words::Last(self.body, self.handover)
    }

    /// The server's answer in the words of the harness.
    pub(crate) async fn tell(answer: UpstreamAnswer, voice: Voice, call_id: &str) -> Result<Self, ApiError> {
        let UpstreamAnswer { status, content_type, retry_after, body } = answer;
        let is_error = status.is_client_error() || status.is_server_error();
        let is_openai = matches!(voice.dialect, Dialect::Chat | Dialect::Completions);
        if voice.passes_whole() || (is_error && is_openai) {
            return Ok(Self::of(status, content_type, retry_after, body));
        }
        if is_error {
            let said: Value = serde_json::from_slice(&body)
                .unwrap_or_else(|_| json!({"message": String::from_utf8_lossy(&body).into_owned()}));
            let error = voice.dialect.error(ApiError::with_body(status, said));
            let body = error.body.to_string().into();
            return Ok(Self::of(status, Some(JSON), retry_after, body));
        }
        let call_id = call_id.to_owned();
        let is_large = body.len() > LARGE_BODY_BYTES;
        let tell = move || voice.tell(&body, &call_id);
        let told = if is_large { aside(tell).await.ok().flatten() } else { tell() };
        let told = told.ok_or_else(|| ApiError::new(StatusCode::BAD_GATEWAY, NO_COMPLETION))?;
        let content_type = Some(HeaderValue::from_static(told.content_type));
        Ok(Self::of(status, content_type, retry_after, told.body))
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    /// The same, reporting its delivery.
    pub(crate) fn handed_over(self, handover: Option<Handover>) -> Self {
        Self { handover, ..self }
    }
}

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const NO_COMPLETION: &str = "The model server's answer is no completion with at least one choice";

/// How often, and how long apart, a retry looks whether the connection of its earlier try has ended.
const RETRY_LOOKS: u32 = 10;
const RETRY_PAUSE: Duration = Duration::from_millis(25);

/// Answers a call: from one that runs already, from what is recorded, or by a call of its own.
pub(crate) async fn give(
    app: &Arc<App>,
    caller: Caller,
    prepared: Prepared,
    asked: Asked,
) -> Result<Response, ApiError> {
    let (key, voice, is_retry) = (caller.key.clone(), prepared.voice.clone(), caller.is_retry);
    let (digest, trace) = (asked.digest, asked.trace.clone());
    let (mut taker, mut answered) = oneshot::channel();
    let mut joined = app.flights.join(&key, digest, taker);
    // The end of the earlier connection may be heard of a moment after the retry.
    for _ in 0..RETRY_LOOKS {
        match joined {
            Err(back) if is_retry && app.flights.has_equal(&key, digest) => taker = back,
            _ => break,
        }
        tokio::time::sleep(RETRY_PAUSE).await;
        joined = app.flights.join(&key, digest, taker);
    }
    let call_id = match joined {
        Ok(call_id) => {
            app.metrics.repeated(Repeated::Joined);
            call_id
        }
        Err(taker) => {
            if let Some(recorded) = app.recorder.claim(&key, &digest, is_retry).await?
                && let Some(response) = replay(app, &key, recorded, &voice, &asked).await?
            {
                return Ok(response);
            }
            let call = Call::new(app, caller, prepared, asked).await?;
            let call_id = call.call_id.clone();
            let seat = app.flights.board(&key, digest, &call_id, taker);
            let running = Arc::clone(&app.calls).acquire_owned().await;
            let flight = async move {
                call.fly(seat).await;
                drop(running);
            };
            // What it logs carries the ids of its request.
            tokio::spawn(flight.in_current_span());
            call_id
        }
    };
    let every = duration(app.config.stream_keep_alive_seconds);
    let response = if voice.stream {
        match tokio::time::timeout(every, &mut answered).await {
            Ok(Ok(Ok(reply))) if reply.line.is_some() => {
                begun(&voice, DeliveredBody::live(reply, &voice, every), &trace)
            }
            Ok(outcome) => whole(outcome.unwrap_or_else(lost), voice.dialect, &trace),
            Err(_) => begun(&voice.clone(), DeliveredBody::waiting(Waiting { voice, answered, every }), &trace),
        }
    } else {
        whole(answered.await.unwrap_or_else(lost), voice.dialect, &trace)
    };
    Ok(named(response, &call_id, &trace))
}

/// A recorded answer once more; `None` where the store has none.
async fn replay(
    app: &App,
    key: &AttemptKey,
    recorded: Recorded,
    voice: &Voice,
    asked: &Asked,
) -> Result<Option<Response>, ApiError> {
    // Until it is delivered, the answer is to be had by the next who asks.
    let call_id = recorded.call_id.clone();
    let handover = app.recorder.hand_over(key, asked.digest, recorded);
    let events = app.store.events(&key.rollout_id, &key.attempt_id, Some(MODEL_REQUEST)).await?;
    let is_it = |event: &&StoredEvent| event.event.data.get("call_id").is_some_and(|id| *id == call_id);
    let Some(response) = events.iter().find(is_it).and_then(|event| event.response.clone()) else { return Ok(None) };
    let body = aside(move || response.read()).await??;
    let read = answer::read(&body, 0);
    // What is no answer is not given twice.
    if read.choices.is_empty() {
        return Ok(None);
    }
    app.verbatim.remember(key, read.tool_calls);
    let answer =
        UpstreamAnswer { status: StatusCode::OK, content_type: Some(JSON), retry_after: None, body: body.into() };
    let Ok(reply) = Reply::tell(answer, voice.clone(), &call_id).await else { return Ok(None) };
    tracing::info!(call_id, "a retry gets the recorded answer");
    app.metrics.repeated(Repeated::Recorded);
    Ok(Some(named(whole(Ok(reply.handed_over(handover)), voice.dialect, &asked.trace), &call_id, &asked.trace)))
}

fn named(mut response: Response, call_id: &str, trace: &CallTrace) -> Response {
    trace.named(call_id);
    if let Ok(call_id) = HeaderValue::from_str(call_id) {
        response.headers_mut().insert("x-agl-call-id", call_id);
    }
    response
}

fn lost(_: oneshot::error::RecvError) -> Result<Reply, ApiError> {
    Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "The call was lost"))
}

fn whole(outcome: Result<Reply, ApiError>, dialect: Dialect, trace: &CallTrace) -> Response {
    let reply = match outcome {
        Ok(reply) => reply,
        Err(error) => return dialect.error(error).into_response(),
    };
    let mut response = Response::new(trace.reply(DeliveredBody::whole(reply.body, reply.handover)));
    *response.status_mut() = reply.status;
    let headers = response.headers_mut();
    for (name, value) in [(header::CONTENT_TYPE, reply.content_type), (header::RETRY_AFTER, reply.retry_after)] {
        if let Some(value) = value {
            headers.insert(name, value);
        }
    }
    mark_stream(headers);
    response
}

/// The answer to a stream whose events are yet to come.
fn begun(voice: &Voice, body: DeliveredBody, trace: &CallTrace) -> Response {
    let content_type = if matches!(voice.detail, Detail::JsonList) { "application/json" } else { sse::CONTENT_TYPE };
    let mut response = Response::new(trace.reply(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    mark_stream(response.headers_mut());
    response
}

/// Proxies on the way are not to collect a stream.
fn mark_stream(headers: &mut HeaderMap) {
    if headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind == sse::CONTENT_TYPE) {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    }
}

/// A stream whose answer is not there yet.
struct Waiting {
    voice: Voice,
    answered: oneshot::Receiver<Outcome>,
    every: Duration,
}

/// A response body that reports its delivery. «Delivered» means that the connection took the whole body for sending; when the
/// harness hangs up before, the body is dropped unread.
struct DeliveredBody {
    waiting: Option<(Waiting, Pin<Box<Sleep>>)>,
    listening: Option<Listener>,
    bytes: Option<Bytes>,
    handover: Option<Handover>,
}

impl DeliveredBody {
    fn whole(bytes: Bytes, handover: Option<Handover>) -> Self {
        let bytes = Some(bytes).filter(|bytes| !bytes.is_empty());
        Self { waiting: None, listening: None, bytes, handover }
    }

    fn live(reply: Reply, voice: &Voice, every: Duration) -> Self {
        let listening = reply.line.map(|line| Listener::new(line, voice.clone(), every));
        Self { listening, ..Self::whole(reply.body, reply.handover) }
    }

    fn waiting(waiting: Waiting) -> Self {
        let now = Box::pin(tokio::time::sleep(Duration::ZERO));
        Self { waiting: Some((waiting, now)), listening: None, bytes: None, handover: None }
    }

    fn settle(&mut self, voice: &Voice, every: Duration, outcome: Result<Reply, ApiError>) {
        match outcome {
            Ok(reply) if reply.line.is_some() => *self = Self::live(reply, voice, every),
            Ok(reply) if reply.status.is_success() => {
                self.bytes = Some(reply.body);
                self.handover = reply.handover;
            }
            Ok(reply) => {
                let said = serde_json::from_slice(&reply.body).unwrap_or_default();
                self.bytes = Some(voice.stream_error(&ApiError::with_body(reply.status, said)).into());
            }
            Err(error) => self.bytes = Some(voice.stream_error(&error).into()),
        }
    }
}

impl http_body::Body for DeliveredBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some((waiting, alarm)) = &mut self.waiting {
            match Pin::new(&mut waiting.answered).poll(context) {
                Poll::Ready(outcome) => {
                    let outcome = outcome.unwrap_or_else(lost);
                    if let Some((waiting, _)) = self.waiting.take() {
                        self.settle(&waiting.voice, waiting.every, outcome);
                    }
                }
                Poll::Pending => {
                    std::task::ready!(alarm.as_mut().poll(context));
                    alarm.as_mut().reset(Instant::now() + waiting.every);
                    return Poll::Ready(Some(Ok(Frame::data(waiting.voice.keep_alive().into()))));
                }
            }
        }
        if let Some(listener) = &mut self.listening {
            match std::task::ready!(listener.poll(context)) {
                Heard::More(words) => return Poll::Ready(Some(Ok(Frame::data(words)))),
                Heard::Last(words, handover) => *self = Self::whole(words, handover),
            }
        }
        let bytes = self.bytes.take();
        if let Some(handover) = self.handover.take() {
            handover.delivered();
        }
        Poll::Ready(bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.waiting.is_none() && self.listening.is_none() && self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match self.waiting.is_some() || self.listening.is_some() {
            true => SizeHint::default(),
            false => SizeHint::with_exact(self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
        }
    }
}
