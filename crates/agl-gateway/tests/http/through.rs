//! Servers whose streams are passed on: the words arrive while the server still speaks, and what is recorded is exact.

use agl_gateway::GatewayConfig;
use agl_mock_llm::{Answer, Fault, FaultRule, MockLlm, Script, ToolCall, WhenDone};
use reqwest::Response;
use serde_json::{Value, json};

use crate::scene::{KEY, MODEL, Scene, chat_path, quick, until};

/// The same server twice: with its streams passed on, and as [`WHOLE`] with streams that are cut from its whole answers.
struct Stage {
    scene: Scene,
    model: MockLlm,
}

const WHOLE: &str = "whole";

impl Stage {
    async fn start() -> Self {
        Self::with(quick()).await
    }

    /// For harnesses that come back.
    async fn with_patience() -> Self {
        Self::with(GatewayConfig { hangup_grace_seconds: 20.0, ..quick() }).await
    }

    async fn with(mut config: GatewayConfig) -> Self {
        let call = ToolCall { name: "mul".to_owned(), arguments: json!(r#"{"a":6,  "b":7.0}"#) };
        let text = "<think>Six times seven.</think>Let me see: é.".to_owned();
        let answers = vec![Answer::Tools { text, tool_calls: vec![call] }];
        let model = MockLlm::start(Script { answers, when_done: WhenDone::Cycle, ..Script::default() }).await.unwrap();
        config.default_proxy.override_model = false;
        let scene = Scene::without_model(config).await;
        let endpoint = model.endpoint();
        let through = json!({"model": MODEL, "endpoint": endpoint, "kind": "vllm", "version": 3, "stream": "through"});
        scene.register(json!([through, {"model": WHOLE, "endpoint": endpoint, "trainable": true}])).await;
        scene.enqueue("r").await;
        Self { scene, model }
    }

    async fn ask(&self, path: &str, body: &Value) -> Listener {
        let request = self.scene.http.post(format!("{}{path}", self.scene.url)).bearer_auth(KEY);
        Listener::of(request.body(body.to_string()).send().await.unwrap())
    }

    async fn last_call(&self) -> Value {
        self.scene.events("r").await.pop().unwrap()["data"].clone()
    }
}

/// Hears a stream piece by piece.
struct Listener {
    response: Response,
    heard: Vec<u8>,
}

impl Listener {
    fn of(response: Response) -> Self {
        assert_eq!(response.status(), 200);
        Self { response, heard: Vec::new() }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.heard).into_owned()
    }

    /// Reads until that is among what was heard.
    async fn hears(&mut self, words: &str) {
        while !self.text().contains(words) {
            let piece = tokio::time::timeout(std::time::Duration::from_secs(20), self.response.chunk()).await;
            let piece = piece.expect("it says no more").unwrap();
            self.heard.extend(piece.unwrap_or_else(|| panic!("{words:?} is not in {}", self.text())));
        }
    }

    async fn rest(mut self) -> String {
        while let Some(piece) = self.response.chunk().await.unwrap() {
            self.heard.extend(piece);
        }
        self.text()
    }
}

/// A dialect: where it is spoken, a question in it, and what its model's answer ends with.
struct Spoken {
    path: String,
    body: Value,
    last: &'static str,
    /// How it says that an answer broke off.
    failure: &'static str,
}

fn dialects(model: &str) -> Vec<Spoken> {
    let at = |path: &str| format!("/proxy/rollout/r/attempt/0/mode/train/{path}");
    let user = json!([{"role": "user", "content": "q"}]);
    let mul = json!({"name": "mul", "parameters": {"type": "object"}});
    let gemini = |rest: &str, last, failure| Spoken {
        path: at(&format!("gemini/v1beta/models/{model}:streamGenerateContent{rest}")),
        body: json!({"contents": [{"role": "user", "parts": [{"text": "q"}]}], "tools": [{"functionDeclarations": [mul]}]}),
        last,
        failure,
    };
    vec![
        Spoken {
            path: chat_path("r", "train"),
            body: json!({"model": model, "messages": user, "stream": true, "stream_options": {"include_usage": true}}),
            last: "data: [DONE]\n\n",
            failure: r#"data: {"error":"#,
        },
        Spoken {
            path: at("openai/v1/responses"),
            body: json!({"model": model, "input": "q", "stream": true, "tools": [{"type": "function", "name": "mul", "parameters": {}}]}),
            last: "response.completed",
            failure: "event: error",
        },
        Spoken {
            path: at("anthropic/v1/messages"),
            body: json!({"model": model, "max_tokens": 900, "messages": user, "stream": true,
                         "tools": [{"name": "mul", "input_schema": {"type": "object"}}]}),
            last: "message_stop",
            failure: "event: error",
        },
        gemini("?alt=sse", "finishReason", r#"data: {"error":"#),
        gemini("", "finishReason", r#"{"error":"#),
    ]
}

#[tokio::test]
async fn words_arrive_while_the_server_still_speaks_and_the_last_ones_after_the_call_is_recorded() {
    let stage = Stage::start().await;
    for (number, spoken) in dialects(MODEL).into_iter().enumerate() {
        stage.model.hold_streams(true);
        let mut listener = stage.ask(&spoken.path, &spoken.body).await;
        listener.hears("Six").await;
        assert_eq!(stage.model.in_flight(), 1, "{}: the server has not finished", spoken.path);
        assert_eq!(stage.scene.events("r").await.len(), number, "{}: nor is anything recorded", spoken.path);
        stage.model.hold_streams(false);
        listener.hears(spoken.last).await;
        assert_eq!(stage.scene.events("r").await.len(), number + 1, "{}: now it is", spoken.path);
        let call = stage.last_call().await;
        assert_eq!((&call["status"], &call["stream"], &call["delivered"]), (&json!("ok"), &json!(true), &json!(true)));
        assert_eq!(call["request"]["stream_options"], json!({"include_usage": true}));
        listener.rest().await;
    }
    let counts = stage.scene.sequences("r").await["counts"].clone();
    assert_eq!((&counts["calls"], &counts["live"], &counts["without_token_ids"]), (&json!(5), &json!(5), &json!(0)));
}

#[tokio::test]
async fn what_is_recorded_is_what_the_server_would_have_answered_whole() {
    let stage = Stage::start().await;
    let body = json!({"messages": [{"role": "user", "content": "q"}], "n": 2});
    let mut asked = body.clone();
    asked["stream"] = json!(true);
    asked["model"] = json!(MODEL);
    stage.ask(&chat_path("r", "train"), &asked).await.rest().await;
    let mut direct = body;
    direct["return_token_ids"] = json!(true);
    direct["logprobs"] = json!(true);
    let whole: Value = stage
        .scene
        .http
        .post(format!("{}/chat/completions", stage.model.endpoint()))
        .json(&direct)
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    let recorded = stage.last_call().await["response"].clone();
    assert_eq!(recorded["prompt_token_ids"], whole["prompt_token_ids"]);
    assert_eq!(recorded["usage"], whole["usage"]);
    for choice in 0..2 {
        let (one, other) = (&recorded["choices"][choice], &whole["choices"][choice]);
        for key in ["token_ids", "logprobs", "finish_reason"] {
            assert_eq!(one[key], other[key], "{key}");
        }
        for key in ["content", "reasoning_content"] {
            assert_eq!(one["message"][key], other["message"][key], "{key}");
        }
        assert_eq!(one["message"]["tool_calls"][0]["function"], other["message"]["tool_calls"][0]["function"]);
    }
    assert_eq!(stage.scene.sequences("r").await["counts"]["live"], 2);
}

/// The data of events, or of a list.
fn told(text: &str) -> Vec<Value> {
    if text.starts_with('[') {
        return serde_json::from_str(text).unwrap();
    }
    let data = text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    data.map(|data| serde_json::from_str(data).unwrap()).collect()
}

/// The order of the events by type, with pieces of one thing as one.
fn order(events: &[Value]) -> Vec<String> {
    let mut names: Vec<String> =
        events.iter().map(|event| event["type"].as_str().unwrap_or_default().to_owned()).collect();
    names.dedup();
    names
}

/// All texts at `pointer`, one after the other.
fn said(events: &[Value], pointer: &str) -> String {
    events.iter().filter_map(|event| event.pointer(pointer)?.as_str()).collect()
}

#[tokio::test]
async fn every_dialect_says_in_pieces_what_it_would_say_whole() {
    let stage = Stage::start().await;
    for (live, whole) in dialects(MODEL).into_iter().zip(dialects(WHOLE)) {
        let live_text = stage.ask(&live.path, &live.body).await.rest().await;
        let whole_text = stage.ask(&whole.path, &whole.body).await.rest().await;
        let (pieces, whole) = (told(&live_text), told(&whole_text));
        assert!(pieces.len() > whole.len() || whole.len() == 1, "{live_text}");
        assert_eq!(order(&pieces), order(&whole), "{}", live.path);
        for pointer in [
            "/choices/0/delta/content",
            "/choices/0/delta/reasoning_content",
            "/choices/0/delta/tool_calls/0/function/arguments",
            "/delta/text",
            "/delta/thinking",
            "/delta/partial_json",
            "/delta/signature",
            "/delta/stop_reason",
            "/delta",
            "/text",
            "/arguments",
            "/response/status",
            "/content_block/name",
        ] {
            assert_eq!(said(&pieces, pointer), said(&whole, pointer), "{} {pointer}", live.path);
        }
        let usage = |events: &[Value]| {
            let found = |key: &str| events.iter().rev().map(|event| event[key].clone()).find(Value::is_object);
            found("usage").or_else(|| found("usageMetadata"))
        };
        assert_eq!(usage(&pieces), usage(&whole), "{}", live.path);
        if live.path.contains("responses") {
            let numbers: Vec<u64> = pieces.iter().filter_map(|event| event["sequence_number"].as_u64()).collect();
            assert_eq!(numbers, (0..pieces.len() as u64).collect::<Vec<_>>());
            let output = |events: &[Value]| events.last().unwrap()["response"]["output"].clone();
            let (pieces, whole) = (output(&pieces), output(&whole));
            assert_eq!(pieces.as_array().unwrap().len(), 3);
            for (one, other) in pieces.as_array().unwrap().iter().zip(whole.as_array().unwrap()) {
                for key in ["type", "status", "content", "name", "arguments"] {
                    assert_eq!(one[key], other[key], "{key}");
                }
            }
        }
        if live.path.contains("gemini") {
            let parts = |events: &[Value], thought: bool| -> String {
                let parts =
                    events.iter().flat_map(|event| event["candidates"][0]["content"]["parts"].as_array().unwrap());
                parts
                    .filter(|part| part["thought"].as_bool().unwrap_or(false) == thought)
                    .filter_map(|part| part["text"].as_str())
                    .collect()
            };
            assert_eq!(parts(&pieces, true), parts(&whole, true));
            assert_eq!(parts(&pieces, false), parts(&whole, false));
            let call = &pieces.last().unwrap()["candidates"][0]["content"]["parts"][0]["functionCall"];
            assert_eq!((&call["name"], &call["args"]), (&json!("mul"), &json!({"a": 6, "b": 7.0})));
        }
    }
}

#[tokio::test]
async fn completions_stream_through_too() {
    let stage = Stage::start().await;
    let path = chat_path("r", "train").replace("chat/completions", "completions");
    let text = stage
        .ask(&path, &json!({"model": MODEL, "prompt": "2+2=", "stream": true, "max_tokens": 9}))
        .await
        .rest()
        .await;
    let chunks = told(&text);
    assert!(chunks.len() > 2 && text.ends_with("data: [DONE]\n\n"), "{text}");
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()), "nobody asked for it");
    let call = stage.last_call().await;
    let choice = &call["response"]["choices"][0];
    assert_eq!(choice["text"], said(&chunks, "/choices/0/text"));
    assert_eq!(
        (&choice["prompt_token_ids"], choice["token_ids"].as_array().unwrap().len()),
        (&json!([50, 43, 50, 61]), 9)
    );
    let row = stage.scene.sequences("r").await["sequences"][0].clone();
    assert_eq!(row["log_probs"].as_array().unwrap().len(), 4 + 9);
}

#[tokio::test]
async fn ids_that_are_not_as_many_as_were_sampled_are_not_recorded() {
    let stage = Stage::start().await;
    for (number, fault) in [Fault::LostIds, Fault::MissingIds].into_iter().enumerate() {
        stage.model.set_faults(vec![FaultRule::with_probability(fault, 1.0)]);
        let text = stage.ask(&chat_path("r", "train"), &dialects(MODEL)[0].body).await.rest().await;
        assert!(text.ends_with("data: [DONE]\n\n"), "the harness has its answer");
        let counts = stage.scene.sequences("r").await["counts"].clone();
        assert_eq!((&counts["without_token_ids"], &counts["live"]), (&json!(number + 1), &json!(0)));
    }
}

#[tokio::test]
async fn a_stream_that_breaks_ends_with_an_error_in_the_dialects_form_and_is_not_tried_again() {
    let stage = Stage::start().await;
    for (number, spoken) in dialects(MODEL).into_iter().enumerate() {
        stage.model.set_faults(vec![FaultRule::with_probability(Fault::Truncated, 1.0)]);
        let text = stage.ask(&spoken.path, &spoken.body).await.rest().await;
        assert!(text.contains("Six") && text.contains(spoken.failure) && !text.contains(spoken.last), "{text}");
        if text.starts_with('[') {
            assert!(serde_json::from_str::<Value>(&text).is_ok(), "{text}");
        }
        assert_eq!(stage.model.received(), number as u64 + 1, "what was told cannot be told anew");
        let call = stage.last_call().await;
        assert_eq!((&call["status"], &call["http_status"]), (&json!("error"), &json!(502)));
    }
    assert_eq!(stage.scene.sequences("r").await["counts"]["failed"], 5);
}

#[tokio::test]
async fn what_fails_before_its_first_word_is_tried_again() {
    let stage = Stage::start().await;
    stage.model.set_faults(vec![
        FaultRule::at(Fault::Status { status: 503, retry_after: None }, [0]),
        FaultRule::at(Fault::Reset, [1]),
    ]);
    let text = stage.ask(&chat_path("r", "train"), &dialects(MODEL)[0].body).await.rest().await;
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let call = stage.last_call().await;
    assert_eq!((&call["retry_count"], &call["status"]), (&json!(2), &json!("ok")));
    stage.model.set_faults(vec![FaultRule::with_probability(Fault::Status { status: 400, retry_after: None }, 1.0)]);
    let refused = stage.scene.call("r", dialects(MODEL)[0].body.clone()).await;
    assert_eq!(refused.status, 400, "an error before the first word keeps its status");
}

#[tokio::test]
async fn a_retry_in_the_middle_hears_the_answer_from_its_beginning() {
    let mut stage = Stage::with_patience().await;
    stage.model.hold_streams(true);
    let spoken = dialects(MODEL).remove(0);
    let mut listener = stage.ask(&spoken.path, &spoken.body).await;
    listener.hears("Six").await;
    drop(listener);
    let request = stage.scene.http.post(format!("{}{}", stage.scene.url, spoken.path)).bearer_auth(KEY);
    let again = request.header("x-stainless-retry-count", "1").body(spoken.body.to_string()).send().await.unwrap();
    let mut again = Listener::of(again);
    again.hears("Six").await;
    stage.model.hold_streams(false);
    let text = again.rest().await;
    assert_eq!(said(&told(&text), "/choices/0/delta/reasoning_content"), "Six times seven.");
    assert_eq!((stage.model.received(), stage.scene.events("r").await.len()), (1, 1), "nothing was sampled again");
    let counts = stage.scene.sequences("r").await["counts"].clone();
    assert_eq!((&counts["live"], &counts["undelivered"]), (&json!(1), &json!(0)));
    stage.scene.restart().await;
    let counts = stage.scene.sequences("r").await["counts"].clone();
    assert_eq!(counts["live"], 1, "and it is on disk");
}

#[tokio::test]
async fn a_harness_that_hangs_up_for_good_ends_the_servers_stream_after_the_grace() {
    let stage = Stage::start().await;
    stage.model.hold_streams(true);
    let spoken = dialects(MODEL).remove(0);
    let mut listener = stage.ask(&spoken.path, &spoken.body).await;
    listener.hears("Six").await;
    drop(listener);
    until("the call is given up", async || stage.scene.events("r").await.len() == 1).await;
    assert_eq!(stage.last_call().await["http_status"], 499);
    until("the server is rid of it", async || stage.model.in_flight() == 0).await;
}

#[tokio::test]
async fn an_answer_that_came_while_nobody_listened_is_given_to_the_next_who_asks() {
    let stage = Stage::with_patience().await;
    stage.model.hold_streams(true);
    let spoken = dialects(MODEL).remove(0);
    let mut listener = stage.ask(&spoken.path, &spoken.body).await;
    listener.hears("Six").await;
    drop(listener);
    // Nothing tells when the gateway has noticed; it takes well under a millisecond on an idle machine.
    tokio::time::sleep(std::time::Duration::from_millis(250)).await;
    stage.model.hold_streams(false);
    until("the call is recorded", async || stage.scene.events("r").await.len() == 1).await;
    assert_eq!(stage.scene.sequences("r").await["counts"]["undelivered"], 1);
    let text = stage.ask(&spoken.path, &spoken.body).await.rest().await;
    assert_eq!(said(&told(&text), "/choices/0/delta/reasoning_content"), "Six times seven.");
    assert_eq!(stage.model.received(), 1);
    assert_eq!(stage.scene.sequences("r").await["counts"]["live"], 1);
}

#[tokio::test]
async fn only_servers_that_stream_whole_answers_can_be_registered_so() {
    let scene = Scene::without_model(quick()).await;
    let register = async |kind: &str, stream: &str| {
        let model = json!({"model": "m", "endpoint": "http://localhost:1/v1", "kind": kind, "stream": stream});
        scene.post("/api/models", json!([model])).await
    };
    assert_eq!(register("vllm", "through").await.status, 201);
    assert_eq!(register("llamacpp", "synthesise").await.status, 201);
    for (kind, stream, expected) in [
        ("llamacpp", "through", "lose tokens"),
        ("agl", "through", "lose tokens"),
        ("vllm", "yes", "synthesise or through"),
    ] {
        let refused = register(kind, stream).await;
        assert_eq!(refused.status, 422);
        assert!(refused.text.contains(expected) && refused.text.contains("stream"), "{}", refused.text);
    }
}
