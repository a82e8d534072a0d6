//! Who may do what, over the whole router: without a key nothing, with an attempt's keys its own proxy and events.

use reqwest::Method;
use serde_json::{Value, json};

use crate::scene::{KEY, Scene, chat_path};

const DIALECTS: [&str; 8] = [
    "openai/v1/chat/completions",
    "openai/v1/completions",
    "openai/v1/responses",
    "anthropic/v1/messages",
    "anthropic/v1/messages/count_tokens",
    "gemini/v1beta/models/m:generateContent",
    "gemini/v1beta/models/m:streamGenerateContent",
    "gemini/v1beta/models/m:countTokens",
];

fn proxy(rollout: &str, attempt: &str, mode: &str) -> Vec<(Method, String)> {
    let base = format!("/proxy/rollout/{rollout}/attempt/{attempt}/mode/{mode}");
    let named = DIALECTS.iter().flat_map(|path| {
        [format!("{base}/{path}"), format!("{base}/agent/other/{path}")].map(|path| (Method::POST, path))
    });
    let models = ["openai/v1/models", "anthropic/v1/models"].map(|path| (Method::GET, format!("{base}/{path}")));
    named.chain(models).collect()
}

/// Everything that only the server key opens.
fn management() -> Vec<(Method, String)> {
    let routes = [
        (Method::GET, "/api/rollouts?state_in=queuing"),
        (Method::POST, "/api/rollouts"),
        (Method::GET, "/api/rollouts/terminal"),
        (Method::GET, "/api/rollouts/watch"),
        (Method::POST, "/api/rollouts/consumed"),
        (Method::GET, "/api/rollouts/r"),
        (Method::PATCH, "/api/rollouts/r"),
        (Method::DELETE, "/api/rollouts/r"),
        (Method::POST, "/api/rollouts/r/cancel"),
        (Method::POST, "/api/rollouts/r/retry"),
        (Method::GET, "/api/rollouts/r/attempts"),
        (Method::POST, "/api/rollouts/r/attempts"),
        (Method::PATCH, "/api/rollouts/r/attempts/0"),
        (Method::GET, "/api/rollouts/r/events"),
        (Method::GET, "/api/rollouts/r/sequences"),
        (Method::GET, "/api/models"),
        (Method::POST, "/api/models"),
        (Method::DELETE, "/api/models"),
        (Method::POST, "/proxy/pause"),
        (Method::POST, "/proxy/resume"),
        (Method::GET, "/proxy/state"),
        (Method::GET, "/metrics"),
    ];
    routes.map(|(method, path)| (method, path.to_owned())).into()
}

#[tokio::test]
async fn health_needs_no_key_and_everything_else_does() {
    let scene = Scene::start().await;
    let health = scene.send(Method::GET, "/healthz", "", None).await;
    assert_eq!((health.status, health.json()), (200, json!({"status": "ok"})));
    let mut closed = management();
    closed.push((Method::POST, "/api/rollouts/r/attempt/0/events".to_owned()));
    closed.push((Method::POST, chat_path("r", "train")));
    for (method, path) in closed {
        for key in ["", "wrong"] {
            let answer = scene.send(method.clone(), &path, key, None).await;
            assert_eq!(answer.status, 401, "{method} {path}");
            assert_eq!(answer.json(), json!({"detail": "Invalid or missing API key"}));
        }
    }
}

#[tokio::test]
async fn an_attempts_keys_open_their_own_attempt_and_nothing_else() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.enqueue("s").await;
    scene.post("/api/rollouts/s/attempts", json!({})).await;
    let attempt = scene.post("/api/rollouts/r/attempts", json!({})).await.json();
    scene.post("/api/rollouts/r/attempts", json!({})).await;
    let key = |name: &str| attempt[name].as_str().unwrap().to_owned();
    let (agent, reward) = (key("key"), key("reward_key"));
    let body = json!({"messages": [], "input": "q", "contents": [], "event_type": "reward", "data": {"value": 1}});

    let mut closed = management();
    closed.extend(proxy("s", "0", "train"));
    closed.extend(proxy("r", "1", "train"));
    // Its own, in the mode that it is not of.
    closed.extend(proxy("r", "0", "val"));
    for (rollout, attempt) in [("s", "0"), ("r", "1")] {
        closed.push((Method::POST, format!("/api/rollouts/{rollout}/attempt/{attempt}/events")));
    }
    for key in [&agent, &reward, "", "wrong"] {
        for (method, path) in &closed {
            let answer = scene.send(method.clone(), path, key, Some(&body)).await;
            assert!(matches!(answer.status, 401 | 403), "{method} {path} with {key:?}: {}", answer.status);
        }
    }
    // The evaluator's key does not open the model either.
    for (method, path) in proxy("r", "0", "train") {
        let with = async |key: &str| scene.send(method.clone(), &path, key, Some(&body)).await.status;
        assert_eq!(with(&reward).await, 403, "{path}");
        assert!(!matches!(with(&agent).await, 401 | 403), "{path}");
    }
    assert!(scene.upstream.asked().len() >= 12, "the agent's own calls went through");
    let events: Value = scene.send(Method::GET, "/api/rollouts/s/events", KEY, None).await.json();
    assert_eq!(events, json!([]), "nothing was written where it should not be");
}
