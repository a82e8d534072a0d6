//! The mock server as a client sees it.
#![expect(clippy::unwrap_used, reason = "the lint exempts test functions, but not the functions that they share")]

use std::time::Duration;

use agl_mock_llm::{Answer, Fault, FaultRule, MockLlm, Script, Select, ToolCall, WhenDone, tokenizer};
use reqwest::{Client, Response};
use serde_json::{Value, json};

async fn post(server: &MockLlm, path: &str, body: &Value) -> reqwest::Result<Response> {
    Client::new().post(format!("{}/{path}", server.endpoint())).json(body).send().await
}

async fn chat(server: &MockLlm, messages: &Value) -> Value {
    let body = json!({"model": "policy", "messages": messages, "return_token_ids": true, "logprobs": true});
    post(server, "chat/completions", &body).await.unwrap().json().await.unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

#[tokio::test]
async fn a_chat_answer_has_vllms_shape() {
    let server = MockLlm::start(Script::texts(["four"])).await.unwrap();
    let answer = chat(&server, &user("2+2?")).await;
    let choice = &answer["choices"][0];
    let sampled = ids(&choice["token_ids"]);
    assert_eq!(choice["message"]["content"], "four");
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(tokenizer::decode(&sampled), "four");
    assert_eq!(sampled.last(), Some(&tokenizer::MESSAGE_END));
    assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), sampled.len());
    assert!(choice["logprobs"]["content"][0]["logprob"].as_f64().unwrap() < 0.0);
    assert_eq!(answer["usage"]["prompt_tokens"], ids(&answer["prompt_token_ids"]).len());
    assert_eq!(answer["usage"]["completion_tokens"], sampled.len());
    assert!(answer.get("policy_version").is_none());
}

#[tokio::test]
async fn ids_and_log_probs_come_only_to_those_who_ask() {
    let server = MockLlm::start(Script::default()).await.unwrap();
    let body = json!({"messages": user("hi")});
    let answer: Value = post(&server, "chat/completions", &body).await.unwrap().json().await.unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "hi");
    assert!(answer["prompt_token_ids"].is_null());
    assert!(answer["choices"][0]["token_ids"].is_null());
    assert!(answer["choices"][0]["logprobs"].is_null());
}

#[tokio::test]
async fn a_script_can_keep_its_tool_calls_for_those_who_offer_the_tool() {
    let call = ToolCall { name: "calculator".into(), arguments: json!({}) };
    let answers = vec![Answer::Tools { text: String::new(), tool_calls: vec![call] }, Answer::Text("a title".into())];
    let script = Script { answers, select: Select::Turn, only_offered_tools: true, ..Script::default() };
    let server = MockLlm::start(script).await.unwrap();
    let untitled = chat(&server, &user("Name this conversation.")).await;
    assert_eq!(untitled["choices"][0]["message"]["content"], "a title");
    let tools = json!([{"type": "function", "function": {"name": "calculator"}}]);
    let body = json!({"messages": user("2+2?"), "tools": tools});
    let answer: Value = post(&server, "chat/completions", &body).await.unwrap().json().await.unwrap();
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn turns_whose_history_comes_back_unchanged_satisfy_the_prefix_condition() {
    let call = ToolCall { name: "calculator".into(), arguments: json!({"expression": "2+2"}) };
    let answers = vec![Answer::Tools { text: String::new(), tool_calls: vec![call] }, Answer::Text("4".into())];
    let server = MockLlm::start(Script { answers, select: Select::Turn, ..Script::default() }).await.unwrap();
    let mut messages = user("2+2?");
    let first = chat(&server, &messages).await;
    let message = &first["choices"][0]["message"];
    assert_eq!(first["choices"][0]["finish_reason"], "tool_calls");
    let arguments: Value =
        serde_json::from_str(message["tool_calls"][0]["function"]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"expression": "2+2"}));
    let list = messages.as_array_mut().unwrap();
    list.push(message.clone());
    list.push(json!({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}));
    let second = chat(&server, &messages).await;
    let mut path = ids(&first["prompt_token_ids"]);
    path.extend(ids(&first["choices"][0]["token_ids"]));
    assert!(ids(&second["prompt_token_ids"]).starts_with(&path));
    assert_eq!(second["choices"][0]["message"]["content"], "4");
    // By turn: another conversation starts at the first answer.
    assert_eq!(chat(&server, &user("again")).await["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn completions_take_token_ids_and_give_one_log_prob_for_each_sampled_token() {
    let server = MockLlm::start(Script::texts(["abc", "xyz"])).await.unwrap();
    let body = json!({"prompt": [7, 8, 9], "n": 2, "max_tokens": 2, "logprobs": 1, "return_token_ids": true});
    let answer: Value = post(&server, "completions", &body).await.unwrap().json().await.unwrap();
    for (index, text) in ["ab", "xy"].iter().enumerate() {
        let choice = &answer["choices"][index];
        assert_eq!(choice["index"], index);
        assert_eq!(choice["text"], *text);
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(choice["prompt_token_ids"], json!([7, 8, 9]));
        assert_eq!(ids(&choice["token_ids"]), tokenizer::encode(text));
        assert_eq!(choice["logprobs"]["token_logprobs"].as_array().unwrap().len(), 2);
    }
}

#[tokio::test]
async fn after_its_last_answer_the_script_does_as_it_was_told() {
    for (when_done, expected) in [
        (WhenDone::Echo, json!("q")),
        (WhenDone::RepeatLast, json!("b")),
        (WhenDone::Cycle, json!("a")),
        (WhenDone::Fail, Value::Null),
    ] {
        let server = MockLlm::start(Script { when_done, ..Script::texts(["a", "b"]) }).await.unwrap();
        for _ in 0..2 {
            chat(&server, &user("q")).await;
        }
        let answer = chat(&server, &user("q")).await;
        assert_eq!(answer["choices"][0]["message"]["content"], expected, "{when_done:?}");
    }
}

#[tokio::test]
async fn each_fault_looks_as_it_does_in_the_wild() {
    let server = MockLlm::start(Script::default()).await.unwrap();
    let body = json!({"messages": user("hi"), "return_token_ids": true, "logprobs": true});
    let ask = async |fault: Fault| {
        server.set_faults(vec![FaultRule::with_probability(fault, 1.0)]);
        post(&server, "chat/completions", &body).await
    };
    let answer = ask(Fault::Status { status: 429, retry_after: Some(3) }).await.unwrap();
    assert_eq!((answer.status().as_u16(), answer.headers()["retry-after"].to_str().unwrap()), (429, "3"));

    let error = format!("{:?}", ask(Fault::Reset).await.unwrap_err());
    assert!(error.contains("ConnectionReset"), "{error}");

    let answer = ask(Fault::WrongJson).await.unwrap();
    assert_eq!(answer.status(), 200);
    assert!(serde_json::from_str::<Value>(&answer.text().await.unwrap()).is_err());

    let answer = ask(Fault::Truncated).await.unwrap();
    assert_eq!(answer.status(), 200);
    assert!(answer.bytes().await.is_err());

    let answer: Value = ask(Fault::MissingIds).await.unwrap().json().await.unwrap();
    assert!(answer["prompt_token_ids"].is_null() && answer["choices"][0]["token_ids"].is_null());
    assert!(answer["choices"][0]["logprobs"].is_object());

    let answer: Value = ask(Fault::MissingLogprobs).await.unwrap().json().await.unwrap();
    assert!(answer["choices"][0]["logprobs"].is_null() && answer["choices"][0]["token_ids"].is_array());

    let answer: Value = ask(Fault::CountMismatch).await.unwrap().json().await.unwrap();
    let choice = &answer["choices"][0];
    assert_eq!(
        choice["logprobs"]["content"].as_array().unwrap().len() + 1,
        choice["token_ids"].as_array().unwrap().len()
    );
    let started = std::time::Instant::now();
    assert_eq!(ask(Fault::Delay { seconds: 0.3 }).await.unwrap().status(), 200);
    assert!(started.elapsed() >= Duration::from_millis(300));
}

#[tokio::test]
async fn a_hanging_request_is_in_flight_until_its_client_gives_up() {
    let server = MockLlm::start(Script::default().with_fault(FaultRule::at(Fault::Hang, [0]))).await.unwrap();
    let body = json!({"messages": user("hi")});
    let hung = tokio::time::timeout(Duration::from_millis(200), post(&server, "chat/completions", &body)).await;
    assert!(hung.is_err());
    tokio::time::timeout(Duration::from_secs(5), async {
        while server.in_flight() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    assert_eq!(post(&server, "chat/completions", &body).await.unwrap().status(), 200);
}

#[tokio::test]
async fn faults_by_probability_strike_the_same_requests_for_the_same_seed() {
    let mut patterns = Vec::new();
    for seed in [1, 1, 2] {
        let rule = FaultRule::with_probability(Fault::Status { status: 500, retry_after: None }, 0.5);
        let server = MockLlm::start(Script { seed, ..Script::default() }.with_fault(rule)).await.unwrap();
        let mut pattern = Vec::new();
        for _ in 0..24 {
            pattern.push(post(&server, "chat/completions", &json!({"messages": user("hi")})).await.unwrap().status());
        }
        patterns.push(pattern);
    }
    assert_eq!(patterns[0], patterns[1]);
    assert_ne!(patterns[0], patterns[2]);
    let failed = patterns[0].iter().filter(|status| status.is_server_error()).count();
    assert!((4..=20).contains(&failed), "{failed} of 24");
}

#[tokio::test]
async fn faults_are_switched_and_requests_read_while_it_runs() {
    let server = MockLlm::start(Script::default()).await.unwrap();
    let root = format!("http://{}", server.address());
    let client = Client::new();
    let rules = json!([{"fault": {"kind": "status", "status": 503}, "probability": 1.0}]);
    assert!(client.post(format!("{root}/mock/faults")).json(&rules).send().await.unwrap().status().is_success());
    let body = json!({"messages": user("hi"), "temperature": 0.5});
    let answer = client.post(format!("{root}/v1/chat/completions")).bearer_auth("k").json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 503);
    client.post(format!("{root}/mock/faults")).json(&json!([])).send().await.unwrap();
    assert_eq!(post(&server, "chat/completions", &body).await.unwrap().status(), 200);
    let log: Value = client.get(format!("{root}/mock/requests")).send().await.unwrap().json().await.unwrap();
    assert_eq!(log["received"], 2);
    assert_eq!(log["requests"][0]["authorization"], "Bearer k");
    assert_eq!(log["requests"][0]["body"], body);
    assert_eq!(log["requests"][0]["fault"], json!({"kind": "status", "status": 503, "retry_after": null}));
    assert!(log["requests"][1]["fault"].is_null());
}
