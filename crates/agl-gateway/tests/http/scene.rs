//! A gateway with a scripted upstream behind it, and short words for what tests do with them.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use agl_gateway::{Gateway, GatewayConfig};
use axum::Router;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};

pub const KEY: &str = "test-secret-key";
pub const MODEL: &str = "test-model";

/// A running gateway and what is around it.
pub struct Scene {
    pub url: String,
    pub upstream: Upstream,
    pub http: reqwest::Client,
    config: GatewayConfig,
    stop: Option<oneshot::Sender<()>>,
    served: Option<tokio::task::JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

/// An answer of the gateway.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    pub fn detail(&self) -> String {
        self.json()["detail"].as_str().unwrap_or_default().to_owned()
    }
}

/// Settings under which nothing takes long.
pub fn quick() -> GatewayConfig {
    let mut config = GatewayConfig {
        listen: "127.0.0.1:0".to_owned(),
        key: KEY.to_owned(),
        no_model_wait_seconds: 0.2,
        hangup_grace_seconds: 0.4,
        shutdown_grace_seconds: 5.0,
        ..GatewayConfig::default()
    };
    config.default_proxy.model_name = MODEL.to_owned();
    config.upstream.backoff_seconds = 0.02;
    config.upstream.backoff_cap_seconds = 0.05;
    config
}

impl Scene {
    /// On a fresh sqlite store, with one registered server.
    pub async fn start() -> Self {
        Self::with(quick()).await
    }

    pub async fn with(config: GatewayConfig) -> Self {
        let scene = Self::without_model(config).await;
        scene.register(json!([{"model": MODEL, "endpoint": scene.upstream.endpoint, "version": 3}])).await;
        scene
    }

    pub async fn without_model(mut config: GatewayConfig) -> Self {
        let folder = tempfile::tempdir().unwrap();
        if config.store == GatewayConfig::default().store {
            config.store = format!("sqlite:{}", folder.path().join("agl.db").display());
        }
        let mut scene = Self {
            url: String::new(),
            upstream: Upstream::start().await,
            http: reqwest::Client::builder().no_proxy().build().unwrap(),
            config,
            stop: None,
            served: None,
            _folder: folder,
        };
        scene.serve().await;
        scene
    }

    async fn serve(&mut self) {
        let gateway = Gateway::bind(self.config.clone()).await.unwrap();
        self.url = format!("http://{}", gateway.addr());
        let (stop, stopped) = oneshot::channel::<()>();
        self.stop = Some(stop);
        self.served = Some(tokio::spawn(async move {
            gateway.serve(async move { drop(stopped.await) }).await.unwrap();
        }));
    }

    pub async fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
        self.served.take().unwrap().await.unwrap();
    }

    /// Stops it and starts it again on the same store, on another port.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.serve().await;
    }

    /// Starts it again after [`Self::stop`].
    pub async fn start_again(&mut self) {
        self.serve().await;
    }

    pub fn database(&self) -> PathBuf {
        self.config.store.strip_prefix("sqlite:").unwrap().into()
    }

    pub async fn send(&self, method: Method, path: &str, key: &str, body: Option<&Value>) -> Answer {
        let mut request = self.http.request(method, format!("{}{path}", self.url));
        if !key.is_empty() {
            request = request.bearer_auth(key);
        }
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body.to_string());
        }
        let response = request.send().await.unwrap();
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Answer { status, headers, text: response.text().await.unwrap() }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(Method::GET, path, KEY, None).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.send(Method::POST, path, KEY, Some(&body)).await
    }

    pub async fn patch(&self, path: &str, body: Value) -> Answer {
        self.send(Method::PATCH, path, KEY, Some(&body)).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send(Method::DELETE, path, KEY, None).await
    }

    pub async fn register(&self, models: Value) -> Answer {
        let answer = self.post("/api/models", models).await;
        assert_eq!(answer.status, 201, "{}", answer.text);
        answer
    }

    /// Enqueues a rollout of that id.
    pub async fn enqueue(&self, id: &str) -> Value {
        let answer = self.post("/api/rollouts", json!([{"rollout_id": id, "input": {"data_id": "task"}}])).await;
        assert_eq!(answer.status, 201, "{}", answer.text);
        answer.json()[0].clone()
    }

    pub async fn set_state(&self, id: &str, state: &str) -> Answer {
        self.patch(&format!("/api/rollouts/{id}"), json!({"status": {"state": state}})).await
    }

    /// A chat completion of a rollout's first attempt.
    pub async fn call(&self, id: &str, body: Value) -> Answer {
        self.post(&chat_path(id, "train"), body).await
    }

    pub async fn events(&self, id: &str) -> Vec<Value> {
        self.get(&format!("/api/rollouts/{id}/events")).await.json().as_array().unwrap().clone()
    }

    pub async fn sequences(&self, id: &str) -> Value {
        self.get(&format!("/api/rollouts/{id}/sequences")).await.json()
    }
}

pub fn chat_path(id: &str, mode: &str) -> String {
    format!("/proxy/rollout/{id}/attempt/0/mode/{mode}/openai/v1/chat/completions")
}

/// Asks until it is so; fails the test after twenty seconds.
pub async fn until<F: AsyncFnMut() -> bool>(what: &str, mut is_so: F) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so().await {
        assert!(Instant::now() < deadline, "still not so: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// An inference server that answers from a script and remembers what it was asked.
#[derive(Clone)]
pub struct Upstream {
    pub endpoint: String,
    shared: Arc<Shared>,
}

struct Shared {
    script: Mutex<VecDeque<Reply>>,
    asked: Mutex<Vec<(String, Value)>>,
    authorizations: Mutex<Vec<String>>,
    released: watch::Sender<bool>,
}

/// What it answers once.
#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: String,
    /// Answer only once the test says so.
    pub waits: bool,
    pub delay: Duration,
}

impl Reply {
    pub fn json(status: u16, body: &Value) -> Self {
        Self {
            status,
            headers: vec![("content-type", "application/json".to_owned())],
            body: body.to_string(),
            waits: false,
            delay: Duration::ZERO,
        }
    }

    pub fn waiting(self) -> Self {
        Self { waits: true, ..self }
    }
}

/// A chat completion in vLLM's form.
pub fn completion(prompt: &[u32], sampled: &[u32]) -> Value {
    let content: Vec<Value> =
        sampled.iter().map(|id| json!({"token": "t", "logprob": -f64::from(*id) / 100.0})).collect();
    json!({
        "id": "cmpl-1", "object": "chat.completion", "model": MODEL, "prompt_token_ids": prompt,
        "choices": [{"index": 0, "finish_reason": "stop", "token_ids": sampled, "logprobs": {"content": content},
                     "message": {"role": "assistant", "content": "hi"}}],
        "usage": {"prompt_tokens": prompt.len(), "completion_tokens": sampled.len()},
    })
}

impl Upstream {
    pub async fn start() -> Self {
        let shared = Arc::new(Shared {
            script: Mutex::default(),
            asked: Mutex::default(),
            authorizations: Mutex::default(),
            released: watch::Sender::new(false),
        });
        let router = Router::new()
            .route("/v1/{*path}", axum::routing::post(answer))
            .layer(axum::extract::DefaultBodyLimit::disable())
            .with_state(Arc::clone(&shared));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}/v1", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { endpoint, shared }
    }

    /// Adds to the script; what is asked beyond it is answered with prompt [1, 2] and answer [7].
    pub fn will(&self, reply: Reply) {
        self.shared.script.lock().unwrap().push_back(reply);
    }

    pub fn will_sample(&self, prompt: &[u32], sampled: &[u32]) {
        self.will(Reply::json(200, &completion(prompt, sampled)));
    }

    /// Lets waiting replies go.
    pub fn release(&self) {
        self.shared.released.send_replace(true);
    }

    pub fn asked(&self) -> Vec<(String, Value)> {
        self.shared.asked.lock().unwrap().clone()
    }

    /// The `Authorization` headers, empty where there was none.
    pub fn authorizations(&self) -> Vec<String> {
        self.shared.authorizations.lock().unwrap().clone()
    }

    pub async fn was_asked(&self, times: usize) {
        until("the upstream was asked", async || self.asked().len() >= times).await;
    }
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    Path(path): Path<String>,
    headers: HeaderMap,
    body: String,
) -> Response {
    let authorization = headers.get("authorization").and_then(|value| value.to_str().ok());
    shared.authorizations.lock().unwrap().push(authorization.unwrap_or_default().to_owned());
    shared.asked.lock().unwrap().push((path, serde_json::from_str(&body).unwrap_or(Value::String(body))));
    let reply = shared.script.lock().unwrap().pop_front();
    let reply = reply.unwrap_or_else(|| Reply::json(200, &completion(&[1, 2], &[7])));
    tokio::time::sleep(reply.delay).await;
    if reply.waits {
        let mut released = shared.released.subscribe();
        released.wait_for(|released| *released).await.unwrap();
    }
    let mut response = (StatusCode::from_u16(reply.status).unwrap(), reply.body).into_response();
    response.headers_mut().remove("content-type");
    for (name, value) in reply.headers {
        response.headers_mut().insert(name, value.parse().unwrap());
    }
    response
}
