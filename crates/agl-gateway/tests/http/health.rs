//! What a platform engineer watches.

use reqwest::Method;
use serde_json::json;

use crate::scene::{Reply, Scene, completion};

/// The value of a metric with exactly these labels.
pub fn value(text: &str, series: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
}

#[tokio::test]
async fn metrics_tell_of_calls_answers_and_pauses() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.upstream.will(Reply::json(503, &json!({})));
    scene.upstream.will_sample(&[1, 2], &[7]);
    scene.upstream.will_sample(&[1, 2, 7, 3], &[8]);
    scene.upstream.will_sample(&[1, 2, 9], &[8]);
    scene.upstream.will(Reply::json(200, &json!({"choices": [{"message": {"content": "no ids"}}]})));
    scene.upstream.will(Reply::json(400, &json!({})));
    for number in 0..5 {
        scene.call("r", json!({"messages": [number]})).await;
    }
    scene.post("/proxy/pause", json!({})).await;
    let answer = scene.get("/metrics").await;
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4"));
    let found = |series: &str| value(&answer.text, series);
    for (series, expected) in [
        (r#"agl_gateway_calls_total{dialect="openai.chat",mode="train",status="200"}"#, 4.0),
        (r#"agl_gateway_calls_total{dialect="openai.chat",mode="train",status="400"}"#, 1.0),
        (r#"agl_gateway_answers_total{kind="new"}"#, 1.0),
        (r#"agl_gateway_answers_total{kind="merge"}"#, 1.0),
        (r#"agl_gateway_answers_total{kind="break"}"#, 1.0),
        (r#"agl_gateway_answers_total{kind="without_token_ids"}"#, 1.0),
        (r#"agl_gateway_answers_total{kind="failed"}"#, 1.0),
        ("agl_gateway_upstream_retries_total", 1.0),
        ("agl_gateway_overhead_seconds_count", 5.0),
        ("agl_gateway_commit_seconds_count", 5.0),
        ("agl_gateway_paused", 1.0),
        ("agl_gateway_held", 0.0),
    ] {
        assert_eq!(found(series), Some(expected), "{series} in\n{}", answer.text);
    }
    let stranger = scene.send(Method::GET, "/metrics", "", None).await;
    assert_eq!(stranger.status, 401, "rewards and loads are nobody else's business");
}

#[tokio::test]
async fn retries_that_cost_nothing_are_counted() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.upstream.will(Reply::json(200, &completion(&[1, 2], &[7])));
    for retry in ["0", "1"] {
        let url = format!("{}{}", scene.url, crate::scene::chat_path("r", "train"));
        let request = scene.http.post(url).bearer_auth(crate::scene::KEY).header("x-stainless-retry-count", retry);
        request.body("{}").send().await.unwrap();
    }
    let text = scene.get("/metrics").await.text;
    assert_eq!(value(&text, r#"agl_gateway_repeated_calls_total{how="recorded"}"#), Some(1.0), "{text}");
}

#[tokio::test]
async fn a_gateway_says_whether_it_is_ready_without_a_key() {
    let scene = Scene::start().await;
    let ready = scene.send(Method::GET, "/readyz", "", None).await;
    assert_eq!((ready.status, ready.json()), (200, json!({"status": "ready"})));
}
