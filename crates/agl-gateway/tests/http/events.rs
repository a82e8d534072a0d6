//! The event log, its triplets, and the sequences and rewards that come of it.

use serde_json::{Value, json};

use crate::scene::{Scene, until};

#[tokio::test]
async fn an_event_is_answered_as_it_was_stored() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let answer =
        scene.post("/api/rollouts/r/attempt/0/events", json!({"event_type": "note", "data": {"b": 1, "a": 2}})).await;
    assert_eq!(answer.status, 200);
    let event = answer.json();
    assert!(event["timestamp"].as_f64().unwrap() > 1.7e9);
    assert_eq!((&event["rollout_id"], &event["attempt_id"]), (&json!("r"), &json!("0")));
    assert_eq!(scene.events("r").await, [event]);
    let bare = scene.post("/api/rollouts/r/attempt/0/events", json!({"event_type": "note"})).await;
    assert_eq!(bare.json()["data"], json!({}));
    assert_eq!(scene.post("/api/rollouts/r/attempt/0/events", json!({"data": {}})).await.status, 422);
    let unknown = scene.post("/api/rollouts/nobody/attempt/0/events", json!({"event_type": "note"})).await;
    assert_eq!((unknown.status, unknown.detail().as_str()), (404, "Rollout not found: nobody"));
    assert_eq!(scene.get("/api/rollouts/nobody/events").await.status, 404);
}

#[tokio::test]
async fn events_are_those_of_the_attempt_that_counts() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    for (attempt, event_type) in [("0", "first"), ("1", "second"), ("1", "third")] {
        let path = format!("/api/rollouts/r/attempt/{attempt}/events");
        scene.post(&path, json!({"event_type": event_type})).await;
    }
    let types = async |query: &str| -> Vec<Value> {
        let events = scene.get(&format!("/api/rollouts/r/events{query}")).await.json();
        events.as_array().unwrap().iter().map(|event| event["event_type"].clone()).collect()
    };
    assert_eq!(types("").await, ["first"]);
    scene.patch("/api/rollouts/r", json!({"status": {"last_attempt_id": "1"}})).await;
    assert_eq!(types("").await, ["second", "third"]);
    assert_eq!(types("?event_type=third").await, ["third"]);
    assert_eq!(types("?attempt_id=0").await, ["first"]);
}

#[tokio::test]
async fn events_after_the_end_are_accepted() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.set_state("r", "failed").await;
    let late =
        scene.post("/api/rollouts/r/attempt/0/events", json!({"event_type": "reward", "data": {"value": 0.5}})).await;
    assert_eq!(late.status, 200);
}

/// DESIGN §5: (prompt [1,2] → 7; the same → 8; [1,2,8,9] → 503; the same → 11): 4 raw, 2 triplets [8] and [11].
#[tokio::test]
async fn four_raw_calls_make_two_triplets() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let unavailable = crate::scene::Reply::json(400, &json!({"error": "overloaded"}));
    scene.upstream.will_sample(&[1, 2], &[7]);
    scene.upstream.will_sample(&[1, 2], &[8]);
    scene.upstream.will(unavailable);
    scene.upstream.will_sample(&[1, 2, 8, 9], &[11]);
    for turn in 0..4 {
        scene.call("r", json!({"messages": [turn]})).await;
    }
    assert_eq!(scene.events("r").await.len(), 4);
    let triplets = scene.get("/api/rollouts/r/events?format=triplet&event_type=model_request").await.json();
    let with_ids: Vec<_> =
        triplets.as_array().unwrap().iter().filter(|t| t["data"]["response_token_ids"] != json!([])).collect();
    let ids: Vec<_> = with_ids.iter().map(|triplet| triplet["data"]["response_token_ids"].clone()).collect();
    assert_eq!(ids, [json!([8]), json!([11])]);
    assert_eq!(with_ids[1]["data"]["prompt_token_ids"], json!([1, 2, 8, 9]));
    assert_eq!(with_ids[1]["data"]["response_log_probs"], json!([-0.11]));
    assert_eq!(with_ids[1]["data"]["server"], json!({"model": "test-model", "version": 3}));
}

/// The same golden case, told by events alone: the form in which the original's tests state it.
#[tokio::test]
async fn posted_model_requests_make_triplets_too() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let calls: [(&[u32], Option<u32>); 4] =
        [(&[1, 2], Some(7)), (&[1, 2], Some(8)), (&[1, 2, 8, 9], None), (&[1, 2, 8, 9], Some(11))];
    for (prompt, sampled) in calls {
        let response = json!({"prompt_token_ids": prompt, "choices": [{"token_ids": sampled.map(|id| vec![id])}]});
        let status = if sampled.is_some() { 200 } else { 503 };
        let data = json!({"response": response, "http_status": status});
        scene.post("/api/rollouts/r/attempt/0/events", json!({"event_type": "model_request", "data": data})).await;
    }
    assert_eq!(scene.events("r").await.len(), 4);
    let triplets = scene.get("/api/rollouts/r/events?format=triplet").await.json();
    let ids: Vec<_> = triplets.as_array().unwrap().iter().map(|t| t["data"]["response_token_ids"].clone()).collect();
    assert_eq!(ids, [json!([8]), json!([11])]);
}

#[tokio::test]
async fn sequences_come_with_the_outcome_and_with_rewards_of_calls() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.upstream.will_sample(&[1, 2], &[7, 8]);
    scene.upstream.will_sample(&[1, 2, 7, 8, 3], &[9]);
    let first = scene.call("r", json!({"messages": [1]})).await;
    scene.call("r", json!({"messages": [2]})).await;
    let call_id = first.header("x-agl-call-id").unwrap().to_owned();
    for data in [json!({"value": 0.25, "call_id": call_id}), json!({"value": 0.0}), json!({"value": 1.0})] {
        scene.post("/api/rollouts/r/attempt/0/events", json!({"event_type": "reward", "data": data})).await;
    }
    let sequences = scene.sequences("r").await;
    assert_eq!((&sequences["rollout_id"], &sequences["attempt_id"]), (&json!("r"), &json!("0")));
    assert_eq!(sequences["reward"], 1.0);
    assert_eq!(sequences["call_rewards"], json!([[call_id, 0.25]]));
    let rows = sequences["sequences"].as_array().unwrap();
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0]["token_ids"], json!([1, 2, 7, 8, 3, 9]));
    assert_eq!(rows[0]["mask"], json!([0, 0, 1, 1, 0, 1]));
    assert_eq!(rows[0]["policy_versions"], json!([-1, -1, 3, 3, -1, 3]));
    assert_eq!(rows[0]["calls"][0]["call_id"], json!(call_id));
    assert_eq!(sequences["counts"]["merges"], 1);

    let transitions = scene.get("/api/rollouts/r/sequences?level=transition").await.json();
    assert_eq!(transitions["sequences"].as_array().unwrap().len(), 2);
    assert_eq!(scene.get("/api/rollouts/r/sequences?attempt_id=1").await.json()["counts"]["calls"], 0);
    assert_eq!(scene.get("/api/rollouts/r/sequences?level=token").await.status, 422);
    assert_eq!(scene.get("/api/rollouts/nobody/sequences").await.status, 404);
}

#[tokio::test]
async fn a_rollout_that_never_called_has_no_sequences_and_no_reward() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let sequences = scene.sequences("r").await;
    assert_eq!((&sequences["reward"], &sequences["sequences"]), (&Value::Null, &json!([])));
}

#[tokio::test]
async fn an_event_is_on_disk_before_the_answer_leaves() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let raw = rusqlite::Connection::open(scene.database()).unwrap();
    for turn in 1..=5_u32 {
        assert_eq!(scene.call("r", json!({"messages": [turn]})).await.status, 200);
        let counts: (u32, u32) = raw
            .query_row("SELECT count(*), count(rows) FROM events", [], |row| Ok((row.get(0)?, row.get(1)?)))
            .unwrap();
        assert_eq!(counts, (turn, turn));
    }
    until("deliveries are settled", async || {
        raw.query_row("SELECT count(*) FROM deliveries", [], |row| row.get::<_, u32>(0)).unwrap() == 5
    })
    .await;
}
