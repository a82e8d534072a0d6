//! One call to an inference server: chosen, sent, and sent again where that may help.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use agl_store::RegisteredModel;
use axum::http::{HeaderValue, StatusCode, header};
use bytes::Bytes;

use super::kind::Kind;
use super::places::{Place, Places};
use super::recorder::AttemptKey;
use super::request::{Mode, RequestBody, UpstreamPath};
use super::servers::Servers;
use crate::config::{DefaultProxyConfig, GatewayConfig, UpstreamConfig, duration};
use crate::error::{ApiError, GatewayError};
use crate::gate::{Gate, Passage, Refused};
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
    pub(crate) async fn call(&self, ask: Ask, progress: &mut Progress, sent_any: &AtomicBool) -> End {
        loop {
            let (admitted, server) = match self.admit(&ask).await {
                Ok(admitted) => admitted,
                Err(error) => return End::Failed(error),
            };
            let body = self.dress(&ask, &server);
            progress.sent = Some(body.clone());
            progress.server = Some(server.clone());
            sent_any.store(true, Ordering::SeqCst);
            let url = format!("{}/{}", server.endpoint.trim_end_matches('/'), ask.path.as_str());
            let key = match key_of(&server) {
                Ok(key) => key,
                Err(error) => return End::Failed(error),
            };
            let tried = {
                let _watched = self.queue.watchdog.watch(Wait::Server, &ask.key, &url);
                tokio::select! {
                    tried = self.try_once(&url, key, body) => tried,
                    () = self.queue.gate.fenced() => {
                        tracing::warn!(rollout = ask.key.rollout_id, url, "a call is given up and made again once the store is back");
                        continue;
                    }
                }
            };
            drop(admitted);

            let is_last = progress.retries + 1 >= self.config.max_attempts;
            let (reason, wanted) = match tried {
                Ok(answer) if is_last || !is_retryable(answer.status) => return End::Answered(answer),
                Ok(answer) => (format!("status {}", answer.status.as_u16()), retry_after(&answer)),
                Err(error) if is_last || error.is_builder() => return End::Failed(gave_up(&error, &url)),
                Err(error) => (describe(&error), None),
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
            tokio::time::sleep(delay).await;
        }
    }

    /// Waits for the gate, for a place and for a server. Calls that wait for a place or a server are not in flight.
    async fn admit(&self, ask: &Ask) -> Result<((Passage, Place), RegisteredModel), ApiError> {
        let Queue { gate, places, watchdog } = &self.queue;
        let mut waited = None;
        loop {
            let passage = {
                let _watched = watchdog.watch(Wait::Resume, &ask.key, "the gate");
                gate.pass().await.map_err(refused)?
            };
            let Some(place) = waited.take().or_else(|| places.take()) else {
                drop(passage);
                let _watched = watchdog.watch(Wait::Turn, &ask.key, &ask.model);
                // A call that a pause has caught up with is held without a place.
                waited = Some(places.wait().await?).filter(|_| gate.view().pause.is_none());
                continue;
            };
            if let Some(server) = self.servers.pick(&ask.model, &ask.key.rollout_id) {
                return Ok(((passage, place), server));
            }
            drop((passage, place));
            let _watched = watchdog.watch(Wait::Model, &ask.key, &ask.model);
            if self.servers.wait_for(&ask.model, &ask.key.rollout_id, self.no_model_wait).await.is_none() {
                return Err(no_server(&ask.model));
            }
        }
    }

    /// Asks the model's server how many tokens a conversation is; `None` where it cannot say, or not soon, or is not to be asked
    /// because of a pause.
    pub(crate) async fn count_tokens(
        &self,
        model: &str,
        rollout_id: &str,
        body: &mut serde_json::Value,
    ) -> Option<u64> {
        let server = self.servers.pick(model, rollout_id).filter(|_| self.queue.gate.view().pause.is_none())?;
        if let Some(name) = &server.upstream_model {
            body["model"] = name.clone().into();
        }
        let base = server.endpoint.trim_end_matches('/');
        let url = format!("{}/tokenize", base.strip_suffix("/v1").unwrap_or(base));
        let asked = self.try_once(&url, key_of(&server).ok()?, body.to_string().into());
        let answer = tokio::time::timeout(COUNT_PATIENCE, asked).await.ok()?.ok()?;
        let counted = serde_json::from_slice::<serde_json::Value>(&answer.body).ok();
        counted.filter(|_| answer.status.is_success())?["count"].as_u64()
    }

    /// The body in the form that this server takes.
    fn dress(&self, ask: &Ask, server: &RegisteredModel) -> Bytes {
        // A kind that this version does not know is called in the common form.
        let kind = Kind::from_name(&server.kind).unwrap_or(Kind::OpenAi);
        let mut extras = kind.extras(ask.mode, ask.path, &self.proxy);
        if let Some(seed) = ask.seed.filter(|_| kind.takes_seed()) {
            extras.push(("seed", seed.into()));
        }
        if let Some(name) = &server.upstream_model {
            extras.push(("model", name.clone().into()));
        }
        ask.body.to_bytes(&extras)
    }

    async fn try_once(&self, url: &str, key: Option<String>, body: Bytes) -> Result<UpstreamAnswer, reqwest::Error> {
        let mut request = self.client.post(url).header(header::CONTENT_TYPE, "application/json").body(body);
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        let response = request.send().await?;
        let header = |name| response.headers().get(name).cloned();
        let (status, content_type, retry_after) =
            (response.status(), header(header::CONTENT_TYPE), header(header::RETRY_AFTER));
        Ok(UpstreamAnswer { status, content_type, retry_after, body: response.bytes().await? })
    }

    /// `backoff · 2ⁿ`, capped, jittered by a quarter either way so that calls that failed together do not return together.
    fn backoff(&self, retries: u32) -> Duration {
        let grown = self.config.backoff_seconds * 2_f64.powi(retries.min(30).cast_signed());
        let jitter = rand::random_range(0.75..1.25);
        duration(grown.min(self.config.backoff_cap_seconds) * jitter)
    }
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

fn describe(error: &reqwest::Error) -> String {
    // reqwest's own text says little; the reason is the innermost source.
    let mut reason: &dyn std::error::Error = error;
    while let Some(source) = reason.source() {
        reason = source;
    }
    if error.is_timeout() { "timeout".to_owned() } else { reason.to_string() }
}

fn gave_up(error: &reqwest::Error, url: &str) -> ApiError {
    tracing::error!(
        url,
        reason = describe(error),
        "gave the upstream up; is the server alive at the registered endpoint?"
    );
    if error.is_timeout() {
        ApiError::new(StatusCode::GATEWAY_TIMEOUT, "Upstream model server timed out")
    } else {
        ApiError::new(StatusCode::BAD_GATEWAY, "Upstream model server request failed")
    }
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
