//! What one client, one rollout and all calls together may take.

use std::time::{Duration, Instant};

use agl_gateway::GatewayConfig;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::scene::{KEY, Reply, Scene, chat_path, completion, quick, until};

/// A client that sends what it likes, when it likes.
struct Client(TcpStream);

impl Client {
    async fn of(scene: &Scene) -> Self {
        Self(TcpStream::connect(scene.url.strip_prefix("http://").unwrap()).await.unwrap())
    }

    async fn says(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    /// Everything until the gateway closes the connection.
    async fn hears_the_end(&mut self) -> String {
        let mut heard = Vec::new();
        let read = tokio::time::timeout(Duration::from_secs(20), self.0.read_to_end(&mut heard)).await;
        let reset = read.expect("the connection is not closed").is_err();
        assert!(!reset || !heard.is_empty(), "the connection was reset without a word");
        String::from_utf8_lossy(&heard).into_owned()
    }
}

fn post(path: &str, headers: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n{headers}\r\n")
}

fn impatient() -> GatewayConfig {
    let mut config = quick();
    config.limits.header_timeout_seconds = 0.3;
    config.limits.body_timeout_seconds = 0.3;
    config.limits.write_timeout_seconds = 0.3;
    config.body_limit = 1000;
    config
}

#[tokio::test]
async fn a_header_that_does_not_come_and_an_idle_connection_are_not_waited_for() {
    let scene = Scene::with(impatient()).await;
    for said in ["", "GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: "] {
        let mut client = Client::of(&scene).await;
        client.says(said).await;
        let heard = client.hears_the_end().await;
        assert!(heard.is_empty() || heard.starts_with("HTTP/1.1 408"), "{heard}");
    }
    let mut client = Client::of(&scene).await;
    client.says("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(client.hears_the_end().await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn a_header_that_is_too_large_is_431() {
    let scene = Scene::start().await;
    let mut client = Client::of(&scene).await;
    let long = "x".repeat(300 * 1024);
    // The gateway may close before all of it is sent.
    let _closed = client.0.write_all(format!("GET /healthz HTTP/1.1\r\nX-Long: {long}").as_bytes()).await;
    let mut status = [0; 12];
    client.0.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 431");
}

#[tokio::test]
async fn a_body_that_does_not_come_in_time_is_408_in_the_callers_dialect() {
    let scene = Scene::with(impatient()).await;
    scene.enqueue("r").await;
    let messages = chat_path("r", "train").replace("openai/v1/chat/completions", "anthropic/v1/messages");
    for (path, form) in [(messages.as_str(), "\"type\":\"error\""), ("/api/rollouts", "\"detail\":")] {
        let mut client = Client::of(&scene).await;
        client.says(&post(path, "Content-Length: 100\r\n")).await;
        client.says("{\"messages\":").await;
        let heard = client.hears_the_end().await;
        assert!(heard.starts_with("HTTP/1.1 408") && heard.contains(form), "{heard}");
        assert!(heard.contains("limits.body_timeout_seconds"), "{heard}");
    }
}

#[tokio::test]
async fn a_body_that_is_too_large_is_413_however_it_comes() {
    let mut config = impatient();
    config.limits.body_timeout_seconds = 10.0;
    let scene = Scene::with(config).await;
    for size in [1001, 1900] {
        let answer = scene.post("/api/rollouts", json!(["x".repeat(size)])).await;
        assert_eq!(answer.status, 413);
        assert!(answer.detail().contains("`body_limit`"), "{}", answer.text);
    }
    let fits = scene.post("/api/rollouts", json!(["x".repeat(996)])).await;
    assert_eq!(fits.status, 422, "1000 bytes fit: {}", fits.text);

    let mut chunked = Client::of(&scene).await;
    chunked.says(&post("/api/rollouts", "Transfer-Encoding: chunked\r\nConnection: close\r\n")).await;
    for _ in 0..15 {
        chunked.says(&format!("64\r\n{}\r\n", "x".repeat(100))).await;
    }
    chunked.says("0\r\n\r\n").await;
    assert!(chunked.hears_the_end().await.starts_with("HTTP/1.1 413"));

    // Who asks before sending is told before sending.
    let mut asking = Client::of(&scene).await;
    asking.says(&post("/api/rollouts", "Content-Length: 1000000000\r\nExpect: 100-continue\r\n")).await;
    assert!(asking.hears_the_end().await.starts_with("HTTP/1.1 413"));
}

#[tokio::test]
async fn a_client_that_does_not_read_its_answer_loses_its_connection() {
    let mut config = quick();
    config.limits.write_timeout_seconds = 0.3;
    let scene = Scene::with(config).await;
    let size = 30_000_000;
    scene.post("/api/rollouts", json!([{"rollout_id": "large", "input": "x".repeat(size)}])).await;
    let mut client = Client::of(&scene).await;
    client.says(&format!("GET /api/rollouts/large HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n")).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let heard = client.hears_the_end().await;
    assert!(heard.starts_with("HTTP/1.1 200") && heard.len() < size, "{} bytes", heard.len());
}

/// One call at a time.
fn narrow() -> GatewayConfig {
    let mut config = quick();
    config.limits.max_inflight_calls = 1;
    config
}

#[tokio::test]
async fn a_client_that_does_not_read_its_answer_holds_no_call_up() {
    let scene = Scene::with(narrow()).await;
    scene.enqueue("r").await;
    let mut large = completion(&[1, 2], &[7]);
    large["choices"][0]["message"]["content"] = "x".repeat(30_000_000).into();
    scene.upstream.will(Reply::json(200, &large));
    let mut client = Client::of(&scene).await;
    client.says(&post(&chat_path("r", "train"), "Content-Length: 2\r\n")).await;
    client.says("{}").await;
    scene.upstream.was_asked(1).await;
    assert_eq!(scene.call("r", json!({"messages": [2]})).await.status, 200);
}

#[tokio::test]
async fn a_call_beyond_the_limit_waits_for_its_turn() {
    let scene = Scene::with(narrow()).await;
    scene.enqueue("r").await;
    scene.upstream.will(Reply::json(200, &completion(&[1], &[2])).waiting());
    let (first, second, ()) = tokio::join!(
        scene.call("r", json!({"messages": [1]})),
        async {
            scene.upstream.was_asked(1).await;
            scene.call("r", json!({"messages": [2]})).await
        },
        async {
            let waits = async || scene.get("/proxy/state").await.json()["waiting"] == 1;
            until("the second call waits", waits).await;
            let state = scene.get("/proxy/state").await.json();
            assert_eq!((&state["inflight"], scene.upstream.asked().len()), (&json!(1), 1));
            assert!(scene.get("/metrics").await.text.contains("agl_gateway_waiting 1"));
            scene.upstream.release();
        }
    );
    assert_eq!((first.status, second.status), (200, 200));
    assert_eq!(scene.get("/proxy/state").await.json()["waiting"], 0);
}

#[tokio::test]
async fn a_call_that_gets_no_turn_is_429_and_recorded_and_a_pause_does_not_wait_for_it() {
    let mut config = narrow();
    config.hold.max_seconds = 0.4;
    let scene = Scene::with(config).await;
    scene.enqueue("r").await;
    scene.upstream.will(Reply::json(200, &completion(&[1], &[2])).waiting());
    let (first, ()) = tokio::join!(scene.call("r", json!({"messages": [1]})), async {
        scene.upstream.was_asked(1).await;
        let began = Instant::now();
        let refused = scene.call("r", json!({"messages": [2]})).await;
        assert_eq!((refused.status, refused.header("retry-after")), (429, Some("5")));
        assert!(began.elapsed() >= Duration::from_millis(400), "it waited first");
        assert_eq!(refused.header("x-agl-paused"), None);
        scene.upstream.release();
    });
    assert_eq!(first.status, 200);
    let events = scene.events("r").await;
    let statuses: Vec<&Value> = events.iter().map(|event| &event["data"]["http_status"]).collect();
    assert_eq!(statuses, [&json!(429), &json!(200)], "the gateway's failures are not the agent's");
}

#[tokio::test]
async fn a_rollout_has_so_many_events_and_no_more_but_always_its_reward() {
    let mut config = quick();
    config.limits.max_events_per_rollout = 3;
    let mut scene = Scene::with(config).await;
    scene.enqueue("r").await;
    scene.enqueue("s").await;
    let attempt = scene.post("/api/rollouts/r/attempts", json!({})).await.json();
    let key = |name: &str| attempt[name].as_str().unwrap().to_owned();
    let (agent, reward) = (key("key"), key("reward_key"));
    let events = "/api/rollouts/r/attempt/0/events";
    let note = json!({"event_type": "note"});
    let judged = json!({"event_type": "reward", "data": {"value": 1}});
    assert_eq!(scene.call("r", json!({"messages": [1]})).await.status, 200);
    for _ in 0..2 {
        assert_eq!(scene.send(Method::POST, events, &agent, Some(&note)).await.status, 200);
    }
    for round in ["before", "after"] {
        let refused = scene.send(Method::POST, events, &agent, Some(&note)).await;
        assert_eq!(refused.status, 403, "{round} a restart");
        assert!(refused.detail().contains("`limits.max_events_per_rollout`"), "{}", refused.text);
        assert_eq!(scene.send(Method::POST, events, &agent, Some(&judged)).await.status, 403);
        assert_eq!(scene.call("r", json!({"messages": [2]})).await.status, 403);
        assert_eq!(scene.call("s", json!({"messages": [round]})).await.status, 200, "another rollout is not meant");
        assert_eq!(scene.send(Method::POST, events, &reward, Some(&judged)).await.status, 200);
        scene.restart().await;
    }
    assert_eq!(scene.sequences("r").await["reward"], 1.0);
}
