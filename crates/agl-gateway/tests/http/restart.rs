//! A gateway that is started again on its database goes on where it was.

use serde_json::json;

use crate::scene::{KEY, Scene, chat_path, quick, until};

#[tokio::test]
async fn rollouts_events_models_cursors_and_sequences_survive() {
    let mut scene = Scene::start().await;
    for id in ["r", "gone"] {
        scene.enqueue(id).await;
    }
    scene.upstream.will_sample(&[1, 2], &[7, 8]);
    scene.call("r", json!({"messages": [1]})).await;
    scene.set_state("gone", "failed").await;
    scene.delete("/api/rollouts/gone").await;
    let before = (scene.events("r").await, scene.sequences("r").await, scene.get("/api/models").await.json());
    scene.restart().await;
    let after = (scene.events("r").await, scene.sequences("r").await, scene.get("/api/models").await.json());
    assert_eq!(after, before);
    assert_eq!(scene.get("/api/rollouts/terminal").await.json()["next_after"], 1);

    scene.upstream.will_sample(&[1, 2, 7, 8, 3], &[9]);
    scene.call("r", json!({"messages": [2]})).await;
    let sequences = scene.sequences("r").await;
    assert_eq!(sequences["sequences"][0]["token_ids"], json!([1, 2, 7, 8, 3, 9]));
    assert_eq!(scene.events("r").await[1]["data"]["seq"], 1);
}

#[tokio::test]
async fn a_pause_survives_with_its_owner_and_lease() {
    let mut scene = Scene::start().await;
    scene.enqueue("r").await;
    let paused =
        scene.post("/proxy/pause", json!({"owner": "trainer", "reason": "weights", "lease_seconds": 600})).await.json();
    scene.restart().await;
    assert_eq!(scene.get("/proxy/state").await.json(), paused);
    assert_eq!(scene.post("/proxy/resume", json!({"owner": "trainer"})).await.status, 200);
    scene.restart().await;
    assert_eq!(scene.get("/proxy/state").await.json()["paused"], false);
}

#[tokio::test]
async fn keys_stay_valid_with_and_without_a_server_key() {
    for server_key in [KEY, ""] {
        let mut scene = Scene::with(agl_gateway::GatewayConfig { key: server_key.to_owned(), ..quick() }).await;
        scene.enqueue("r").await;
        let grant = scene.post("/api/rollouts/r/attempts", json!({})).await.json();
        scene.restart().await;
        let again = scene.post("/api/rollouts/r/attempts", json!({"attempt_id": "0"})).await.json();
        assert_eq!((&again["key"], &again["reward_key"]), (&grant["key"], &grant["reward_key"]));
        let key = grant["key"].as_str().unwrap();
        let answer = scene.send(reqwest::Method::POST, &chat_path("r", "train"), key, Some(&json!({}))).await;
        assert_eq!(answer.status, 200);
    }
}

/// A crash between the commit and the answer: the row is there, nobody knows whether the harness has it, and it asks again.
#[tokio::test]
async fn an_answer_that_a_crash_swallowed_is_what_its_retry_gets() {
    let mut scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.upstream.will_sample(&[1, 2], &[7]);
    scene.call("r", json!({"messages": [1]})).await;
    scene.stop().await;
    let raw = rusqlite::Connection::open(scene.database()).unwrap();
    raw.execute("DELETE FROM deliveries", []).unwrap();
    drop(raw);
    scene.start_again().await;
    assert_eq!(scene.sequences("r").await["counts"]["live"], 1);
    let answer = scene.call("r", json!({"messages": [1]})).await;
    assert_eq!(answer.text, crate::scene::completion(&[1, 2], &[7]).to_string());
    assert_eq!((scene.upstream.asked().len(), &scene.sequences("r").await["counts"]["live"]), (1, &json!(1)));
}

#[tokio::test]
async fn a_stopping_gateway_lets_calls_finish_and_sends_held_ones_away() {
    let mut scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.upstream.will(crate::scene::Reply::json(200, &crate::scene::completion(&[1, 2], &[7])).waiting());
    let url = format!("{}{}", scene.url, chat_path("r", "train"));
    let call = |body: &'static str| tokio::spawn(scene.http.post(&url).bearer_auth(KEY).body(body).send());
    let running = call(r#"{"messages":[1]}"#);
    scene.upstream.was_asked(1).await;
    scene.post("/proxy/pause", json!({})).await;
    let upstream = scene.upstream.clone();
    let held = call(r#"{"messages":[2]}"#);
    until("one is held", async || scene.get("/proxy/state").await.json()["held"] == 1).await;
    let release = async {
        let sent_away = held.await.unwrap().unwrap();
        assert_eq!(sent_away.status(), 503);
        assert_eq!(sent_away.headers()["retry-after"], "1");
        upstream.release();
        assert_eq!(running.await.unwrap().unwrap().status(), 200);
    };
    tokio::join!(release, scene.stop());
    let raw = rusqlite::Connection::open(scene.database()).unwrap();
    let settled: i64 = raw.query_row("SELECT count(*) FROM deliveries", [], |row| row.get(0)).unwrap();
    assert_eq!(settled, 1);
}

#[tokio::test]
async fn the_memory_store_serves_the_same_interface() {
    let scene = Scene::with(agl_gateway::GatewayConfig { store: "memory".to_owned(), ..quick() }).await;
    scene.enqueue("r").await;
    scene.upstream.will_sample(&[1, 2], &[7, 8]);
    assert_eq!(scene.call("r", json!({"messages": [1]})).await.status, 200);
    assert_eq!(scene.sequences("r").await["sequences"][0]["token_ids"], json!([1, 2, 7, 8]));
}
