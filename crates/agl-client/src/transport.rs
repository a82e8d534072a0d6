//! One request to the gateway: sent, repeated while the gateway is away, and judged.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rand::Rng;
use reqwest::{Method, Response, StatusCode, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::ClientError;

/// How long a call goes on trying to reach a gateway that is away, unless said otherwise.
pub const DEFAULT_PATIENCE: Duration = Duration::from_secs(120);

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The gateway sends something at least every 10 s, on a watch too; after this much silence the connection is dead.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const LONGEST_BACKOFF: Duration = Duration::from_secs(2);

/// A handle on one gateway. Clones share connections; drop the last one to close them.
#[derive(Clone, Debug)]
pub struct GatewayClient {
    inner: Arc<Inner>,
    patience: Duration,
}

#[derive(Debug)]
struct Inner {
    base: Url,
    key: String,
    http: reqwest::Client,
    /// Since when the gateway has been away. Shared, so that of all the calls that wait only one says so. A std mutex:
    /// it is never held across an await.
    away_since: Mutex<Option<Instant>>,
}

/// Whether a call may be sent again after an answer was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Repeat {
    /// Twice is the same as once.
    Freely,
    /// Twice would be two: repeated only where the gateway cannot have acted.
    OnlyUnheard,
}

/// A request before it is sent.
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) url: Url,
    pub(crate) body: Option<Bytes>,
    pub(crate) repeat: Repeat,
}

/// A refusal together with what is needed to judge it.
pub(crate) struct Failure {
    pub(crate) error: ClientError,
    /// True where the answer to an earlier try of the same call was lost.
    pub(crate) answer_lost: bool,
}

impl GatewayClient {
    /// A client of the gateway at `base_url` (`http://HOST:PORT`, a path prefix is kept). An empty `key` sends none.
    ///
    /// Connects to nothing yet.
    ///
    /// # Errors
    /// [`ClientError::Address`] where `base_url` is no HTTP address.
    pub fn new(base_url: &str, key: &str) -> Result<Self, ClientError> {
        let refuse = |reason: String| ClientError::Address { url: base_url.to_owned(), reason };
        let base = Url::parse(base_url.trim_end_matches('/')).map_err(|error| refuse(error.to_string()))?;
        if base.cannot_be_a_base() || base.scheme() != "http" {
            return Err(refuse(format!("its scheme is {:?}", base.scheme())));
        }
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            // The gateway is ours to reach: a proxy meant for the outside world has no business in between.
            .no_proxy()
            .tcp_nodelay(true)
            .build()
            .map_err(|error| refuse(error.to_string()))?;
        let inner = Inner { base, key: key.to_owned(), http, away_since: Mutex::new(None) };
        Ok(Self { inner: Arc::new(inner), patience: DEFAULT_PATIENCE })
    }

    /// The same client with another limit on how long a call waits for a gateway that is away.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// The address that this client was made for, without a trailing slash.
    #[must_use]
    pub fn base_url(&self) -> &str {
        self.inner.base.as_str().trim_end_matches('/')
    }

    pub(crate) fn patience(&self) -> Duration {
        self.patience
    }

    /// The address of an endpoint; every segment is escaped, so that an id may hold any character.
    pub(crate) fn url(&self, segments: &[&str]) -> Url {
        let mut url = self.inner.base.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, url: Url) -> Result<T, ClientError> {
        let call = Call { method: Method::GET, url, body: None, repeat: Repeat::Freely };
        self.decoded(call).await
    }

    pub(crate) async fn post<T: DeserializeOwned>(
        &self,
        url: Url,
        body: &impl Serialize,
        repeat: Repeat,
    ) -> Result<T, ClientError> {
        let body = Some(encode(&url, body)?);
        self.decoded(Call { method: Method::POST, url, body, repeat }).await
    }

    pub(crate) async fn delete(&self, url: Url) -> Result<(), ClientError> {
        let call = Call { method: Method::DELETE, url, body: None, repeat: Repeat::Freely };
        self.send(&call).await.map(drop).map_err(|failure| failure.error)
    }

    pub(crate) async fn decoded<T: DeserializeOwned>(&self, call: Call) -> Result<T, ClientError> {
        let started = Instant::now();
        loop {
            let response = self.send(&call).await.map_err(|failure| failure.error)?;
            match response.bytes().await {
                Ok(bytes) => {
                    return serde_json::from_slice(&bytes)
                        .map_err(|source| ClientError::Decode { url: call.url.to_string(), source });
                }
                // The gateway went away while it was answering.
                Err(error) if call.repeat == Repeat::Freely && started.elapsed() < self.patience => {
                    tracing::debug!(url = %call.url, %error, "answer broke off, asking again");
                }
                Err(error) => return Err(unreachable_at(&call.url, started, error)),
            }
        }
    }

    /// Sends a call until the gateway answers it, refuses it, or patience ends.
    pub(crate) async fn send(&self, call: &Call) -> Result<Response, Failure> {
        let started = Instant::now();
        let mut backoff = FIRST_BACKOFF;
        let mut answer_lost = false;
        loop {
            let problem: Box<dyn std::error::Error + Send + Sync>;
            match self.send_once(call).await {
                Ok(response) if is_away(response.status()) => {
                    let status = response.status();
                    // 503 says that nothing was done; 502 and 504 come from something in between that cannot know.
                    let heard = status != StatusCode::SERVICE_UNAVAILABLE;
                    answer_lost |= heard;
                    let error = refusal(call, response).await;
                    if heard && call.repeat == Repeat::OnlyUnheard || started.elapsed() >= self.patience {
                        return Err(Failure { error, answer_lost });
                    }
                    problem = Box::new(error);
                }
                Ok(response) => {
                    self.note_back();
                    if response.status().is_success() {
                        return Ok(response);
                    }
                    return Err(Failure { error: refusal(call, response).await, answer_lost });
                }
                Err(error) => {
                    let heard = !error.is_connect();
                    answer_lost |= heard;
                    let hopeless = error.is_builder();
                    if hopeless || heard && call.repeat == Repeat::OnlyUnheard || started.elapsed() >= self.patience {
                        return Err(Failure { error: unreachable_at(&call.url, started, error), answer_lost });
                    }
                    problem = Box::new(error);
                }
            }
            self.note_away(problem.as_ref());
            let wait = jittered(backoff);
            tokio::time::sleep(wait.min(self.patience.saturating_sub(started.elapsed()))).await;
            backoff = (backoff * 2).min(LONGEST_BACKOFF);
        }
    }

    pub(crate) async fn send_once(&self, call: &Call) -> Result<Response, reqwest::Error> {
        let mut request = self.inner.http.request(call.method.clone(), call.url.clone());
        if !self.inner.key.is_empty() {
            request = request.bearer_auth(&self.inner.key);
        }
        if let Some(body) = &call.body {
            request = request.header("content-type", "application/json").body(body.clone());
        }
        request.send().await
    }

    pub(crate) fn note_away(&self, problem: &(dyn std::error::Error + 'static)) {
        let mut away_since = self.inner.away_since.lock().unwrap_or_else(PoisonError::into_inner);
        if away_since.is_none() {
            *away_since = Some(Instant::now());
            tracing::warn!(
                gateway = self.base_url(),
                patience_seconds = self.patience.as_secs(),
                "the gateway is away ({}), waiting for it",
                chain(problem)
            );
        }
    }

    pub(crate) fn note_back(&self) {
        let since = self.inner.away_since.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(since) = since {
            tracing::info!(
                gateway = self.base_url(),
                "the gateway is back after {:.1} s",
                since.elapsed().as_secs_f64()
            );
        }
    }
}

pub(crate) fn encode(url: &Url, body: &impl Serialize) -> Result<Bytes, ClientError> {
    serde_json::to_vec(body).map(Bytes::from).map_err(|source| ClientError::Encode { url: url.to_string(), source })
}

/// What a gateway that is being replaced, or a load balancer in front of it, answers meanwhile.
pub(crate) fn is_away(status: StatusCode) -> bool {
    matches!(status, StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT)
}

pub(crate) async fn refusal(call: &Call, response: Response) -> ClientError {
    let status = response.status().as_u16();
    let body = response.text().await.unwrap_or_default();
    let detail = match serde_json::from_str::<serde_json::Value>(&body) {
        Ok(serde_json::Value::Object(mut fields)) => match fields.remove("detail") {
            Some(serde_json::Value::String(detail)) => detail,
            Some(detail) => detail.to_string(),
            None => body,
        },
        _ => body.chars().take(500).collect(),
    };
    ClientError::Refused { status, method: call.method.to_string(), url: call.url.to_string(), detail }
}

pub(crate) fn unreachable_at(url: &Url, started: Instant, error: reqwest::Error) -> ClientError {
    ClientError::Unreachable { url: url.to_string(), waited: started.elapsed(), source: chain(&error).into() }
}

/// Between half of `wait` and all of it, so that those who wait for the same gateway do not come back in step.
pub(crate) fn jittered(wait: Duration) -> Duration {
    wait.mul_f64(rand::rng().random_range(0.5..1.0))
}

/// reqwest says «error sending request» and keeps the reason in its sources.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
