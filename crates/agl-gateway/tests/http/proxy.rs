//! A call's way through the proxy: what is sent, what comes back, what is recorded, what is tried again.

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};

use crate::scene::{KEY, MODEL, Reply, Scene, chat_path, completion, quick};

#[tokio::test]
async fn a_training_call_is_rewritten_answered_whole_and_recorded() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let body =
        r#"{"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}], "top_p": 1e0, "extra": {"z": 1.50}}"#;
    let response = scene
        .http
        .post(format!("{}{}", scene.url, chat_path("r", "train")))
        .bearer_auth(KEY)
        .body(body)
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 200);
    let call_id = response.headers()["x-agl-call-id"].to_str().unwrap().to_owned();
    assert_eq!(response.headers()["content-type"], "application/json");
    assert_eq!(response.text().await.unwrap(), completion(&[1, 2], &[7]).to_string());

    let (path, sent) = scene.upstream.asked().remove(0);
    assert_eq!(path, "chat/completions");
    assert_eq!(
        sent,
        json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "top_p": 1.0, "extra": {"z": 1.5},
               "temperature": 1.0, "return_token_ids": true, "logprobs": true})
    );

    let event = scene.events("r").await.remove(0);
    assert_eq!((&event["event_type"], &event["attempt_id"]), (&json!("model_request"), &json!("0")));
    let mut data = event["data"].clone();
    assert!(data["latency_ms"].as_f64().unwrap() > 0.0);
    data.as_object_mut().unwrap().remove("latency_ms");
    assert_eq!(
        data,
        json!({
            "model": MODEL, "model_version": 3, "request": sent, "response": completion(&[1, 2], &[7]),
            "server": {"model": MODEL, "endpoint": scene.upstream.endpoint, "version": 3},
            "http_status": 200, "status": "ok", "retry_count": 0,
            "usage": {"prompt_tokens": 2, "completion_tokens": 1}, "finish_reason": "stop",
            "dialect": "openai.chat", "stream": false, "call_id": call_id, "seq": 0, "delivered": true,
        })
    );
}

#[tokio::test]
async fn validation_has_its_temperature_and_asks_for_no_log_probs() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.post(&chat_path("r", "val"), json!({"temperature": 0.1})).await;
    let sent = scene.upstream.asked().remove(0).1;
    assert_eq!(sent, json!({"temperature": 0.7, "model": MODEL, "return_token_ids": true}));
}

#[tokio::test]
async fn completions_go_to_completions() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let answer = json!({"choices": [
        {"prompt_token_ids": [4, 5], "token_ids": [6], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "length", "text": "x"}]});
    scene.upstream.will(Reply::json(200, &answer));
    let path = chat_path("r", "train").replace("chat/completions", "completions");
    assert_eq!(scene.post(&path, json!({"prompt": [4, 5]})).await.status, 200);
    assert_eq!(scene.upstream.asked()[0].0, "completions");
    let rows = scene.sequences("r").await["sequences"].clone();
    assert_eq!(rows[0]["token_ids"], json!([4, 5, 6]));
    assert_eq!(rows[0]["log_probs"], json!([0.0, 0.0, -0.5]));
}

#[tokio::test]
async fn what_cannot_be_proxied_is_refused_before_the_upstream() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let wrong_mode = scene.post(&chat_path("r", "test"), json!({})).await;
    assert_eq!((wrong_mode.status, wrong_mode.detail().as_str()), (404, "Unsupported proxy mode: test"));
    let wrong_path = scene.post(&chat_path("r", "train").replace("chat/completions", "embeddings"), json!({})).await;
    assert_eq!((wrong_path.status, wrong_path.detail().as_str()), (404, "Unsupported upstream path: embeddings"));
    let unknown = scene.call("nobody", json!({})).await;
    assert_eq!((unknown.status, unknown.detail().as_str()), (404, "Rollout not found: nobody"));
    let list = scene.call("r", json!([1])).await;
    assert_eq!((list.status, list.detail().as_str()), (400, "Request body must be a JSON object"));
    let url = format!("{}{}", scene.url, chat_path("r", "train"));
    let broken = scene.http.post(url).bearer_auth(KEY).body("{").send().await.unwrap();
    assert_eq!(broken.status(), 400);
    assert_eq!(broken.json::<Value>().await.unwrap(), json!({"detail": "Invalid JSON in request body"}));
    assert!(scene.upstream.asked().is_empty());
    assert_eq!(scene.events("r").await.len(), 0);
}

#[tokio::test]
async fn several_choices_are_several_rows_of_one_call() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let answer =
        json!({"prompt_token_ids": [1, 2], "choices": [{"token_ids": [7]}, {"token_ids": [7]}, {"token_ids": [8, 9]}]});
    scene.upstream.will(Reply::json(200, &answer));
    scene.call("r", json!({"n": 3})).await;
    scene.upstream.will_sample(&[1, 2, 8, 9, 3], &[4]);
    scene.call("r", json!({})).await;
    let sequences = scene.sequences("r").await;
    assert_eq!(sequences["counts"]["calls"], 4);
    assert_eq!(sequences["sequences"].as_array().unwrap().len(), 3);
    let events = scene.events("r").await;
    assert_eq!((events.len(), &events[1]["data"]["seq"]), (2, &json!(3)));
}

#[tokio::test]
async fn transient_failures_are_tried_again() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    for status in [408, 409, 429, 500, 503] {
        scene.upstream.will(Reply::json(status, &json!({"error": status})));
    }
    assert_eq!(scene.call("r", json!({"messages": []})).await.status, 200);
    assert_eq!(scene.upstream.asked().len(), 6);
    let events = scene.events("r").await;
    assert_eq!((events.len(), &events[0]["data"]["retry_count"]), (1, &json!(5)));
}

#[tokio::test]
async fn the_last_failure_is_passed_on_whole() {
    let mut config = quick();
    config.upstream.max_attempts = 2;
    let scene = Scene::with(config).await;
    scene.enqueue("r").await;
    for _ in 0..2 {
        let mut reply = Reply::json(429, &json!({"error": {"message": "slow down"}}));
        reply.headers.push(("retry-after", "0".to_owned()));
        scene.upstream.will(reply);
    }
    let answer = scene.call("r", json!({"messages": []})).await;
    assert_eq!((answer.status, answer.json()), (429, json!({"error": {"message": "slow down"}})));
    assert_eq!(answer.header("retry-after"), Some("0"));
    assert_eq!(answer.header("x-agl-paused"), None);
    let event = scene.events("r").await.remove(0);
    assert_eq!((&event["data"]["http_status"], &event["data"]["status"]), (&json!(429), &json!("error")));
    assert_eq!(event["data"]["response"], json!({"error": {"message": "slow down"}}));
    assert_eq!(scene.sequences("r").await["counts"]["failed"], 1);
}

#[tokio::test]
async fn a_clients_mistake_is_not_tried_again() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.upstream.will(Reply::json(400, &json!({"error": "context too long"})));
    assert_eq!(scene.call("r", json!({"messages": []})).await.status, 400);
    assert_eq!(scene.upstream.asked().len(), 1);
}

#[tokio::test]
async fn the_servers_retry_after_is_respected() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let mut busy = Reply::json(429, &json!({}));
    busy.headers.push(("retry-after", "1".to_owned()));
    scene.upstream.will(busy);
    let started = Instant::now();
    assert_eq!(scene.call("r", json!({"messages": []})).await.status, 200);
    assert!(started.elapsed() >= Duration::from_secs(1));
}

#[tokio::test]
async fn a_dead_server_is_a_502_that_is_recorded() {
    let mut config = quick();
    config.upstream.max_attempts = 2;
    let scene = Scene::without_model(config).await;
    scene.register(json!([{"model": MODEL, "endpoint": "http://127.0.0.1:1/v1"}])).await;
    scene.enqueue("r").await;
    let answer = scene.call("r", json!({"messages": []})).await;
    assert_eq!((answer.status, answer.detail().as_str()), (502, "Upstream model server request failed"));
    let event = scene.events("r").await.remove(0);
    assert_eq!((&event["data"]["http_status"], &event["data"]["retry_count"]), (&json!(502), &json!(1)));
    assert_eq!(scene.get("/proxy/state").await.json()["inflight"], 0);
}

#[tokio::test]
async fn a_slow_server_is_a_504() {
    let mut config = quick();
    config.upstream.max_attempts = 1;
    config.upstream.timeout_seconds = 0.1;
    let scene = Scene::with(config).await;
    scene.enqueue("r").await;
    scene.upstream.will(Reply::json(200, &json!({})).waiting());
    let answer = scene.call("r", json!({"messages": []})).await;
    assert_eq!((answer.status, answer.detail().as_str()), (504, "Upstream model server timed out"));
}

#[tokio::test]
async fn a_retry_goes_to_the_server_that_is_registered_now() {
    let mut config = quick();
    config.no_model_wait_seconds = 5.0;
    let scene = Scene::without_model(config).await;
    scene.register(json!([{"model": MODEL, "endpoint": "http://127.0.0.1:1/v1"}])).await;
    scene.enqueue("r").await;
    let (answer, ()) = tokio::join!(scene.call("r", json!({"messages": []})), async {
        scene.delete("/api/models").await;
        tokio::time::sleep(Duration::from_millis(150)).await;
        scene.register(json!([{"model": MODEL, "endpoint": scene.upstream.endpoint}])).await;
    });
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn an_answer_without_token_ids_is_passed_on_and_counted() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let bare = json!({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]});
    scene.upstream.will(Reply::json(200, &bare));
    let answer = scene.call("r", json!({"messages": []})).await;
    assert_eq!((answer.status, answer.json()), (200, bare));
    let html = Reply {
        headers: vec![("content-type", "text/html".to_owned())],
        body: "<html>".to_owned(),
        ..Reply::json(200, &json!({}))
    };
    scene.upstream.will(html);
    let answer = scene.call("r", json!({"messages": []})).await;
    assert_eq!(
        (answer.status, answer.text.as_str(), answer.header("content-type")),
        (200, "<html>", Some("text/html"))
    );
    assert_eq!(scene.events("r").await[1]["data"]["response"], json!({}));
    let counts = scene.sequences("r").await["counts"].clone();
    assert_eq!((&counts["without_token_ids"], &counts["live"]), (&json!(2), &json!(0)));
}

#[tokio::test]
async fn a_wrong_count_of_log_probs_drops_them_and_keeps_the_ids() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let mut answer = completion(&[1, 2], &[7, 8]);
    answer["choices"][0]["logprobs"]["content"].as_array_mut().unwrap().pop();
    scene.upstream.will(Reply::json(200, &answer));
    scene.call("r", json!({"messages": []})).await;
    let row = scene.sequences("r").await["sequences"][0].clone();
    assert_eq!((&row["token_ids"], &row["log_probs"]), (&json!([1, 2, 7, 8]), &Value::Null));
}

#[tokio::test]
async fn a_large_call_goes_through() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let prompt: Vec<u32> = (0..200_000).collect();
    scene.upstream.will_sample(&prompt, &[7]);
    let answer = scene.call("r", json!({"messages": [{"content": "x".repeat(3_000_000)}]})).await;
    assert_eq!(answer.status, 200);
    assert_eq!(scene.sequences("r").await["sequences"][0]["token_ids"].as_array().unwrap().len(), 200_001);
}

#[tokio::test]
async fn calls_of_many_attempts_at_once_are_all_recorded() {
    let scene = Scene::start().await;
    for id in 0..8 {
        scene.enqueue(&format!("r{id}")).await;
    }
    let calls =
        (0..160).map(|n| scene.call(Box::leak(format!("r{}", n % 8).into_boxed_str()), json!({"messages": [n]})));
    let answers = futures_util::future::join_all(calls).await;
    assert!(answers.iter().all(|answer| answer.status == 200));
    for id in 0..8 {
        let mut seqs: Vec<u64> =
            scene.events(&format!("r{id}")).await.iter().map(|event| event["data"]["seq"].as_u64().unwrap()).collect();
        assert!(seqs.is_sorted());
        seqs.dedup();
        assert_eq!(seqs.len(), 20);
    }
}

#[tokio::test]
async fn a_terminal_rollout_still_answers_the_server_key() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.set_state("r", "failed").await;
    assert_eq!(scene.call("r", json!({"messages": []})).await.status, 200);
    assert_eq!(scene.send(Method::GET, &chat_path("r", "train"), KEY, None).await.status, 405);
}
