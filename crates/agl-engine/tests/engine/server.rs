//! The HTTP interface, over a real socket.

use std::net::SocketAddr;

use agl_engine::Engine;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::fixture::{engine, memorise};

/// Serves until the test's runtime ends.
async fn serve(engine: &Engine) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(agl_engine::server::serve(engine.clone(), listener, std::future::pending()));
    address
}

async fn post(address: SocketAddr, path: &str, body: impl Into<reqwest::Body>) -> (u16, Value) {
    let request = reqwest::Client::new().post(format!("http://{address}/v1/{path}"));
    let response = request.header("content-type", "application/json").body(body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

async fn ask(address: SocketAddr, path: &str, body: Value) -> Value {
    let (status, answer) = post(address, path, body.to_string()).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

async fn refused(address: SocketAddr, path: &str, body: Value) -> Value {
    let (status, answer) = post(address, path, body.to_string()).await;
    assert_eq!(status, 400, "{answer}");
    answer["error"].clone()
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}])
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[tokio::test]
async fn a_tool_call_comes_back_parsed_and_the_next_prompt_repeats_it_token_for_token() {
    let engine = engine("qwen3-untied");
    let mut messages = json!([{"role": "user", "content": "1+2?"}]);
    let render = |messages: &Value| {
        let text = engine
            .tokenizer()
            .apply_chat_template(messages.as_array().unwrap(), tools().as_array().map(Vec::as_slice), true)
            .unwrap();
        engine.tokenizer().encode(&text).unwrap()
    };
    let prompt = render(&messages);
    // The spacing is the model's own, not what a JSON library would write.
    let text = "Go.\n<tool_call>\n{\"name\": \"calculator\", \"arguments\": {\"expression\":\"1+2\" }}\n</tool_call><|im_end|>";
    let answer = engine.tokenizer().encode(text).unwrap();
    memorise(&engine, &prompt, &answer);
    let address = serve(&engine).await;
    let body = json!({
        "model": "policy", "messages": messages, "tools": tools(), "temperature": 0, "logprobs": true, "return_token_ids": true,
    });
    let response = ask(address, "chat/completions", body).await;
    let choice = &response["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Go.");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["function"], json!({"name": "calculator", "arguments": "{\"expression\":\"1+2\" }"}));
    assert_eq!(call["type"], "function");
    assert_eq!(ids(&response["prompt_token_ids"]), prompt);
    assert_eq!(ids(&choice["token_ids"]), answer);
    assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), answer.len());
    assert_eq!(choice["policy_versions"], json!(vec![0; answer.len()]));
    assert_eq!(response["usage"]["completion_tokens"], answer.len());

    messages.as_array_mut().unwrap().push(choice["message"].clone());
    messages.as_array_mut().unwrap().push(json!({"role": "tool", "tool_call_id": call["id"], "content": "3"}));
    let next = render(&messages);
    assert_eq!(next[..prompt.len() + answer.len()], [prompt, answer].concat());
}

#[tokio::test]
async fn the_tokens_of_a_prompt_are_told_without_an_answer() {
    let engine = engine("qwen3-untied");
    let address = serve(&engine).await;
    let tokenize = async |body: &Value| {
        let request = reqwest::Client::new().post(format!("http://{address}/tokenize")).body(body.to_string());
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    let mut conversation = json!({"messages": [{"role": "user", "content": "1+2?"}], "tools": tools()});
    let (status, told) = tokenize(&conversation).await;
    assert_eq!((status, engine.sampler_totals().sampled_tokens), (200, 0), "{told}");
    let without_tools = tokenize(&json!({"messages": conversation["messages"]})).await.1;
    assert!(without_tools["count"].as_u64() < told["count"].as_u64(), "the tools are a part of the prompt");

    conversation["return_token_ids"] = json!(true);
    conversation["max_tokens"] = json!(1);
    let answer = ask(address, "chat/completions", conversation).await;
    assert_eq!(told["tokens"], answer["prompt_token_ids"]);
    assert_eq!(
        (&told["count"], &told["max_model_len"]),
        (&answer["usage"]["prompt_tokens"], &json!(engine.max_model_len()))
    );
    let (status, refused) = tokenize(&json!({"messages": []})).await;
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("messages")));
}

#[tokio::test]
async fn without_tools_a_call_is_plain_text() {
    let engine = engine("qwen3-untied");
    let messages = json!([{"role": "user", "content": "?"}]);
    let text = engine.tokenizer().apply_chat_template(messages.as_array().unwrap(), None, true).unwrap();
    let prompt = engine.tokenizer().encode(&text).unwrap();
    let answer = engine.tokenizer().encode("<tool_call>{\"name\": \"a\"}</tool_call><|im_end|>").unwrap();
    memorise(&engine, &prompt, &answer);
    let address = serve(&engine).await;
    let body = json!({"messages": messages, "temperature": 0});
    let choice = ask(address, "chat/completions", body).await["choices"][0].clone();
    assert_eq!(choice["message"], json!({"role": "assistant", "content": "<tool_call>{\"name\": \"a\"}</tool_call>"}));
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice.get("token_ids"), None, "ids only where they are asked for");
    assert_eq!(choice["logprobs"], Value::Null);
}

#[tokio::test]
async fn chat_log_probs_have_the_shape_of_openai() {
    let address = serve(&engine("qwen3-tied")).await;
    let body = json!({
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        "seed": 1, "max_completion_tokens": 3, "ignore_eos": true, "logprobs": true, "top_logprobs": 2, "n": 2,
        "return_token_ids": true,
    });
    let response = ask(address, "chat/completions", body.clone()).await;
    let choices = response["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 2);
    assert_ne!(choices[0]["token_ids"], choices[1]["token_ids"], "choices differ");
    let again = ask(address, "chat/completions", body).await;
    assert_eq!(again["choices"][1]["token_ids"], choices[1]["token_ids"], "and can be repeated");
    let tokens = choices[0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 3);
    for token in tokens {
        assert!(token["token"].is_string() && token["logprob"].as_f64().unwrap() <= 0.0);
        let top = token["top_logprobs"].as_array().unwrap();
        assert!(top.len() == 2 && top[0]["logprob"].as_f64() >= top[1]["logprob"].as_f64());
    }
    assert_eq!(choices[0]["finish_reason"], "length");
}

#[tokio::test]
async fn completions_take_token_ids_and_return_them() {
    let engine = engine("qwen3-tied");
    let address = serve(&engine).await;
    let body = json!({
        "prompt": [[5, 6, 7], [8]], "n": 2, "seed": 3, "max_tokens": 4, "ignore_eos": true, "logprobs": 1, "return_token_ids": true,
    });
    let response = ask(address, "completions", body).await;
    let choices = response["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        assert_eq!(ids(&choice["prompt_token_ids"]), if index < 2 { vec![5, 6, 7] } else { vec![8] });
        let row = [ids(&choice["prompt_token_ids"]), ids(&choice["token_ids"])].concat();
        let prompt_len = row.len() - 4;
        let expected = engine.log_probs(&[row], 1.0).unwrap().remove(0);
        let reported: Vec<f32> = serde_json::from_value(choice["logprobs"]["token_logprobs"].clone()).unwrap();
        for (reported, expected) in reported.iter().zip(&expected[prompt_len..]) {
            assert!((reported - expected).abs() < 1e-4);
        }
        assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), 4);
    }
    let usage = json!({
        "prompt_tokens": 4, "completion_tokens": 16, "total_tokens": 20, "prompt_tokens_details": {"cached_tokens": 0},
    });
    assert_eq!(response["usage"], usage);
}

#[tokio::test]
async fn sampling_fields_are_those_of_openai_and_vllm() {
    let address = serve(&engine("qwen3-tied")).await;
    let ask_with = async |fields: Value| {
        let mut body = json!({
            "prompt": [5, 6, 7], "seed": 3, "max_tokens": 12, "ignore_eos": true, "logprobs": 1, "return_token_ids": true,
        });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        ask(address, "completions", body).await["choices"][0].clone()
    };
    let plain = ask_with(json!({})).await;
    let neutral = json!({
        "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "best_of": 1,
    });
    assert_eq!(ask_with(neutral).await["token_ids"], plain["token_ids"]);
    let forced = ask_with(json!({"logit_bias": {"9": 100}})).await;
    assert_eq!(ids(&forced["token_ids"]), [9; 12]);
    let recorded: Vec<f32> = serde_json::from_value(forced["logprobs"]["token_logprobs"].clone()).unwrap();
    assert!(recorded.iter().all(|log_prob| *log_prob < -0.1), "the policy itself is not sure of it: {recorded:?}");
    for changed in [json!({"repetition_penalty": 1e6}), json!({"min_p": 1})] {
        assert_ne!(ask_with(changed).await["token_ids"], plain["token_ids"]);
    }
    let never_twice = ids(&ask_with(json!({"repetition_penalty": 1e6})).await["token_ids"]);
    assert!(never_twice.iter().all(|id| never_twice.iter().filter(|other| *other == id).count() == 1));
}

#[tokio::test]
async fn usage_says_what_the_prefix_cache_had() {
    let address = serve(&engine("qwen3-tied")).await;
    let cached = async |body: &Value| {
        let path = if body.get("prompt").is_some() { "completions" } else { "chat/completions" };
        let usage = ask(address, path, body.clone()).await["usage"].clone();
        (usage["prompt_tokens"].as_u64().unwrap(), usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap())
    };
    let prompt: Vec<u32> = (0..40).collect();
    // A choice that follows its sibling does not make the prompt cached: it was processed for this call.
    let body = json!({"prompt": [prompt, [7, 8]], "n": 3, "max_tokens": 2, "ignore_eos": true});
    assert_eq!(cached(&body).await, (42, 0));
    assert_eq!(cached(&body).await, (42, 39));
    let chat = json!({"messages": [{"role": "user", "content": "what is the sum of one and two?"}], "max_tokens": 2});
    let (tokens, none) = cached(&chat).await;
    assert_eq!((none, cached(&chat).await), (0, (tokens, tokens - 1)));
}

#[tokio::test]
async fn completions_take_text_and_stop_after_sixteen_tokens_unless_told() {
    let address = serve(&engine("qwen3-tied")).await;
    let body = json!({"prompt": "the sum", "ignore_eos": true});
    let response = ask(address, "completions", body).await;
    assert_eq!(response["usage"]["completion_tokens"], 16);
    assert!(response["choices"][0]["text"].is_string());
}

#[tokio::test]
async fn the_policy_version_is_reported() {
    let engine = engine("qwen3-tied");
    engine.set_policy_version(7);
    let address = serve(&engine).await;
    let response = ask(address, "completions", json!({"prompt": [1], "max_tokens": 2, "ignore_eos": true})).await;
    assert_eq!(response["policy_version"], 7);
    assert_eq!(response["choices"][0]["policy_versions"], json!([7, 7]));
    let models: Value = reqwest::get(format!("http://{address}/v1/models")).await.unwrap().json().await.unwrap();
    assert_eq!(models["data"][0]["id"], "qwen3-tied");
    assert_eq!(models["data"][0]["max_model_len"], 512);
    assert!(reqwest::get(format!("http://{address}/health")).await.unwrap().status().is_success());
}

#[tokio::test]
async fn wrong_requests_are_answered_in_openais_shape_with_the_field_at_fault() {
    let address = serve(&engine("qwen3-tied")).await;
    let (status, answer) = post(address, "chat/completions", "{\"messages\": [").await;
    assert_eq!((status, &answer["error"]["type"]), (400, &json!("invalid_request_error")));
    let user = json!([{"role": "user", "content": "a"}]);
    for (body, param, words) in [
        (json!({"messages": user, "temperature": "hot"}), "temperature", "invalid type: string \"hot\""),
        (json!({"messages": user, "top_p": 2}), "top_p", "at most 1"),
        (json!({"messages": user, "n": 0}), "n", "from 1 to 128"),
        (json!({"messages": user, "stream": true}), "stream", "gateway"),
        (json!({"messages": user, "stop": [1]}), "stop", "a string or a list of strings"),
        (json!({"messages": user, "response_format": {"type": "json_object"}}), "response_format", "not supported"),
        (json!({"messages": user, "tools": tools(), "tool_choice": "required"}), "tool_choice", "\"auto\" or \"none\""),
        (json!({"messages": user, "presence_penalty": 3}), "presence_penalty", "from -2 to 2"),
        (json!({"messages": user, "frequency_penalty": -3}), "frequency_penalty", "from -2 to 2"),
        (json!({"messages": user, "repetition_penalty": 0}), "repetition_penalty", "above 0"),
        (json!({"messages": user, "min_p": 2}), "min_p", "from 0 to 1"),
        (json!({"messages": user, "logit_bias": {"5": 101}}), "logit_bias", "101 for token id 5"),
        (json!({"messages": user, "logit_bias": {"128": 1}}), "logit_bias", "there are 128"),
        (json!({"messages": user, "logit_bias": {"five": 1}}), "logit_bias", "\"five\" is not a token id"),
        (json!({"messages": user, "logit_bias": {"5": "high"}}), "logit_bias", "token id 5 is not a number"),
        (json!({"messages": user, "best_of": 2}), "best_of", "not supported"),
        (json!({"messages": []}), "messages", "at least one"),
        (json!({"messages": [{"content": "a"}]}), "messages[0].role", "must be a string"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0].content",
            "reads text only",
        ),
    ] {
        let error = refused(address, "chat/completions", body).await;
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    let error = refused(address, "chat/completions", json!({"temperature": 1})).await;
    assert!(error["message"].as_str().unwrap().contains("missing field `messages`"), "{error}");
    let error = refused(address, "completions", json!({"prompt": vec![1; 600]})).await;
    assert_eq!(error["code"], "context_length_exceeded");
    assert_eq!(error["param"], "prompt");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("512") && message.contains("600"), "{message}");
    let long = json!([{"role": "user", "content": "a ".repeat(600)}]);
    let error = refused(address, "chat/completions", json!({"messages": long})).await;
    assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!("messages")));
    let tokens: u64 = error["message"]
        .as_str()
        .unwrap()
        .split("the prompt has ")
        .nth(1)
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    assert!(tokens > 600 && error["message"].as_str().unwrap().contains("512"), "{error}");
    let error = refused(address, "completions", json!({"prompt": [1, 4000]})).await;
    assert!(error["message"].as_str().unwrap().contains("token id 4000 is outside the vocabulary of 128"), "{error}");
    let error = refused(address, "completions", json!({"prompt": {"text": "a"}})).await;
    assert!(error["message"].as_str().unwrap().contains("a list of token ids"), "{error}");
}

#[tokio::test]
async fn a_client_that_hangs_up_frees_its_place_in_the_batch() {
    let engine = Engine::load(
        &super::fixture::dir("qwen3-tied"),
        agl_engine::EngineConfig { max_batch_size: 1, ..Default::default() },
    )
    .unwrap();
    let address = serve(&engine).await;
    let client = reqwest::Client::builder().timeout(std::time::Duration::from_millis(5)).build().unwrap();
    // Far more work than the time allows: 40 choices, one after the other.
    let body = json!({"prompt": [1], "n": 40, "max_tokens": 250, "ignore_eos": true}).to_string();
    let gone = client.post(format!("http://{address}/v1/completions")).body(body).send().await;
    assert!(gone.is_err_and(|error| error.is_timeout()));
    ask(address, "completions", json!({"prompt": [1], "max_tokens": 1})).await;
    let sampled = engine.sampler_totals().sampled_tokens;
    assert!(sampled < 9_000, "{sampled} tokens were sampled, so the abandoned request was served to its end");
}
