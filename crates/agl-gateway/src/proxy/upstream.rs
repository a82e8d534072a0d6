//! One call to an inference server: chosen, sent, and sent again where that may help.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use agl_store::RegisteredModel;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use bytes::Bytes;
use serde_json::{Value, json};

use super::kind::Kind;
use super::llamacpp;
use super::places::{Place, Places};
use super::recorder::AttemptKey;
use super::request::{Mode, RequestBody, UpstreamPath};
use super::servers::Servers;
use super::through::{Broken, THROUGH, Through};
use crate::config::{DefaultProxyConfig, GatewayConfig, UpstreamConfig, duration};
use crate::dialect::sse;
use crate::error::{ApiError, GatewayError};
use crate::gate::{Gate, Passage, Refused};
use crate::traces::{self, CallTrace};
use crate::watchdog::{Wait, Watchdog};

/// A server that counts tokens more slowly than this is not waited for.
const COUNT_PATIENCE: Duration = Duration::from_secs(5);
/// A server that asks for a longer wait than this is asked again all the same.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(60);

/// Sends calls. Holds one connection pool.
pub(crate) struct Upstream {
    client: reqwest::Client,
    config: UpstreamConfig,
    proxy: DefaultProxyConfig,
    no_model_wait: Duration,
    queue: Queue,
    servers: Arc<Servers>,
}

/// What a call passes on its way, and who watches it wait.
pub(crate) struct Queue {
    pub(crate) gate: Arc<Gate>,
    pub(crate) places: Arc<Places>,
    pub(crate) watchdog: Arc<Watchdog>,
}

/// What to send.
pub(crate) struct Ask {
    pub(crate) key: AttemptKey,
    pub(crate) model: String,
    pub(crate) mode: Mode,
    pub(crate) path: UpstreamPath,
    pub(crate) body: RequestBody,
    /// For servers that take one, where the harness gave none.
    pub(crate) seed: Option<u64>,
    pub(crate) trace: CallTrace,
}

/// What goes with a body to a server.
#[derive(Clone)]
pub(super) struct Envelope {
    key: Option<String>,
    /// Names the call's trace, where there is one.
    trace: HeaderMap,
}

impl Envelope {
    /// Of a question that belongs to no call.
    fn of(server: &RegisteredModel) -> Option<Self> {
        Some(Self { key: key_of(server).ok()?, trace: HeaderMap::new() })
    }
}

/// How far a call has come, kept by the caller so that it is known even when the call is dropped.
#[derive(Default)]
pub(crate) struct Progress {
    pub(crate) server: Option<RegisteredModel>,
    /// The body as it was sent last.
    pub(crate) sent: Option<Bytes>,
    pub(crate) retries: u32,
}

/// How a call ended.
#[derive(Debug)]
pub(crate) enum End {
    /// The server's answer, whatever its status.
    Answered(UpstreamAnswer),
    /// There was none: this is what the harness is told.
    Failed(ApiError),
}

/// An answer as it came.
#[derive(Debug)]
pub(crate) struct UpstreamAnswer {
    pub(crate) status: StatusCode,
    pub(crate) content_type: Option<HeaderValue>,
    pub(crate) retry_after: Option<HeaderValue>,
    pub(crate) body: Bytes,
}

impl Upstream {
    pub(crate) fn new(config: &GatewayConfig, queue: Queue, servers: Arc<Servers>) -> Result<Self, GatewayError> {
        // Inference servers are named by address; a proxy from the environment is for other things.
        let builder = reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none());
        let client =
            builder.timeout(duration(config.upstream.timeout_seconds)).build().map_err(GatewayError::Client)?;
        let no_model_wait = duration(config.no_model_wait_seconds);
        Ok(Self { client, config: config.upstream, proxy: config.default_proxy.clone(), no_model_wait, queue, servers })
    }

    /// Sends the call until it is answered or the tries are used up. Each try passes the gate and picks the server anew: a
    /// pause holds it, and a trainer that was started again has registered another address. Sets `sent_any` with the first.
    /// Where the server streams, `through` hears it; once that has told anything, there is no other try.
    pub(crate) async fn call(
        &self,
        ask: &Ask,
        progress: &mut Progress,
        sent_any: &AtomicBool,
        mut through: Option<&mut Through>,
    ) -> End {
        loop {
            let (admitted, server) = match self.admit(ask).await {
                Ok(admitted) => admitted,
                Err(error) => return End::Failed(error),
            };
            let mut through = through.as_deref_mut().filter(|_| streams_through(&server));
            let body = match through {
                Some(_) => self.dress(ask, &server, &streaming()),
                None => self.dress(ask, &server, &[]),
            };
            progress.sent = Some(body.clone());
            progress.server = Some(server.clone());
            sent_any.store(true, Ordering::SeqCst);
            let url = format!("{}/{}", server.endpoint.trim_end_matches('/'), ask.path.as_str());
            let span = ask.trace.upstream(&server, ask.path.as_str(), progress.retries);
            let envelope = match key_of(&server) {
                Ok(key) => Envelope { key, trace: traces::headers_of(&span) },
                Err(error) => return End::Failed(error),
            };
            let tried = {
                let _watched = self.queue.watchdog.watch(Wait::Server, &ask.key, &url);
                let asked = async {
                    match (through.as_deref_mut(), kind_of(&server)) {
                        (Some(through), _) => self.try_stream(&url, envelope, body, through).await,
                        (None, Kind::LlamaCpp) => {
                            llamacpp::call(self, &server, envelope, ask, &url).await.map_err(Fault::Request)
                        }
                        (None, _) => self.try_once(&url, envelope, body).await.map_err(Fault::Request),
                    }
                };
                tokio::select! {
                    tried = asked => Some(tried),
                    () = self.queue.gate.fenced() => None,
                }
            };
            let has_spoken = through.is_some_and(|through| through.has_spoken());
            drop(admitted);
            if let Some(tried) = &tried {
                traces::tried(&span, tried.as_ref().map(|answer| answer.status).map_err(Fault::kind));
            }
            drop(span);
            let Some(tried) = tried else {
                if has_spoken {
                    return End::Failed(refused(Refused::Fenced));
                }
                tracing::warn!(url, "a call is given up and made again once the store is back");
                continue;
            };

            let is_last = has_spoken || progress.retries + 1 >= self.config.max_attempts;
            let (reason, wanted) = match tried {
                Ok(answer) if is_last || !is_retryable(answer.status) => return End::Answered(answer),
                Ok(answer) => (format!("status {}", answer.status.as_u16()), retry_after(&answer)),
                Err(fault) if is_last || fault.is_final() => return End::Failed(gave_up(&fault, &url)),
                Err(fault) => (fault.to_string(), None),
            };
            let delay = self.backoff(progress.retries).max(wanted.unwrap_or_default());
            progress.retries += 1;
            tracing::warn!(
                url,
                retry = progress.retries,
                delay_seconds = delay.as_secs_f64(),
                reason,
                "trying the upstream again"
            );
            ask.trace.waiting("another try", tokio::time::sleep(delay)).await;
        }
    }

    /// Waits for the gate, for a place and for a server. Calls that wait for a place or a server are not in flight.
    async fn admit(&self, ask: &Ask) -> Result<((Passage, Place), RegisteredModel), ApiError> {
        let Queue { gate, places, watchdog } = &self.queue;
        let mut waited = None;
        loop {
            let passage = {
                let _watched = watchdog.watch(Wait::Resume, &ask.key, "the gate");
                ask.trace.waiting("resume", gate.pass()).await.map_err(refused)?
            };
            let Some(place) = waited.take().or_else(|| places.take()) else {
                drop(passage);
                let _watched = watchdog.watch(Wait::Turn, &ask.key, &ask.model);
                // A call that a pause has caught up with is held without a place.
                waited = Some(ask.trace.waiting("place", places.wait()).await?).filter(|_| gate.view().pause.is_none());
                continue;
            };
            if let Some(server) = self.servers.pick(&ask.model, &ask.key.rollout_id) {
                return Ok(((passage, place), server));
            }
            drop((passage, place));
            let _watched = watchdog.watch(Wait::Model, &ask.key, &ask.model);
            let server = self.servers.wait_for(&ask.model, &ask.key.rollout_id, self.no_model_wait);
            if ask.trace.waiting("server", server).await.is_none() {
                return Err(no_server(&ask.model));
            }
        }
    }

    /// Asks the model's server how many tokens a conversation is; `None` where it cannot say, or not soon, or is not to be asked
    /// because of a pause.
    pub(crate) async fn count_tokens(&self, model: &str, rollout_id: &str, body: &mut Value) -> Option<u64> {
        let server = self.servers.pick(model, rollout_id).filter(|_| self.queue.gate.view().pause.is_none())?;
        if kind_of(&server) == Kind::LlamaCpp {
            let counted = llamacpp::count(self, &server, Envelope::of(&server)?, body.to_string().into());
            return tokio::time::timeout(COUNT_PATIENCE, counted).await.ok()?;
        }
        if let Some(name) = &server.upstream_model {
            body["model"] = name.clone().into();
        }
        let url = beside_v1(&server, "tokenize");
        let asked = self.try_once(&url, Envelope::of(&server)?, body.to_string().into());
        let answer = tokio::time::timeout(COUNT_PATIENCE, asked).await.ok()?.ok()?;
        let counted = serde_json::from_slice::<Value>(&answer.body).ok();
        counted.filter(|_| answer.status.is_success())?["count"].as_u64()
    }

    /// The body in the form that this server takes, with `more` on top.
    pub(super) fn dress(&self, ask: &Ask, server: &RegisteredModel, more: &[(&'static str, Value)]) -> Bytes {
        let kind = kind_of(server);
        let mut extras = kind.extras(ask.mode, ask.path, &self.proxy);
        let defaults = kind.defaults(ask.mode).iter().filter(|(key, _)| !ask.body.has(key));
        extras.extend(defaults.map(|&(key, value)| (key, value.into())));
        extras.extend(more.iter().cloned());
        if let Some(seed) = ask.seed.filter(|_| kind.takes_seed()) {
            extras.push(("seed", seed.into()));
        }
        if let Some(name) = &server.upstream_model {
            extras.push(("model", name.clone().into()));
        }
        ask.body.to_bytes(&extras)
    }

    /// True where servers are asked for token ids.
    pub(super) fn wants_ids(&self) -> bool {
        self.proxy.override_return_token_ids
    }

    /// Sends once and reads the answer whole.
    pub(super) async fn try_once(
        &self,
        url: &str,
        envelope: Envelope,
        body: Bytes,
    ) -> Result<UpstreamAnswer, reqwest::Error> {
        read_whole(self.send(url, envelope, body).await?).await
    }

    /// Sends once; a stream that comes back is told as it comes, and is a whole answer then.
    async fn try_stream(
        &self,
        url: &str,
        envelope: Envelope,
        body: Bytes,
        through: &mut Through,
    ) -> Result<UpstreamAnswer, Fault> {
        let response = self.send(url, envelope, body).await.map_err(Fault::Request)?;
        let status = response.status();
        if !status.is_success() || !is_event_stream(&response) {
            return read_whole(response).await.map_err(Fault::Request);
        }
        let body = through.carry(response).await?;
        let content_type = Some(HeaderValue::from_static("application/json"));
        Ok(UpstreamAnswer { status, content_type, retry_after: None, body })
    }

    async fn send(&self, url: &str, envelope: Envelope, body: Bytes) -> Result<reqwest::Response, reqwest::Error> {
        let Envelope { key, trace } = envelope;
        let mut request =
            self.client.post(url).header(header::CONTENT_TYPE, "application/json").headers(trace).body(body);
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        request.send().await
    }

    /// `backoff · 2ⁿ`, capped, jittered by a quarter either way so that calls that failed together do not return together.
    fn backoff(&self, retries: u32) -> Duration {
        let grown = self.config.backoff_seconds * 2_f64.powi(retries.min(30).cast_signed());
        let jitter = rand::random_range(0.75..1.25);
        duration(grown.min(self.config.backoff_cap_seconds) * jitter)
    }
}

/// A kind that this version does not know is called in the common form.
fn kind_of(server: &RegisteredModel) -> Kind {
    Kind::from_name(&server.kind).unwrap_or(Kind::OpenAi)
}

/// What a server has beside its `/v1`.
pub(super) fn beside_v1(server: &RegisteredModel, path: &str) -> String {
    let base = server.endpoint.trim_end_matches('/');
    format!("{}/{path}", base.strip_suffix("/v1").unwrap_or(base))
}

/// The body in memory of its own: what is kept of it must not hold the connection's buffers.
async fn whole(mut response: reqwest::Response) -> Result<Bytes, reqwest::Error> {
    /// A length that is only claimed is not believed beyond this.
    const MAX_RESERVED: u64 = 1 << 20;
    let length = response.content_length().unwrap_or_default().min(MAX_RESERVED);
    let mut body = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
    while let Some(chunk) = response.chunk().await? {
        body.extend_from_slice(&chunk);
    }
    Ok(body.into_boxed_slice().into())
}

/// The server's key, if it has one.
fn key_of(server: &RegisteredModel) -> Result<Option<String>, ApiError> {
    let Some(name) = &server.api_key_env else { return Ok(None) };
    std::env::var(name).map(Some).map_err(|_| {
        tracing::error!(
            model = server.model,
            endpoint = server.endpoint,
            "the server's key is not there: set {name} in the environment of the gateway and start it again"
        );
        // Names of machines and variables are none of an agent's business.
        ApiError::new(StatusCode::BAD_GATEWAY, "The gateway has no key for the model server; its log says which")
    })
}

fn is_retryable(status: StatusCode) -> bool {
    matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::CONFLICT | StatusCode::TOO_MANY_REQUESTS)
        || status.is_server_error()
}

fn retry_after(answer: &UpstreamAnswer) -> Option<Duration> {
    let seconds: u64 = answer.retry_after.as_ref()?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST_RETRY_AFTER))
}

/// Why a try came to nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("{}", describe(.0))]
    Request(reqwest::Error),
    #[error(transparent)]
    Broken(#[from] Broken),
}

impl Fault {
    /// Another try would come to the same.
    fn is_final(&self) -> bool {
        matches!(self, Self::Request(error) if error.is_builder()) || self.is_distrust()
    }

    /// The server's certificate is not one that the gateway trusts.
    fn is_distrust(&self) -> bool {
        self.to_string().starts_with("invalid peer certificate")
    }

    /// In a word, for whoever counts.
    fn kind(&self) -> &'static str {
        match self {
            Self::Request(error) if error.is_timeout() => "timeout",
            Self::Request(error) if error.is_connect() => "connect",
            Self::Request(_) => "broken_off",
            Self::Broken(_) => "broken_stream",
        }
    }

    fn is_timeout(&self) -> bool {
        matches!(self, Self::Request(error) if error.is_timeout())
    }
}

fn describe(error: &reqwest::Error) -> String {
    // reqwest's own text says little; the reason is the innermost source.
    let mut reason: &dyn std::error::Error = error;
    while let Some(source) = reason.source() {
        reason = source;
    }
    if error.is_timeout() { "timeout".to_owned() } else { reason.to_string() }
}

fn gave_up(fault: &Fault, url: &str) -> ApiError {
    let reason = fault.to_string();
    if fault.is_distrust() {
        tracing::error!(
            url,
            reason,
            "the upstream's certificate is not trusted; add its authority to the system's, or name a file with it in SSL_CERT_FILE, \
             and start the gateway again"
        );
    } else {
        tracing::error!(url, reason, "gave the upstream up; is the server alive at the registered endpoint?");
    }
    match fault {
        fault if fault.is_timeout() => ApiError::new(StatusCode::GATEWAY_TIMEOUT, "Upstream model server timed out"),
        Fault::Request(_) => ApiError::new(StatusCode::BAD_GATEWAY, "Upstream model server request failed"),
        Fault::Broken(broken) => {
            ApiError::new(StatusCode::BAD_GATEWAY, format!("Upstream model server failed: {broken}"))
        }
    }
}

async fn read_whole(response: reqwest::Response) -> Result<UpstreamAnswer, reqwest::Error> {
    let header = |name| response.headers().get(name).cloned();
    let (status, content_type, retry_after) =
        (response.status(), header(header::CONTENT_TYPE), header(header::RETRY_AFTER));
    Ok(UpstreamAnswer { status, content_type, retry_after, body: whole(response).await? })
}

fn is_event_stream(response: &reqwest::Response) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with(sse::CONTENT_TYPE))
}

/// True where streams are passed on as the server gives them.
fn streams_through(server: &RegisteredModel) -> bool {
    server.stream.as_deref() == Some(THROUGH) && kind_of(server).streams()
}

/// What asks for a stream. The usage says how many tokens were sampled.
fn streaming() -> [(&'static str, Value); 2] {
    [("stream", Value::Bool(true)), ("stream_options", json!({"include_usage": true}))]
}

fn no_server(model: &str) -> ApiError {
    ApiError::new(
        StatusCode::SERVICE_UNAVAILABLE,
        format!(
            "No servers available for model '{model}'. Register one with POST /api/models \
             [{{\"model\": \"{model}\", \"endpoint\": \"http://HOST:PORT/v1\"}}]"
        ),
    )
}

/// What a caller is told whom a pause does not let through.
fn refused(refused: Refused) -> ApiError {
    match refused {
        Refused::Paused { retry_after_seconds, reason } => {
            let body = serde_json::json!({"error": "gateway paused", "reason": reason});
            ApiError::with_body(StatusCode::TOO_MANY_REQUESTS, body)
                .retry_after(retry_after_seconds)
                .with_header("x-agl-paused", "true")
        }
        Refused::Fenced => ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "The gateway cannot reach its database; try again when it is back",
        )
        .retry_after(1),
        Refused::Closing => ApiError::stopping(),
    }
}
