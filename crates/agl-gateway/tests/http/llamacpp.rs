//! llama.cpp's server: asked in its own words, and its answers recorded with exact ids, or with none.

use agl_mock_llm::{Answer, Fault, FaultRule, MockLlm, Script, Select, Shape, ToolCall};
use serde_json::{Value, json};

use crate::scene::{MODEL, Scene, chat_path, quick};

struct Stage {
    scene: Scene,
    model: MockLlm,
}

impl Stage {
    async fn start(script: Script) -> Self {
        let model = MockLlm::start(Script { shape: Shape::LlamaCpp, ..script }).await.unwrap();
        let scene = Scene::without_model(quick()).await;
        scene.register(json!([{"model": MODEL, "endpoint": model.endpoint(), "kind": "llama.cpp"}])).await;
        scene.enqueue("r").await;
        Self { scene, model }
    }

    async fn chat(&self, body: Value) -> Value {
        let answer = self.scene.call("r", body).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.json()
    }

    async fn counts(&self) -> Value {
        self.scene.sequences("r").await["counts"].clone()
    }

    fn fail_with(&self, fault: Fault) {
        self.model.set_faults(vec![FaultRule::with_probability(fault, 1.0)]);
    }
}

fn user(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}]})
}

#[tokio::test]
async fn turns_with_a_tool_between_them_have_exact_ids_and_are_one_row() {
    let call = ToolCall { name: "mul".to_owned(), arguments: json!(r#"{"a":6,  "b": 7}"#) };
    let answers = vec![Answer::Tools { text: String::new(), tool_calls: vec![call] }, Answer::Text("42".to_owned())];
    let stage = Stage::start(Script { answers, select: Select::Turn, ..Script::default() }).await;
    let mut body = user("6 times 7?");
    let first = stage.chat(body.clone()).await;
    assert_eq!(first.get("__verbose"), None, "what was asked for our sake is no business of the harness");

    let sent = stage.model.requests().remove(0).body;
    let asked = |key: &str| sent[key].clone();
    assert_eq!((asked("return_tokens"), asked("verbose"), asked("logprobs")), (json!(true), json!(true), json!(true)));
    assert_eq!(
        (asked("top_k"), asked("top_p"), asked("min_p")),
        (json!(0), json!(1), json!(0)),
        "the whole distribution"
    );
    assert_eq!(sent.get("return_token_ids"), None);

    let message = first["choices"][0]["message"].clone();
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(message.clone());
    messages.push(json!({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}));
    let second = stage.chat(body).await;

    let ids = |value: &Value| serde_json::from_value::<Vec<u32>>(value.clone()).unwrap();
    let mut path = ids(&second["prompt_token_ids"]);
    path.extend(ids(&second["choices"][0]["token_ids"]));
    let sequences = stage.scene.sequences("r").await;
    assert_eq!((&sequences["counts"]["live"], &sequences["counts"]["breaks"]), (&json!(2), &json!(0)));
    assert_eq!(sequences["sequences"].as_array().unwrap().len(), 1);
    assert_eq!(ids(&sequences["sequences"][0]["token_ids"]), path);
    assert_eq!(sequences["sequences"][0]["log_probs"].as_array().unwrap().len(), path.len());
}

#[tokio::test]
async fn what_the_harness_says_of_its_sampling_stays() {
    let stage = Stage::start(Script::default()).await;
    let mut body = user("q");
    body["top_k"] = json!(5);
    stage.chat(body).await;
    let sent = stage.model.requests().remove(0).body;
    assert_eq!((&sent["top_k"], &sent["min_p"]), (&json!(5), &json!(0)));
    let validation = stage.scene.post(&chat_path("r", "val"), user("q")).await;
    assert_eq!(validation.status, 200);
    assert_eq!(stage.model.requests()[1].body.get("top_k"), None);
}

#[tokio::test]
async fn several_choices_are_asked_for_one_by_one_because_it_tells_the_tokens_of_one() {
    let stage = Stage::start(Script::texts(["one", "two", "three"])).await;
    let mut body = user("q");
    body["n"] = json!(3);
    body["seed"] = json!(5);
    let answer = stage.chat(body).await;
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (index, choice) in choices.iter().enumerate() {
        let text = choice["message"]["content"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(choice["token_ids"].clone()).unwrap();
        assert_eq!((choice["index"].as_u64(), ids.len()), (Some(index as u64), text.len() + 1), "its end included");
    }
    assert_eq!(answer["usage"]["completion_tokens"], "onetwothree".len() + 3);
    let mut seeds: Vec<u64> = stage.model.requests().iter().map(|sent| sent.body["seed"].as_u64().unwrap()).collect();
    seeds.sort_unstable();
    assert_eq!(seeds, [5, 6, 7]);
    assert_eq!(stage.counts().await["live"], 3);
}

#[tokio::test]
async fn completions_take_texts_and_ids() {
    let stage = Stage::start(Script::texts(["abc"; 2])).await;
    let path = chat_path("r", "train").replace("chat/completions", "completions");
    for prompt in [json!("<|start|>q"), json!([256, 113])] {
        let answer = stage.scene.post(&path, json!({"prompt": prompt})).await.json();
        assert_eq!(answer["choices"][0]["prompt_token_ids"], json!([256, 113]));
        assert_eq!(answer["choices"][0]["token_ids"], json!([97, 98, 99, 257]));
    }
    assert_eq!(stage.counts().await["live"], 2);
}

#[tokio::test]
async fn an_answer_whose_ids_do_not_add_up_is_recorded_without_any_and_counted() {
    let stage = Stage::start(Script::default()).await;
    for (index, fault) in [Fault::LostIds, Fault::MissingIds].into_iter().enumerate() {
        stage.fail_with(fault);
        let answer = stage.chat(user(&format!("q{index}"))).await;
        assert_eq!(answer["choices"][0].get("token_ids"), None);
        assert_eq!(stage.counts().await["without_token_ids"], index + 1);
    }
    // Where a stop text or half a character ended it, log-probs are missing and ids are not.
    stage.fail_with(Fault::CountMismatch);
    stage.chat(user("q")).await;
    let sequences = stage.scene.sequences("r").await;
    assert_eq!((&sequences["counts"]["live"], &sequences["sequences"][0]["log_probs"]), (&json!(1), &Value::Null));
}

#[tokio::test]
async fn tokens_are_counted_with_its_template_and_errors_are_passed_on() {
    let stage = Stage::start(Script::default()).await;
    let path = "/proxy/rollout/r/attempt/0/mode/train/anthropic/v1/messages/count_tokens";
    let mut body = user("hello");
    body["max_tokens"] = json!(5);
    let counted = stage.scene.post(path, body).await;
    assert_eq!(counted.header("x-agl-estimated"), None);
    let prompt = stage.chat(user("hello")).await["usage"]["prompt_tokens"].clone();
    assert_eq!(counted.json()["input_tokens"], prompt);

    stage.fail_with(Fault::Status { status: 400, retry_after: None });
    let mut several = user("q");
    several["n"] = json!(2);
    assert_eq!(stage.scene.call("r", several).await.status, 400);
}
