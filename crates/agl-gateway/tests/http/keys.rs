//! Who may do what, over the whole router: without a key nothing, with an attempt's keys its own proxy and events.

use reqwest::Method;
use serde_json::{Value, json};

use crate::scene::{KEY, Scene, chat_path};

const DIALECTS: [&str; 11] = [
    "openai/v1/chat/completions",
    "openai/v1/completions",
    "openai/v1/responses",
    "anthropic/v1/messages",
    "anthropic/v1/messages/count_tokens",
    "gemini/v1beta/models/m:generateContent",
    "gemini/v1beta/models/m:streamGenerateContent",
    "gemini/v1beta/models/m:countTokens",
    "gemini/v1/models/m:generateContent",
    "gemini/v1/models/m:streamGenerateContent",
    "gemini/v1/models/m:countTokens",
];

fn proxy(rollout: &str, attempt: &str, mode: &str) -> Vec<(Method, String)> {
    let base = format!("/proxy/rollout/{rollout}/attempt/{attempt}/mode/{mode}");
    let named = DIALECTS.iter().flat_map(|path| {
        [format!("{base}/{path}"), format!("{base}/agent/other/{path}")].map(|path| (Method::POST, path))
    });
    let models = ["openai/v1/models", "anthropic/v1/models"].into_iter().flat_map(|path| {
        [format!("{base}/{path}"), format!("{base}/agent/other/{path}")].map(|path| (Method::GET, path))
    });
    named.chain(models).collect()
}

/// What needs no key.
fn open() -> Vec<(Method, String)> {
    let proxy = "/proxy/rollout/r/attempt/0/mode/train";
    let places = ["anthropic", "anthropic/", "agent/other/anthropic", "agent/other/anthropic/"];
    let there = places.map(|path| format!("{proxy}/{path}"));
    let watching = ["/healthz", "/readyz", "/openapi.json"].map(str::to_owned);
    watching.into_iter().chain(there).map(|path| (Method::GET, path)).collect()
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

/// True if a path of the document stands for this one.
fn stands_for(template: &str, path: &str) -> bool {
    let path = path.split('?').next().unwrap();
    let (mut wanted, mut found) = (template.split('/'), path.split('/'));
    loop {
        match (wanted.next(), found.next()) {
            (None, None) => return true,
            (Some(wanted), Some(found)) => {
                let verb = wanted.strip_prefix("{model}").filter(|verb| !verb.is_empty());
                let is_id = wanted.starts_with('{') && verb.is_none();
                if !(is_id || verb.map_or(wanted == found, |verb| found.ends_with(verb))) {
                    return false;
                }
            }
            _ => return false,
        }
    }
}

#[tokio::test]
async fn the_tables_of_this_test_are_what_the_document_says() {
    let scene = Scene::start().await;
    let document = scene.send(Method::GET, "/openapi.json", "", None).await.json();
    let of = |open: bool| -> Vec<(Method, String)> {
        let paths = document["paths"].as_object().unwrap().iter();
        let operations = paths.flat_map(|(path, item)| item.as_object().unwrap().iter().map(move |one| (path, one)));
        let wanted = operations.filter(|(_, (_, operation))| operation["security"].is_null() == open);
        wanted.map(|(path, (method, _))| (method.to_uppercase().parse().unwrap(), path.clone())).collect()
    };
    let mut closed = management();
    closed.push((Method::POST, "/api/rollouts/r/attempt/0/events".to_owned()));
    closed.extend(proxy("r", "0", "train"));
    for (documented, tried) in [(of(true), open()), (of(false), closed)] {
        for (method, template) in &documented {
            let is_tried = tried.iter().any(|(tried, path)| tried == method && stands_for(template, path));
            assert!(is_tried, "{method} {template} is not tried");
        }
        for (method, path) in &tried {
            let is_told = documented.iter().any(|(told, template)| told == method && stands_for(template, path));
            assert!(is_told, "{method} {path} is not in the document");
        }
    }
}

#[tokio::test]
async fn what_is_open_needs_no_key_and_everything_else_does() {
    let scene = Scene::start().await;
    let health = scene.send(Method::GET, "/healthz", "", None).await;
    assert_eq!((health.status, health.json()), (200, json!({"status": "ok"})));
    for (method, path) in open() {
        for key in ["", "wrong"] {
            assert_eq!(scene.send(method.clone(), &path, key, None).await.status, 200, "{method} {path}");
        }
    }
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
