//! What the fuzzers in `fuzz/` call: bytes from outside, put through the code that reads them. Each function asserts what must hold
//! whatever comes. Compiled for the fuzzers (feature `fuzzing`) and for the test that runs their seeds.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "whatever fails here is a finding")]

use std::cell::RefCell;
use std::sync::Arc;

use agl_core::trajectory::{CallOutcome, Delivery, Level, NewCall, TokenTree};
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde::de::IgnoredAny;
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::api;
use crate::app::App;
use crate::config::GatewayConfig;
use crate::dialect::{Detail, Dialect, Voice, gemini, messages, responses, sse};
use crate::proxy::answer;
use crate::proxy::request::{Mode, RequestBody};
use crate::proxy::routes::target;

const KEY: &str = "k";
/// What servers say: words, thoughts, tools, and several answers.
const ANSWERS: [&[u8]; 3] = [
    br#"{"id":"c","created":1,"model":"m","choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":"hi"}}]}"#,
    br#"{"choices":[{"finish_reason":"tool_calls","message":{"content":null,"reasoning_content":"hm","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"input\": \"x\"}"}}]}}],"usage":{"prompt_tokens":3}}"#,
    br#"{"choices":[{"finish_reason":"length","text":"a"},{"finish_reason":"stop","stop_reason":"END","text":"b"}]}"#,
];

/// The body of a call in any dialect: to chat completions, and the answer back. The first byte chooses the dialect.
pub fn request(data: &[u8]) {
    let Some((&kind, raw)) = data.split_first() else { return };
    let Some((mut body, voice)) = understood(kind, raw) else { return };
    let config = GatewayConfig::default();
    body.prepare(&target(&config, voice.model.as_deref(), None), Mode::Train, &config.default_proxy);
    let sent = body.to_bytes(&[("return_token_ids", true.into())]);
    let again = RequestBody::parse(&sent).expect("what is sent is a JSON object");
    assert_eq!(again.text("model").as_deref(), Some("policy"));
    assert!(again.is_truthy("return_token_ids"));
    assert_eq!(again.to_bytes(&[]), sent, "it reads back as what was sent");
    for answer in ANSWERS {
        assert!(is_told(&voice, answer), "an answer is always told");
    }
}

/// The answer of a server: its tokens into the tree of its attempt, its words into any dialect, which the first byte chooses.
pub fn answer(data: &[u8]) {
    let Some((&kind, raw)) = data.split_first() else { return };
    let read = answer::read(raw, 7);
    let mut tree = TokenTree::new();
    let mut sampled_tokens = 0;
    for (seq, choice) in (0..).zip(read.choices.iter().chain(&read.choices)) {
        let Some((prompt, sampled)) = &choice.ids else { continue };
        sampled_tokens += sampled.len();
        let call = NewCall {
            seq,
            call_id: seq.to_string(),
            choice: 0,
            prompt,
            sampled: sampled.clone(),
            log_probs: choice.log_probs.clone(),
            versions: choice.versions.clone(),
            delivery: Delivery::Delivered,
            outcome: CallOutcome::Ok,
            trainable: true,
        };
        tree.record(call).expect("log-probs and versions are parallel to the tokens");
        tree.continuation(seq).expect("it has just been recorded");
    }
    for level in [Level::Trajectory, Level::Transition] {
        let rows = tree.sequences(level).sequences;
        let trained: usize = rows.iter().map(agl_core::trajectory::Sequence::trained_tokens).sum();
        assert_eq!(trained, sampled_tokens, "every sampled token is trained once");
    }
    let question: &[u8] = match kind % KINDS {
        0 | 1 => br#"{"stream_options":{"include_usage":true}}"#,
        2 => br#"{"input":"q","stream":true,"include":["reasoning.encrypted_content"],"tools":[{"type":"custom","name":"f"}]}"#,
        3 => br#"{"input":"q"}"#,
        4 => br#"{"messages":[],"max_tokens":1,"stream":true}"#,
        5 => br#"{"messages":[],"max_tokens":1}"#,
        _ => br#"{"contents":[]}"#,
    };
    let (_, voice) = understood(kind, question).expect("these can be read");
    is_told(&voice, raw);
}

/// How many ways of asking [`understood`] knows.
const KINDS: u8 = 9;

fn understood(kind: u8, raw: &[u8]) -> Option<(RequestBody, Voice)> {
    let json = || serde_json::from_slice::<Value>(raw).ok();
    let kind = kind % KINDS;
    let translated = match kind {
        0 | 1 => {
            let body = RequestBody::parse(&Bytes::copy_from_slice(raw)).ok()?;
            let usage = body.is_true_in("stream_options", "include_usage");
            let detail = if usage { Detail::IncludeUsage } else { Detail::Nothing };
            let dialect = if kind == 0 { Dialect::Chat } else { Dialect::Completions };
            let voice = Voice { dialect, stream: true, model: body.text("model"), detail };
            return Some((body, voice));
        }
        2 | 3 => responses::request(json()?),
        4 | 5 => messages::request(json()?),
        _ => gemini::request(json()?, "m", kind > 6, kind > 7),
    };
    let translated = translated.ok()?;
    Some((RequestBody::of(&translated.chat), translated.voice))
}

/// Tells the answer if it is one. What is told must be readable.
fn is_told(voice: &Voice, answer: &[u8]) -> bool {
    let Some(told) = voice.tell(answer, "call-1") else { return false };
    let text = std::str::from_utf8(&told.body).expect("answers are UTF-8");
    let is_json = |text: &str| serde_json::from_str::<IgnoredAny>(text).is_ok();
    if told.content_type != sse::CONTENT_TYPE {
        assert!(is_json(text), "{text}");
        return true;
    }
    assert!(text.ends_with("\n\n"), "the last event is closed");
    for line in text.lines() {
        let readable = match line.split_once(": ") {
            Some(("data", data)) => data == "[DONE]" || is_json(data),
            Some((field, _)) => field == "event",
            None => line.is_empty(),
        };
        assert!(readable, "{line}");
    }
    true
}

/// Headers of a model call, a line each. Without the server key nothing opens.
pub fn headers(data: &[u8]) {
    let mut request = Request::new(Body::from("{}"));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = Uri::from_static("/proxy/rollout/r/attempt/0/mode/train/openai/v1/chat/completions");
    for line in data.split(|&byte| byte == b'\n') {
        let Some(colon) = line.iter().position(|&byte| byte == b':') else { continue };
        let (name, value) = (HeaderName::from_bytes(&line[..colon]), HeaderValue::from_bytes(&line[colon + 1..]));
        if let (Ok(name), Ok(value)) = (name, value) {
            request.headers_mut().append(name, value);
        }
    }
    let shown =
        ["authorization", "x-api-key", "x-goog-api-key"].iter().flat_map(|name| request.headers().get_all(*name));
    let may_be_right = shown.into_iter().any(|value| value.as_bytes().ends_with(KEY.as_bytes()));
    let status = sent(request).status();
    assert!(may_be_right || status == StatusCode::UNAUTHORIZED, "{status}");
}

/// A path with its query: rollout, attempt, mode, agent, model and verb. The first byte chooses the method.
pub fn path(data: &[u8]) {
    let Some((&method, path)) = data.split_first() else { return };
    let Ok(uri) = Uri::try_from(path) else { return };
    if !uri.path().starts_with('/') {
        return;
    }
    let mut request = Request::new(Body::from(r#"{"messages":[],"contents":[],"input":"q"}"#));
    *request.method_mut() = [Method::GET, Method::POST, Method::PATCH, Method::DELETE][usize::from(method % 4)].clone();
    *request.uri_mut() = uri;
    request.headers_mut().insert(header::AUTHORIZATION, HeaderValue::from_static("Bearer k"));
    let status = sent(request).status();
    assert!(!matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN), "the server key opens everything");
}

/// What is posted to the management interface. The first byte chooses where.
pub fn management(data: &[u8]) {
    const PLACES: [(&str, &str); 11] = [
        ("POST", "/api/rollouts"),
        ("PATCH", "/api/rollouts/r"),
        ("POST", "/api/rollouts/consumed"),
        ("POST", "/api/rollouts/r/attempts"),
        ("PATCH", "/api/rollouts/r/attempts/0"),
        ("POST", "/api/rollouts/r/attempt/0/events"),
        ("POST", "/api/models"),
        ("POST", "/proxy/pause"),
        ("POST", "/proxy/resume"),
        ("GET", "/api/rollouts/r/events"),
        ("GET", "/api/rollouts/r/sequences"),
    ];
    let Some((&place, body)) = data.split_first() else { return };
    let (method, path) = PLACES[usize::from(place) % PLACES.len()];
    let request = Request::builder().method(method).uri(path).header(header::AUTHORIZATION, "Bearer k");
    sent(request.body(Body::from(body.to_vec())).unwrap());
}

/// A gateway without sockets, on a store in memory with one rollout and one attempt.
struct Scene {
    runtime: Runtime,
    service: TowerToHyperService<axum::Router>,
    requests: u32,
}

/// What the requests leave behind must not pile up.
const REQUESTS_PER_SCENE: u32 = 256;

impl Scene {
    fn new() -> Self {
        let mut config = GatewayConfig { key: KEY.to_owned(), store: "memory".to_owned(), ..GatewayConfig::default() };
        config.no_model_wait_seconds = 0.0;
        config.hold.max_seconds = 0.0;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let app = runtime.block_on(App::open(config)).unwrap();
        let service = TowerToHyperService::new(api::router(Arc::clone(&app)));
        let scene = Self { runtime, service, requests: 0 };
        for (path, body) in [("/api/rollouts", r#"[{"rollout_id":"r","input":{}}]"#), ("/api/rollouts/r/attempts", "")]
        {
            let request = Request::post(path).header(header::AUTHORIZATION, "Bearer k");
            let made = scene.runtime.block_on(scene.service.call(request.body(Body::from(body)).unwrap())).unwrap();
            assert_eq!(made.status(), StatusCode::CREATED);
        }
        scene
    }
}

/// Sends the request. Nothing may fail inside, and what is refused is refused in JSON.
fn sent(request: Request) -> Response {
    thread_local! { static SCENE: RefCell<Option<Scene>> = const { RefCell::new(None) }; }
    SCENE.with_borrow_mut(|slot| {
        let scene = slot.take_if(|scene| scene.requests < REQUESTS_PER_SCENE);
        let scene = slot.insert(scene.unwrap_or_else(Scene::new));
        scene.requests += 1;
        let asked = format!("{} {}", request.method(), request.uri());
        let Scene { runtime, service, .. } = scene;
        runtime.block_on(async {
            let response = service.call(request).await.unwrap();
            let status = response.status();
            assert_ne!(status, StatusCode::INTERNAL_SERVER_ERROR, "{asked}");
            if status.as_u16() >= 400 {
                let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
                assert!(serde_json::from_slice::<Value>(&body).is_ok(), "{asked}: {status} {body:?}");
                return status.into_response();
            }
            response
        })
    })
}

#[cfg(test)]
mod tests {
    type Target = (&'static str, fn(&[u8]));

    #[test]
    fn the_seeds_of_the_fuzzers_pass() {
        let targets: [Target; 5] = [
            ("request", super::request),
            ("answer", super::answer),
            ("headers", super::headers),
            ("path", super::path),
            ("management", super::management),
        ];
        for (name, target) in targets {
            let seeds = format!("{}/../../fuzz/seeds/{name}", env!("CARGO_MANIFEST_DIR"));
            let mut count = 0;
            for seed in std::fs::read_dir(seeds).unwrap() {
                target(&std::fs::read(seed.unwrap().path()).unwrap());
                count += 1;
            }
            assert!(count >= 5, "{name} has {count} seeds");
        }
    }
}
