//! The pause: what is held, for how long, by whom, and who may end it.

use std::time::Duration;

use serde_json::{Value, json};

use crate::scene::{Reply, Scene, chat_path, quick, until};

async fn state(scene: &Scene) -> Value {
    scene.get("/proxy/state").await.json()
}

#[tokio::test]
async fn an_open_gate_has_the_originals_state_and_ours() {
    let scene = Scene::start().await;
    assert_eq!(
        state(&scene).await,
        json!({"paused": false, "retry_after_seconds": 5, "reason": null, "inflight": 0, "held": 0, "waiting": 0,
               "owner": null, "lease_expires_at": null})
    );
    let paused = scene.post("/proxy/pause", json!({})).await;
    assert_eq!(paused.status, 200);
    assert_eq!((&paused.json()["paused"], &paused.json()["retry_after_seconds"]), (&json!(true), &json!(5)));
    let resumed = scene.send(reqwest::Method::POST, "/proxy/resume", crate::scene::KEY, None).await;
    assert_eq!((resumed.status, &resumed.json()["paused"]), (200, &json!(false)));
}

#[tokio::test]
async fn a_call_is_held_across_a_pause_and_then_answered() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.post("/proxy/pause", json!({"reason": "weights"})).await;
    let (answer, ()) = tokio::join!(scene.call("r", json!({"messages": []})), async {
        until("the call is held", async || state(&scene).await["held"] == 1).await;
        assert_eq!(state(&scene).await["inflight"], 0);
        assert!(scene.upstream.asked().is_empty());
        scene.post("/proxy/resume", json!({})).await;
    });
    assert_eq!(answer.status, 200);
    assert_eq!(scene.events("r").await[0]["data"]["http_status"], 200);
}

#[tokio::test]
async fn calls_at_the_upstream_finish_and_are_counted_until_they_have() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.upstream.will(Reply::json(200, &crate::scene::completion(&[1, 2], &[7])).waiting());
    let (answer, ()) = tokio::join!(scene.call("r", json!({"messages": []})), async {
        scene.upstream.was_asked(1).await;
        assert_eq!(scene.post("/proxy/pause", json!({})).await.json()["inflight"], 1);
        scene.upstream.release();
        until("it has drained", async || state(&scene).await["inflight"] == 0).await;
    });
    assert_eq!(answer.status, 200);
    scene.post("/proxy/resume", json!({})).await;
}

#[tokio::test]
async fn a_retry_is_held_too() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.upstream.will(Reply::json(503, &json!({})).waiting());
    let (answer, ()) = tokio::join!(scene.call("r", json!({"messages": []})), async {
        scene.upstream.was_asked(1).await;
        scene.post("/proxy/pause", json!({})).await;
        scene.upstream.release();
        until("the retry is held", async || state(&scene).await["held"] == 1).await;
        tokio::time::sleep(Duration::from_millis(150)).await;
        assert_eq!(scene.upstream.asked().len(), 1);
        assert_eq!(state(&scene).await["inflight"], 0);
        scene.post("/proxy/resume", json!({})).await;
    });
    assert_eq!(answer.status, 200);
    assert_eq!(scene.upstream.asked().len(), 2);
}

#[tokio::test]
async fn beyond_the_limits_callers_are_told_to_come_back() {
    let mut config = quick();
    config.hold.max_requests = 1;
    config.hold.max_seconds = 0.2;
    let scene = Scene::with(config).await;
    scene.enqueue("r").await;
    scene.post("/proxy/pause", json!({"retry_after_seconds": 7, "reason": "weights"})).await;
    let (first, second) = tokio::join!(scene.call("r", json!({"messages": []})), async {
        until("one is held", async || state(&scene).await["held"] == 1).await;
        scene.call("r", json!({"messages": []})).await
    });
    for refused in [first, second] {
        assert_eq!((refused.status, refused.header("retry-after")), (429, Some("7")));
        assert_eq!(refused.header("x-agl-paused"), Some("true"));
        assert_eq!(refused.json(), json!({"error": "gateway paused", "reason": "weights"}));
    }
    assert!(scene.upstream.asked().is_empty());
    assert_eq!(scene.get("/api/rollouts/r/events").await.json()[0]["data"]["http_status"], 429);
}

#[tokio::test]
async fn a_lapsed_lease_lets_calls_go_on() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let paused = scene.post("/proxy/pause", json!({"owner": "trainer", "lease_seconds": 0.3})).await.json();
    assert!(paused["lease_expires_at"].as_f64().unwrap() > 1.7e9);
    assert_eq!(scene.call("r", json!({"messages": []})).await.status, 200);
    assert_eq!(state(&scene).await["paused"], false);
}

#[tokio::test]
async fn a_pause_belongs_to_its_owner() {
    let scene = Scene::start().await;
    let post = async |path: &str, body: Value| scene.post(path, body).await;
    assert_eq!(post("/proxy/pause", json!({"owner": "a"})).await.status, 200);
    assert_eq!(post("/proxy/pause", json!({"owner": "a", "lease_seconds": 60})).await.status, 200);
    let refused = post("/proxy/pause", json!({"owner": "b"})).await;
    assert_eq!(refused.status, 409);
    assert!(refused.detail().contains("'a'"), "{}", refused.detail());
    assert_eq!(post("/proxy/pause", json!({})).await.status, 409);
    assert_eq!(post("/proxy/resume", json!({"owner": "b"})).await.status, 409);
    assert_eq!(state(&scene).await["paused"], true);
    assert_eq!(post("/proxy/resume", json!({"owner": "a"})).await.json()["paused"], false);
    assert_eq!(post("/proxy/resume", json!({"owner": "a"})).await.status, 200);

    post("/proxy/pause", json!({})).await;
    assert_eq!(post("/proxy/pause", json!({"owner": "b"})).await.json()["owner"], "b");
    assert_eq!(post("/proxy/resume", json!({})).await.json()["paused"], false);
    assert_eq!(post("/proxy/pause", json!({"lease_seconds": -1})).await.status, 422);
}

#[tokio::test]
async fn a_harness_that_gives_up_while_held_leaves_no_trace() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.post("/proxy/pause", json!({})).await;
    let impatient = scene.http.post(format!("{}{}", scene.url, chat_path("r", "train"))).bearer_auth(crate::scene::KEY);
    let gave_up = impatient.timeout(Duration::from_millis(100)).body("{}").send().await;
    assert!(gave_up.unwrap_err().is_timeout());
    until("nobody is held", async || state(&scene).await["held"] == 0).await;
    scene.post("/proxy/resume", json!({})).await;
    assert!(scene.upstream.asked().is_empty());
    assert!(scene.events("r").await.is_empty());
}
