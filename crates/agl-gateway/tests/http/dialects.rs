//! What harnesses speak: requests of every dialect become chat completions, answers become the dialect's own again.

use std::time::Duration;

use serde_json::{Value, json};

use crate::scene::{Answer, KEY, MODEL, Reply, Scene, chat_path, completion, quick};

/// The path of a dialect below a rollout's first attempt.
fn at(path: &str) -> String {
    format!("/proxy/rollout/r/attempt/0/mode/train/{path}")
}

async fn scene() -> Scene {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene
}

/// What the model is to say: a thought, a text and a call.
fn thoughtful() -> Value {
    let mut answer = completion(&[1, 2], &[7, 8]);
    answer["choices"][0]["message"] = json!({
        "role": "assistant", "content": "Let me see.", "reasoning_content": "Six times seven.",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "mul", "arguments": r#"{"a":6,  "b":7.0}"#}}],
    });
    answer["choices"][0]["finish_reason"] = json!("tool_calls");
    answer["usage"]["prompt_tokens_details"] = json!({"cached_tokens": 1});
    answer
}

/// The events of a stream: name and data.
fn events(answer: &Answer) -> Vec<(String, Value)> {
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/event-stream")), "{}", answer.text);
    let blocks = answer.text.split("\n\n").filter(|block| !block.is_empty() && !block.starts_with(':'));
    blocks
        .map(|block| {
            let field =
                |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().to_owned();
            let data = field("data: ");
            (field("event: "), serde_json::from_str(&data).unwrap_or(Value::String(data)))
        })
        .collect()
}

fn names(events: &[(String, Value)]) -> Vec<&str> {
    events.iter().map(|(name, _)| name.as_str()).collect()
}

fn sent(scene: &Scene) -> Value {
    let (path, mut body) = scene.upstream.asked().pop().unwrap();
    assert_eq!(path, "chat/completions");
    for ours in ["model", "temperature", "return_token_ids", "logprobs"] {
        body.as_object_mut().unwrap().remove(ours);
    }
    body
}

async fn last_event(scene: &Scene) -> Value {
    scene.events("r").await.pop().unwrap()["data"].clone()
}

#[tokio::test]
async fn a_chat_stream_is_cut_from_the_whole_answer() {
    let scene = scene().await;
    scene.upstream.will(Reply::json(200, &thoughtful()));
    let body = json!({"messages": [], "stream": true, "stream_options": {"include_usage": true}});
    let answer = scene.call("r", body).await;
    assert_eq!(sent(&scene), json!({"messages": []}), "the server is asked for a whole answer");
    let chunks = events(&answer);
    assert_eq!(chunks.last().unwrap().1, "[DONE]");
    let chunks: Vec<&Value> = chunks.iter().map(|(_, chunk)| chunk).take(chunks.len() - 1).collect();
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk["id"] == "cmpl-1"));
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    assert_eq!(deltas[0], &json!({"role": "assistant", "content": ""}));
    assert!(deltas.iter().any(|delta| delta["content"] == "Let me see."));
    assert!(deltas.iter().any(|delta| delta["reasoning_content"] == "Six times seven."));
    assert!(deltas.iter().any(|delta| delta["tool_calls"][0]["index"] == 0 && delta["tool_calls"][0]["id"] == "c1"));
    let (usage, finished) = (chunks[chunks.len() - 1], chunks[chunks.len() - 2]);
    assert_eq!(finished["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!((&usage["choices"], &usage["usage"]["prompt_tokens"]), (&json!([]), &json!(2)));
    assert_eq!(chunks[0]["choices"][0]["token_ids"], json!([7, 8]), "an agent may read them");
    assert_eq!(scene.sequences("r").await["sequences"][0]["token_ids"], json!([1, 2, 7, 8]));
}

#[tokio::test]
async fn a_completion_streams_too() {
    let scene = scene().await;
    let body =
        json!({"choices": [{"index": 0, "text": "four", "finish_reason": "stop"}], "usage": {"total_tokens": 3}});
    scene.upstream.will(Reply::json(200, &body));
    let answer = scene.post(&at("openai/v1/completions"), json!({"prompt": "2+2=", "stream": true})).await;
    let chunks = events(&answer);
    assert_eq!(chunks[0].1["choices"][0], json!({"index": 0, "text": "four", "finish_reason": "stop"}));
    assert!(chunks[0].1.get("usage").is_none(), "nobody asked for it");
}

#[tokio::test]
async fn messages_become_chat_and_back() {
    let scene = scene().await;
    scene.upstream.will(Reply::json(200, &thoughtful()));
    let tools = json!([
        {"name": "mul", "description": "d", "input_schema": {"type": "object", "properties": {"b": {}, "a": {}}}},
        {"type": "web_search_20250305", "name": "web_search"},
    ]);
    let question = json!({
        "model": "claude-x", "max_tokens": 50, "stop_sequences": ["END"], "top_k": 4, "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "One.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Two."}],
        "tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "What is it?"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        ]}],
    });
    let answer = scene.post(&at("anthropic/v1/messages"), question.clone()).await;
    assert_eq!(
        sent(&scene),
        json!({
            "messages": [
                {"role": "system", "content": "One.\n\nTwo."},
                {"role": "user", "content": [
                    {"type": "text", "text": "What is it?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                ]},
            ],
            "tools": [{"type": "function", "function": {"name": "mul", "description": "d",
                       "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}}],
            "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 50, "top_k": 4, "stop": ["END"],
        })
    );
    let mut message = answer.json();
    let id = message["id"].as_str().unwrap().to_owned();
    assert_eq!(id, format!("msg_{}", answer.header("x-agl-call-id").unwrap()));
    message.as_object_mut().unwrap().remove("id");
    assert_eq!(
        message,
        json!({
            "type": "message", "role": "assistant", "model": "claude-x", "stop_reason": "tool_use", "stop_sequence": null,
            "content": [
                {"type": "thinking", "thinking": "Six times seven.", "signature": "agl"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "mul", "input": {"a": 6, "b": 7.0}},
            ],
            "usage": {"input_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1, "output_tokens": 2},
        })
    );
    let event = last_event(&scene).await;
    assert_eq!(event["dialect"], "anthropic.messages");
    assert_eq!(event["left_out"], json!(["metadata", "system[].cache_control", "tools[].web_search_20250305"]));

    // The answer comes back in the history, and with it the arguments to the letter.
    let mut next = question;
    let history = next["messages"].as_array_mut().unwrap();
    history.push(json!({"role": "assistant", "content": message["content"]}));
    history.push(json!({"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "42"}]},
        {"type": "text", "text": "Go on."},
    ]}));
    scene.post(&at("anthropic/v1/messages"), next).await;
    let messages = sent(&scene)["messages"].as_array().unwrap()[2..].to_vec();
    assert_eq!(
        messages,
        [
            json!({"role": "assistant", "content": "Let me see.", "reasoning_content": "Six times seven.", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "mul", "arguments": r#"{"a":6,  "b":7.0}"#}}]}),
            json!({"role": "tool", "tool_call_id": "c1", "content": "42"}),
            json!({"role": "user", "content": "Go on."}),
        ]
    );
}

#[tokio::test]
async fn a_message_streams_block_by_block() {
    let scene = scene().await;
    scene.upstream.will(Reply::json(200, &thoughtful()));
    let body = json!({"model": "m", "max_tokens": 9, "stream": true, "messages": [{"role": "user", "content": "q"}]});
    let events = events(&scene.post(&at("anthropic/v1/messages"), body).await);
    let block = ["content_block_start", "content_block_delta", "content_block_stop"];
    let thinking = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"];
    let expected = [&["message_start"][..], &thinking, &block, &block, &["message_delta", "message_stop"]].concat();
    assert_eq!(names(&events), expected);
    assert!(events.iter().all(|(name, data)| data["type"] == *name));
    assert_eq!(events[0].1["message"]["content"], json!([]));
    let deltas: Vec<&Value> = events.iter().map(|(_, data)| &data["delta"]).filter(|delta| delta.is_object()).collect();
    assert_eq!(deltas[3], &json!({"type": "input_json_delta", "partial_json": r#"{"a":6,"b":7.0}"#}));
    assert_eq!(deltas[4]["stop_reason"], "tool_use");
}

#[tokio::test]
async fn responses_become_chat_and_back() {
    let scene = scene().await;
    scene.upstream.will(Reply::json(200, &thoughtful()));
    let question = json!({
        "model": "gpt-5", "instructions": "Be brief.", "input": "What is it?", "max_output_tokens": 50, "store": false,
        "tools": [{"type": "function", "name": "mul", "parameters": {"type": "object"}}, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "mul"}, "prompt_cache_key": "k",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}, "reasoning": {"effort": "low"},
    });
    let answer = scene.post(&at("openai/v1/responses"), question.clone()).await;
    assert_eq!(
        sent(&scene),
        json!({
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}],
            "tools": [{"type": "function", "function": {"name": "mul", "parameters": {"type": "object"}}}],
            "tool_choice": {"type": "function", "function": {"name": "mul"}}, "max_tokens": 50,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}, "reasoning_effort": "low",
        })
    );
    assert_eq!(last_event(&scene).await["left_out"], json!(["prompt_cache_key", "tools[].web_search"]));
    let response = answer.json();
    let kinds: Vec<&Value> = response["output"].as_array().unwrap().iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(response["output"][1]["content"][0]["text"], "Let me see.");
    assert_eq!((&response["status"], &response["instructions"]), (&json!("completed"), &json!("Be brief.")));
    assert_eq!(response["usage"]["input_tokens_details"]["cached_tokens"], 1);

    let mut input = vec![json!({"role": "developer", "content": [{"type": "input_text", "text": "What is it?"}]})];
    input.extend(response["output"].as_array().unwrap().clone());
    input.push(json!({"type": "function_call_output", "call_id": "c1", "output": "42"}));
    scene.post(&at("openai/v1/responses"), json!({"input": input})).await;
    assert_eq!(
        sent(&scene)["messages"],
        json!([
            {"role": "system", "content": "What is it?"},
            {"role": "assistant", "content": "Let me see.", "reasoning_content": "Six times seven.", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "mul", "arguments": r#"{"a":6,  "b":7.0}"#}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ])
    );
}

#[tokio::test]
async fn a_response_streams_with_numbered_events_and_free_text_tools_keep_their_text() {
    let scene = scene().await;
    let mut answer = thoughtful();
    answer["choices"][0]["message"]["tool_calls"][0]["function"] =
        json!({"name": "apply_patch", "arguments": r#"{"input": "*** Begin"}"#});
    scene.upstream.will(Reply::json(200, &answer));
    let body = json!({"input": "q", "stream": true, "tools": [{"type": "custom", "name": "apply_patch"}]});
    let events = events(&scene.post(&at("openai/v1/responses"), body).await);
    let numbers: Vec<u64> = events.iter().map(|(_, data)| data["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    assert!(events.iter().all(|(name, data)| data["type"] == *name));
    let names = names(&events);
    assert_eq!(names[..3], ["response.created", "response.in_progress", "response.output_item.added"]);
    for expected in [
        "response.reasoning_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.custom_tool_call_input.done",
    ] {
        assert!(names.contains(&expected), "{expected} is not in {names:?}");
    }
    let (last, data) = events.last().unwrap();
    assert_eq!(last, "response.completed");
    let call = &data["response"]["output"][2];
    assert_eq!((&call["type"], &call["input"]), (&json!("custom_tool_call"), &json!("*** Begin")));
    assert_eq!(scene.events("r").await[0]["data"]["request"]["tools"][0]["function"]["name"], "apply_patch");
}

#[tokio::test]
async fn gemini_becomes_chat_and_back() {
    let scene = scene().await;
    scene.upstream.will(Reply::json(200, &thoughtful()));
    let declaration =
        json!({"name": "mul", "parameters": {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}}});
    let question = json!({
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [{"role": "user", "parts": [{"text": "What is it?"}]}],
        "tools": [{"functionDeclarations": [declaration]}, {"googleSearch": {}}],
        "generation_config": {"maxOutputTokens": 50, "stop_sequences": ["END"], "thinkingConfig": {}},
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["mul"]}},
    });
    let path = at("gemini/v1beta/models/gemini-2.5-pro:generateContent");
    let answer = scene.post(&path, question).await.json();
    assert_eq!(
        sent(&scene),
        json!({
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}],
            "tools": [{"type": "function", "function": {"name": "mul",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}],
            "tool_choice": {"type": "function", "function": {"name": "mul"}}, "max_tokens": 50, "stop": ["END"],
        })
    );
    assert_eq!(
        last_event(&scene).await["left_out"],
        json!(["generationConfig.thinkingConfig", "tools[].googleSearch"])
    );
    let parts = json!([
        {"text": "Six times seven.", "thought": true}, {"text": "Let me see."},
        {"functionCall": {"id": "c1", "name": "mul", "args": {"a": 6, "b": 7.0}}},
    ]);
    assert_eq!(answer["candidates"][0]["content"], json!({"role": "model", "parts": parts}));
    assert_eq!(
        (&answer["candidates"][0]["finishReason"], &answer["modelVersion"]),
        (&json!("STOP"), &json!("gemini-2.5-pro"))
    );

    // SDKs may leave ids out of the history.
    let contents = json!([
        {"role": "user", "parts": [{"text": "What is it?"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "mul", "args": {"a": 6, "b": 7.0}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "mul", "response": {"result": "42"}}}]},
    ]);
    scene.post(&path, json!({"contents": contents})).await;
    assert_eq!(
        sent(&scene)["messages"].as_array().unwrap()[1..],
        [
            json!({"role": "assistant", "content": null, "tool_calls": [
                {"id": "call_0", "type": "function", "function": {"name": "mul", "arguments": r#"{"a": 6, "b": 7.0}"#}}]}),
            json!({"role": "tool", "tool_call_id": "call_0", "content": "42"}),
        ]
    );
}

#[tokio::test]
async fn gemini_streams_as_events_or_as_a_list() {
    let scene = scene().await;
    let body = json!({"contents": [{"role": "user", "parts": [{"text": "q"}]}]});
    let path = at("gemini/v1beta/models/m:streamGenerateContent");
    let streamed = events(&scene.post(&format!("{path}?alt=sse"), body.clone()).await);
    assert_eq!(streamed[0].1["candidates"][0]["content"]["parts"], json!([{"text": "hi"}]));
    let listed = scene.post(&path, body).await;
    assert_eq!(listed.header("content-type"), Some("application/json"));
    assert_eq!(listed.json()[0]["candidates"][0]["content"]["parts"], json!([{"text": "hi"}]));
}

#[tokio::test]
async fn errors_speak_the_harnesss_dialect() {
    let scene = scene().await;
    let messages = at("anthropic/v1/messages");
    let wrong = scene.post(&messages, json!({"max_tokens": 1})).await;
    assert_eq!(wrong.status, 400);
    assert_eq!(
        wrong.json(),
        json!({"type": "error", "error": {"type": "invalid_request_error", "message": "messages is missing"}})
    );
    let stranger = scene.send(reqwest::Method::POST, &messages, "wrong", Some(&json!({}))).await;
    assert_eq!((stranger.status, &stranger.json()["error"]["type"]), (401, &json!("authentication_error")));

    let refusal = json!({"error": {"message": "context too long", "type": "BadRequestError"}});
    for (path, body, place) in [
        (messages.as_str(), json!({"messages": []}), "/error/message"),
        (&at("openai/v1/responses"), json!({"input": "q"}), "/error/message"),
        (&at("gemini/v1beta/models/m:generateContent"), json!({"contents": []}), "/error/message"),
        (&chat_path("r", "train"), json!({"stream": true}), "/error/message"),
    ] {
        scene.upstream.will(Reply::json(400, &refusal));
        let answer = scene.post(path, body).await;
        assert_eq!(answer.status, 400, "{path}");
        assert_eq!(answer.json().pointer(place), Some(&json!("context too long")), "{path}: {}", answer.text);
    }
    let stateful =
        scene.post(&at("openai/v1/responses"), json!({"input": "q", "previous_response_id": "resp_1"})).await;
    assert!(stateful.json()["error"]["message"].as_str().unwrap().contains("send the whole input"));
}

#[tokio::test]
async fn a_stream_that_waits_is_kept_alive_and_reports_its_failure_as_an_event() {
    let scene = Scene::with(agl_gateway::GatewayConfig { stream_keep_alive_seconds: 0.1, ..quick() }).await;
    scene.enqueue("r").await;
    for (path, body, sign_of_life, failure) in [
        (chat_path("r", "train"), json!({"stream": true}), ": waiting", r#"data: {"error":"#),
        (at("anthropic/v1/messages"), json!({"messages": [], "stream": true}), "event: ping", "event: error"),
        (at("openai/v1/responses"), json!({"input": "q", "stream": true}), ": waiting", "event: error"),
        (
            at("gemini/v1beta/models/m:streamGenerateContent?alt=sse"),
            json!({"contents": []}),
            "\n",
            r#"data: {"error":"#,
        ),
    ] {
        for (status, answer, expected) in
            [(200, completion(&[1, 2], &[7]), "hi"), (400, json!({"error": {"message": "no"}}), failure)]
        {
            let slow = Reply { delay: Duration::from_millis(350), ..Reply::json(status, &answer) };
            scene.upstream.will(slow);
            let answer = scene.post(&path, body.clone()).await;
            assert_eq!(answer.status, 200, "{path}: it has begun");
            let (waited, said) = (answer.text.matches(sign_of_life).count(), answer.text.contains(expected));
            assert!(waited >= 2 && said, "{path}: {}", answer.text);
        }
    }
    let counts = scene.sequences("r").await["counts"].clone();
    assert_eq!((&counts["live"], &counts["undelivered"]), (&json!(4), &json!(0)));
}

#[tokio::test]
async fn tokens_are_counted_by_the_server_or_estimated() {
    let scene = scene().await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x".repeat(400)}]});
    let answer = scene.post(&at("anthropic/v1/messages/count_tokens"), body).await;
    assert_eq!((answer.status, answer.header("x-agl-estimated")), (200, Some("true")), "this server has no /tokenize");
    assert!((100..150).contains(&answer.json()["input_tokens"].as_u64().unwrap()), "{}", answer.text);
    let body = json!({"contents": [{"role": "user", "parts": [{"text": "q"}]}]});
    let answer = scene.post(&at("gemini/v1beta/models/m:countTokens"), body).await;
    assert!(answer.json()["totalTokens"].as_u64().unwrap() > 0);
    assert!(scene.events("r").await.is_empty(), "nothing was sampled");
}

#[tokio::test]
async fn a_harness_may_ask_what_models_there_are_and_whether_anybody_is_there() {
    let scene = scene().await;
    let openai = scene.get(&at("openai/v1/models")).await.json();
    assert_eq!(openai["data"][0]["id"], MODEL);
    let anthropic = scene.get(&at("anthropic/v1/models")).await.json();
    assert_eq!((&anthropic["data"][0]["id"], &anthropic["has_more"]), (&json!(MODEL), &json!(false)));
    let head = scene.send(reqwest::Method::HEAD, &at("anthropic"), KEY, None).await;
    assert_eq!(head.status, 200);
}

#[tokio::test]
async fn the_agent_is_named_by_url_or_header() {
    let scene = scene().await;
    scene.post(&at("agent/planner/openai/v1/chat/completions"), json!({"messages": []})).await;
    assert_eq!(last_event(&scene).await["agent"], "planner");
    let request = scene.http.post(format!("{}{}", scene.url, chat_path("r", "train"))).bearer_auth(KEY);
    request.header("X-AGL-Agent", "coder").body("{}").send().await.unwrap();
    assert_eq!(last_event(&scene).await["agent"], "coder");
}

#[tokio::test]
async fn a_choice_among_tools_that_are_left_out_is_left_out_too() {
    let scene = scene().await;
    let search = json!({"type": "web_search_20250305", "name": "web_search"});
    let body = json!({"messages": [], "tools": [search], "tool_choice": {"type": "tool", "name": "web_search"}});
    scene.post(&at("anthropic/v1/messages"), body).await;
    assert_eq!(sent(&scene), json!({"messages": []}));
    let left_out = last_event(&scene).await["left_out"].clone();
    assert_eq!(left_out, json!(["tool_choice", "tools[].web_search_20250305"]));
}

#[tokio::test]
async fn there_is_one_system_message_and_it_comes_first() {
    let scene = scene().await;
    let input = json!([{"role": "developer", "content": "Two."}, {"role": "user", "content": "q"}, {"role": "system", "content": "Late."}]);
    scene.post(&at("openai/v1/responses"), json!({"instructions": "One.", "input": input})).await;
    assert_eq!(
        sent(&scene)["messages"],
        json!([
            {"role": "system", "content": "One.\n\nTwo."},
            {"role": "user", "content": "q"},
            {"role": "user", "content": "Late."},
        ])
    );
}

#[tokio::test]
async fn a_thought_comes_back_from_a_harness_that_keeps_only_sealed_ones() {
    let scene = scene().await;
    scene.upstream.will(Reply::json(200, &thoughtful()));
    let body = json!({"input": "q", "include": ["reasoning.encrypted_content"]});
    let mut item = scene.post(&at("openai/v1/responses"), body).await.json()["output"][0].clone();
    item.as_object_mut().unwrap().remove("content");
    scene.post(&at("openai/v1/responses"), json!({"input": [{"role": "user", "content": "q"}, item]})).await;
    assert_eq!(sent(&scene)["messages"][1]["reasoning_content"], "Six times seven.");
}
