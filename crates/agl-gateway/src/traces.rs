//! The spans of a trace: one for each request, and below that of a model call one for each place where its time goes.
//!
//! They are spans of `tracing` with a target of their own, [`TARGET`], and nothing else has it: whoever exports traces takes that
//! target and keeps it out of the log. Where nobody does, each costs the level check that every line of a log costs. They are held
//! and never entered: a child names its parent, so that the log's own span stays the current one.
//!
//! How a trace comes in and goes on with the headers of requests is left to whoever exports it: [`Propagation`].
//!
//! Names are those of OpenTelemetry's conventions for generative AI and for HTTP; `agl.…` are ours. Nothing that was said and no
//! key is ever in them.

use std::pin::{Pin, pin};
use std::sync::OnceLock;
use std::task::{Context, Poll};

use agl_store::RegisteredModel;
use axum::extract::{MatchedPath, RawPathParams, Request};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::Response;
use axum::{RequestExt, body};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tracing::field::Empty;
use tracing::{Span, info_span};

use crate::dialect::Dialect;
use crate::proxy::answer::Answer;

/// The target of the spans.
pub const TARGET: &str = "agl_traces";

/// Carries a trace from one process to the next, in the headers of requests.
pub trait Propagation: Send + Sync {
    /// Makes what the headers of a request name the parent of its span, which is new.
    fn take_up(&self, span: &Span, headers: &HeaderMap);
    /// Names the span in the headers of a request that is made on its behalf.
    fn hand_on(&self, span: &Span, headers: &mut HeaderMap);
}

/// Of the process, as the subscriber is that hears of the spans.
static PROPAGATION: OnceLock<Box<dyn Propagation>> = OnceLock::new();

/// Sets how traces are carried; without it, and before, they are not. Only the first call counts.
pub fn propagate(propagation: Box<dyn Propagation>) {
    let _others = PROPAGATION.set(propagation);
}

fn take_up(span: Span, headers: &HeaderMap) -> Span {
    if let Some(propagation) = PROPAGATION.get().filter(|_| !span.is_disabled()) {
        propagation.take_up(&span, headers);
    }
    span
}

/// What names the span to a server; empty where there is no trace.
pub(crate) fn headers_of(span: &Span) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Some(propagation) = PROPAGATION.get().filter(|_| !span.is_disabled()) {
        propagation.hand_on(span, &mut headers);
    }
    headers
}

/// The span of a model call, for as long as anybody has to do with it: the handler, the call under way, the reply.
#[derive(Clone)]
pub(crate) struct CallTrace(Span);

impl CallTrace {
    /// Begins with the request, before it is known whether it may be made.
    pub(crate) fn begin(
        dialect: Dialect,
        (rollout_id, attempt_id): (&str, &str),
        mode: &str,
        headers: &HeaderMap,
    ) -> Self {
        let span = info_span!(
            target: TARGET,
            parent: None,
            "chat",
            otel.kind = "server",
            otel.name = operation(dialect),
            otel.status_code = Empty,
            gen_ai.operation.name = operation(dialect),
            gen_ai.request.model = Empty,
            gen_ai.usage.input_tokens = Empty,
            gen_ai.usage.output_tokens = Empty,
            agl.rollout_id = rollout_id,
            agl.attempt_id = attempt_id,
            agl.mode = mode,
            agl.dialect = dialect.name(),
            agl.agent = Empty,
            agl.call_id = Empty,
            agl.policy_version = Empty,
            http.request.method = "POST",
            http.response.status_code = Empty,
            error.type = Empty,
        );
        Self(take_up(span, headers))
    }

    /// True where somebody hears of it.
    pub(crate) fn is_on(&self) -> bool {
        !self.0.is_disabled()
    }

    /// Who asks which model.
    pub(crate) fn asks(&self, dialect: Dialect, model: &str, agent: Option<&str>) {
        self.0.record("otel.name", format!("{} {model}", operation(dialect)));
        self.0.record("gen_ai.request.model", model);
        if let Some(agent) = agent {
            self.0.record("agl.agent", agent);
        }
    }

    /// The id under which the answer is recorded.
    pub(crate) fn named(&self, call_id: &str) {
        if self.is_on() {
            self.0.record("agl.call_id", call_id);
        }
    }

    /// What the answer came to. The server's version counts where the answer says none.
    pub(crate) fn answered(&self, answer: &Answer, server: Option<&RegisteredModel>) {
        if !self.is_on() {
            return;
        }
        let sampled = answer.choices.first().and_then(|choice| choice.versions.last()).map(|run| run.version);
        if let Some(version) = sampled.or(server.map(|server| server.version)) {
            self.0.record("agl.policy_version", signed(version));
        }
        for (field, key) in
            [("gen_ai.usage.input_tokens", "prompt_tokens"), ("gen_ai.usage.output_tokens", "completion_tokens")]
        {
            if let Some(tokens) = answer.usage.as_ref().and_then(|usage| usage[key].as_i64()) {
                self.0.record(field, tokens);
            }
        }
    }

    /// The call came to nothing, whatever its connection has been told already.
    pub(crate) fn failed(&self) {
        self.0.record("otel.status_code", "ERROR");
    }

    /// The harness hung up. It may have been answered a status before.
    pub(crate) fn left(&self) {
        failed(&self.0, "client_closed");
    }

    /// What the harness was answered.
    pub(crate) fn ended(&self, status: StatusCode) {
        ended(&self.0, status);
    }

    /// Waits for something to be ready, in a span where that takes any time.
    pub(crate) async fn waiting<T>(&self, what: &'static str, ready: impl Future<Output = T>) -> T {
        let mut ready = pin!(ready);
        let at_once = std::future::poll_fn(|context| Poll::Ready(ready.as_mut().poll(context))).await;
        if let Poll::Ready(outcome) = at_once {
            return outcome;
        }
        let _span = info_span!(target: TARGET, parent: &self.0, "wait", agl.wait.r#for = what);
        ready.await
    }

    /// One request to a server. The address is without what else a URL may hold: that may be a password.
    pub(crate) fn upstream(&self, server: &RegisteredModel, path: &'static str, retries: u32) -> Span {
        let span = info_span!(
            target: TARGET,
            parent: &self.0,
            "upstream",
            otel.kind = "client",
            otel.status_code = Empty,
            gen_ai.provider.name = server.kind,
            gen_ai.request.model = server.upstream_model.as_deref().unwrap_or(&server.model),
            agl.policy_version = signed(server.version),
            http.request.method = "POST",
            http.request.resend_count = i64::from(retries),
            http.response.status_code = Empty,
            server.address = Empty,
            server.port = Empty,
            url.path = path,
            error.type = Empty,
        );
        if !span.is_disabled()
            && let Ok(endpoint) = server.endpoint.parse::<Uri>()
        {
            span.record("server.address", endpoint.host());
            span.record("server.port", endpoint.port_u16().map(i64::from));
        }
        span
    }

    /// The commit of the call.
    pub(crate) fn record(&self) -> Span {
        info_span!(target: TARGET, parent: &self.0, "record")
    }

    /// The answer on its way to the harness: lasts as long as its body.
    pub(crate) fn reply(
        &self,
        body: impl Body<Data = Bytes, Error: Into<axum::BoxError>> + Send + Unpin + 'static,
    ) -> body::Body {
        let span = info_span!(target: TARGET, parent: &self.0, "reply", agl.delivered = Empty);
        body::Body::new(ReplyBody { body, span })
    }
}

/// What a request to a server came to: a status, or the kind of its failure.
pub(crate) fn tried(span: &Span, outcome: Result<StatusCode, &'static str>) {
    if span.is_disabled() {
        return;
    }
    if let Ok(status) = outcome {
        span.record("http.response.status_code", i64::from(status.as_u16()));
    }
    match outcome {
        Ok(status) if status.as_u16() >= 400 => failed(span, status.as_str()),
        Err(kind) => failed(span, kind),
        Ok(_) => {}
    }
}

/// One span for a request of the management interface.
pub(crate) async fn traced(route: MatchedPath, mut request: Request, next: Next) -> Response {
    // Prometheus asks all the time.
    if route.as_str() == "/metrics" {
        return next.run(request).await;
    }
    let span = info_span!(
        target: TARGET,
        parent: None,
        "request",
        otel.kind = "server",
        otel.name = format!("{} {}", request.method(), route.as_str()),
        otel.status_code = Empty,
        agl.rollout_id = Empty,
        agl.attempt_id = Empty,
        http.request.method = request.method().as_str(),
        http.route = route.as_str(),
        http.response.status_code = Empty,
        error.type = Empty,
    );
    let span = take_up(span, request.headers());
    if !span.is_disabled()
        && let Ok(ids) = request.extract_parts::<RawPathParams>().await
    {
        for (name, id) in &ids {
            match name {
                "rollout_id" => span.record("agl.rollout_id", id),
                "attempt_id" => span.record("agl.attempt_id", id),
                _ => &span,
            };
        }
    }
    let response = next.run(request).await;
    ended(&span, response.status());
    response
}

fn ended(span: &Span, status: StatusCode) {
    if span.is_disabled() {
        return;
    }
    span.record("http.response.status_code", i64::from(status.as_u16()));
    // Of others it is the caller's span that has failed.
    if status.is_server_error() {
        failed(span, status.as_str());
    }
}

fn failed(span: &Span, kind: &str) {
    span.record("otel.status_code", "ERROR");
    span.record("error.type", kind);
}

/// The convention's word for what is asked.
fn operation(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Chat | Dialect::Responses | Dialect::Messages => "chat",
        Dialect::Completions => "text_completion",
        Dialect::Gemini => "generate_content",
    }
}

/// OpenTelemetry's numbers have a sign; others would be exported as text.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A body and the span of its delivery.
struct ReplyBody<B> {
    body: B,
    span: Span,
}

impl<B: Body<Data = Bytes> + Unpin> Body for ReplyBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.span.record("agl.delivered", true);
            self.span = Span::none();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
