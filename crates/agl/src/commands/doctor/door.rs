//! The door that the harness knocks at: it passes every request on to the gateway and remembers it, also those that the gateway
//! refuses and therefore never records.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::TryStreamExt;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// A request as it came and how it was answered.
#[derive(Clone, Debug)]
pub struct Knock {
    /// Its method.
    pub method: String,
    /// Its path, without the part that names rollout and attempt where it has one.
    pub path: String,
    /// The status of the answer; `None` where the gateway gave none.
    pub status: Option<u16>,
    /// When it came.
    pub came: Instant,
    /// When the answer began.
    pub answered: Instant,
}

/// Passes requests on until it is dropped.
pub struct Door {
    /// Where it is.
    pub url: String,
    listener: Option<TcpListener>,
    server: Option<JoinHandle<()>>,
    knocks: Knocks,
}

type Knocks = Arc<Mutex<Vec<Knock>>>;

#[derive(Clone)]
struct Way {
    gateway: String,
    client: reqwest::Client,
    knocks: Knocks,
}

/// These belong to one connection and not to the request.
const OF_A_CONNECTION: [HeaderName; 4] =
    [header::HOST, header::CONNECTION, header::TRANSFER_ENCODING, header::CONTENT_LENGTH];

fn lock(knocks: &Knocks) -> MutexGuard<'_, Vec<Knock>> {
    knocks.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Door {
    /// Takes a free port; nobody is answered before [`Door::open`].
    pub async fn bind() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        Ok(Self { url, listener: Some(listener), server: None, knocks: Knocks::default() })
    }

    /// Passes requests on to the gateway from now on.
    pub fn open(&mut self, gateway: &str) -> anyhow::Result<()> {
        let client = reqwest::Client::builder().no_proxy().build()?;
        let way = Way { gateway: gateway.to_owned(), client, knocks: Arc::clone(&self.knocks) };
        let router = Router::new().fallback(pass_on).with_state(way);
        self.server = self.listener.take().map(|listener| {
            tokio::spawn(async move {
                // Never ends by itself.
                let _ = axum::serve(listener, router).await;
            })
        });
        Ok(())
    }

    /// Everything that came, in the order in which it was answered.
    pub fn knocks(&self) -> Vec<Knock> {
        lock(&self.knocks).clone()
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if let Some(server) = &self.server {
            server.abort();
        }
    }
}

async fn pass_on(State(way): State<Way>, request: Request) -> Response {
    let came = Instant::now();
    let (parts, body) = request.into_parts();
    let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
    let mut headers = parts.headers;
    OF_A_CONNECTION.iter().for_each(|name| drop(headers.remove(name)));
    let asked = way
        .client
        .request(parts.method.clone(), format!("{}{target}", way.gateway))
        .headers(headers)
        .body(reqwest::Body::wrap_stream(body.into_data_stream()))
        .send()
        .await;
    let status = asked.as_ref().ok().map(|answer| answer.status().as_u16());
    lock(&way.knocks).push(Knock {
        method: parts.method.to_string(),
        path: within_attempt(parts.uri.path()).to_owned(),
        status,
        came,
        answered: Instant::now(),
    });
    match asked {
        Ok(answer) => {
            let mut headers = answer.headers().clone();
            OF_A_CONNECTION.iter().for_each(|name| drop(headers.remove(name)));
            let body = Body::from_stream(answer.bytes_stream().map_err(std::io::Error::other));
            (answer_status(status), headers, body).into_response()
        }
        Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    }
}

fn answer_status(status: Option<u16>) -> StatusCode {
    status.and_then(|status| StatusCode::from_u16(status).ok()).unwrap_or(StatusCode::BAD_GATEWAY)
}

/// `/openai/v1/models` of `/proxy/rollout/ID/attempt/0/mode/val/openai/v1/models`.
fn within_attempt(path: &str) -> &str {
    let Some(rest) = path.strip_prefix("/proxy/rollout/") else { return path };
    // ID, attempt, 0, mode, val.
    rest.match_indices('/').nth(4).map_or(path, |(at, _)| &rest[at..])
}

impl Knock {
    /// True for a model call of any dialect.
    pub fn is_call(&self) -> bool {
        let ends = ["/chat/completions", "/completions", "/responses", "/messages", ":generateContent"];
        self.method == "POST"
            && (ends.iter().any(|end| self.path.ends_with(end)) || self.path.ends_with(":streamGenerateContent"))
    }
}

#[cfg(test)]
mod tests {
    use super::within_attempt;

    #[test]
    fn a_path_is_shown_without_the_attempt() {
        assert_eq!(within_attempt("/proxy/rollout/r/attempt/0/mode/val/openai/v1/models"), "/openai/v1/models");
        assert_eq!(within_attempt("/v1/chat/completions"), "/v1/chat/completions");
        assert_eq!(within_attempt("/proxy/rollout/r"), "/proxy/rollout/r");
    }
}
