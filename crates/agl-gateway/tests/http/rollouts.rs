//! The compatible part of the rollouts interface, and ours on top.

use serde_json::{Value, json};

use crate::scene::{KEY, Scene, quick};

#[tokio::test]
async fn the_key_is_taken_from_every_place_an_sdk_puts_it() {
    let scene = Scene::start().await;
    let url = format!("{}/api/models", scene.url);
    for name in ["x-api-key", "x-goog-api-key"] {
        assert_eq!(scene.http.get(&url).header(name, KEY).send().await.unwrap().status(), 200, "{name}");
    }
    assert_eq!(scene.http.get(format!("{url}?key={KEY}")).send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_new_rollout_has_the_originals_fields_and_defaults() {
    let scene = Scene::start().await;
    let answer =
        scene.post("/api/rollouts", json!([{"input": {"q": 1}, "metadata": {"batch_idx": 4, "mine": [1]}}])).await;
    assert_eq!(answer.status, 201);
    let mut rollout = answer.json()[0].clone();
    let created = rollout["status"]["created_at"].as_f64().unwrap();
    assert!(created > 1.7e9);
    assert_eq!(rollout["status"]["updated_at"].as_f64().unwrap(), created);
    for key in ["created_at", "updated_at"] {
        rollout["status"].as_object_mut().unwrap().remove(key);
    }
    let id = rollout["rollout_id"].as_str().unwrap().to_owned();
    assert_eq!(id.len(), 32);
    assert_eq!(
        rollout,
        json!({
            "rollout_id": id, "input": {"q": 1}, "is_train": true,
            "config": {"timeout_seconds": 3600, "local": null, "k8s": null},
            "metadata": {"batch_idx": 4, "sample_idx_in_batch": null, "mine": [1]},
            "status": {"state": "queuing", "k8s_job_name": null, "last_attempt_id": null, "error_message": null, "version": 1},
        })
    );
}

#[tokio::test]
async fn a_known_id_gives_the_existing_rollout_untouched() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.set_state("r", "running").await;
    let again = scene.post("/api/rollouts", json!([{"rollout_id": "r", "input": "other"}])).await;
    assert_eq!(again.status, 201);
    assert_eq!(again.json()[0]["status"]["state"], "running");
    assert_eq!(again.json()[0]["input"], json!({"data_id": "task"}));
}

#[tokio::test]
async fn lists_need_a_state_and_come_oldest_first_in_pages() {
    let scene = Scene::start().await;
    let missing = scene.get("/api/rollouts").await;
    assert_eq!(missing.status, 422);
    assert_eq!(missing.json()["detail"][0]["loc"], json!(["query", "state_in"]));
    assert_eq!(scene.get("/api/rollouts?state_in=done").await.status, 422);
    assert_eq!(scene.get("/api/rollouts?state_in=queuing&limit=x").await.status, 422);

    for id in ["b", "a", "c"] {
        scene.enqueue(id).await;
    }
    scene.post("/api/rollouts", json!([{"rollout_id": "d", "input": 1, "metadata": {"run_id": "mine"}}])).await;
    scene.set_state("a", "running").await;
    let ids = async |query: &str| -> Vec<String> {
        let answer = scene.get(&format!("/api/rollouts?{query}")).await;
        answer.json().as_array().unwrap().iter().map(|r| r["rollout_id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(ids("state_in=queuing&state_in=running").await, ["b", "a", "c", "d"]);
    assert_eq!(ids("state_in=queuing").await, ["b", "c", "d"]);
    assert_eq!(ids("state_in=queuing&limit=1").await, ["b"]);
    assert_eq!(ids("state_in=queuing&limit=1&after=b").await, ["c"]);
    assert_eq!(ids("state_in=queuing&run_id=mine").await, ["d"]);
    assert_eq!(scene.get("/api/rollouts?state_in=queuing&after=gone").await.status, 404);
}

#[tokio::test]
async fn a_patch_follows_the_state_machine() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let patch = async |status: Value| scene.patch("/api/rollouts/r", json!({"status": status})).await;
    assert_eq!(patch(json!({"state": "succeeded"})).await.status, 409);
    let running = patch(json!({"state": "running", "last_attempt_id": "0", "k8s_job_name": "job"})).await;
    assert_eq!(running.status, 200);
    assert_eq!(running.json()["status"]["version"], 2);
    assert_eq!(running.json()["status"]["last_attempt_id"], "0");
    let same = patch(json!({"state": "running"})).await;
    assert_eq!((same.status, same.detail().as_str()), (409, "Rollout r: cannot transition running -> running"));
    assert_eq!(patch(json!({"stat": "running"})).await.status, 422);
    assert_eq!(patch(json!({"state": "done"})).await.status, 422);
    assert_eq!(patch(json!({"state": "failed", "error_message": "no"})).await.json()["status"]["error_message"], "no");
    assert_eq!(patch(json!({"state": "running"})).await.status, 409);
    assert_eq!(scene.patch("/api/rollouts/r", json!({})).await.json()["status"]["version"], 3);
    let unknown = scene.patch("/api/rollouts/nobody", json!({"status": {"state": "running"}})).await;
    assert_eq!((unknown.status, unknown.detail().as_str()), (404, "Rollout not found: nobody"));
}

#[tokio::test]
async fn the_terminal_page_counts_deleted_rollouts_and_deleting_is_idempotent() {
    let scene = Scene::start().await;
    for id in ["a", "b"] {
        scene.enqueue(id).await;
        scene.set_state(id, "failed").await;
    }
    assert_eq!(scene.delete("/api/rollouts/a").await.status, 204);
    assert_eq!(scene.delete("/api/rollouts/a").await.status, 204);
    assert_eq!(scene.get("/api/rollouts/a").await.status, 404);
    let page = scene.get("/api/rollouts/terminal").await.json();
    assert_eq!(
        page,
        json!({"items": [{"rollout_id": "b", "state": "failed", "data_id": "task", "is_train": true}],
               "next_after": 2, "total_terminal": 2})
    );
    assert_eq!(scene.get("/api/rollouts/terminal?after=1&limit=1").await.json()["items"][0]["rollout_id"], "b");
    assert_eq!(scene.get("/api/rollouts/terminal?after=2").await.json()["items"], json!([]));
    assert_eq!(scene.get("/api/rollouts/terminal?after=-5&limit=0").await.json()["next_after"], 1);
}

#[tokio::test]
async fn a_rollout_tells_which_attempts_have_events() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    assert_eq!(scene.get("/api/rollouts/r").await.json()["attempts"], json!([]));
    scene.call("r", json!({"messages": []})).await;
    let detail = scene.get("/api/rollouts/r").await.json();
    assert_eq!(detail["attempts"], json!(["0"]));
    assert_eq!(detail["rollout"]["rollout_id"], "r");
}

#[tokio::test]
async fn cancelling_fails_a_rollout_once() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let cancelled = scene.post("/api/rollouts/r/cancel", json!({})).await;
    assert_eq!(cancelled.status, 200);
    assert_eq!(cancelled.json()["status"]["state"], "failed");
    assert_eq!(cancelled.json()["status"]["error_message"], "cancelled");
    let again = scene.post("/api/rollouts/r/cancel", json!({})).await;
    assert_eq!((again.status, again.json()), (200, cancelled.json()));
    assert_eq!(scene.post("/api/rollouts/nobody/cancel", json!({})).await.status, 404);
}

#[tokio::test]
async fn retrying_one_that_runs_makes_another_attempt_of_it_that_counts() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let attempt = scene.post("/api/rollouts/r/attempts", json!({"attempt_id": "0"})).await;
    assert_eq!(attempt.status, 201);
    scene.set_state("r", "running").await;
    let retry = scene.post("/api/rollouts/r/retry", json!({})).await;
    assert_eq!((retry.status, &retry.json()["rollout_id"]), (200, &json!("r")));
    let status = &retry.json()["status"];
    assert_eq!(json!([status["state"], status["last_attempt_id"]]), json!(["running", "1"]));
    let attempts = scene.get("/api/rollouts/r/attempts").await.json();
    assert_eq!(attempts[1]["state"], "starting");
}

#[tokio::test]
async fn retrying_makes_a_new_rollout_of_one_that_has_ended() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    assert_eq!(scene.post("/api/rollouts/r/retry", json!({})).await.status, 409);
    scene.set_state("r", "failed").await;
    let retry = scene.post("/api/rollouts/r/retry", json!({})).await;
    assert_eq!(retry.status, 201);
    assert_eq!(retry.json()["retry_of"], "r");
    assert_eq!(retry.json()["status"]["state"], "queuing");
    assert_eq!(retry.json()["input"], json!({"data_id": "task"}));
    assert_ne!(retry.json()["rollout_id"], "r");
}

#[tokio::test]
async fn consumed_rollouts_are_marked_and_stay_readable() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let body = json!({"run_id": "run", "step": 4, "rollout_ids": ["r", "gone"]});
    for _ in 0..2 {
        let marked = scene.post("/api/rollouts/consumed", body.clone()).await;
        assert_eq!((marked.status, marked.json()["marked"].clone()), (200, json!(1)));
    }
    assert_eq!(scene.get("/api/rollouts/r").await.json()["rollout"]["consumed"], json!({"run_id": "run", "step": 4}));
}

#[tokio::test]
async fn bad_bodies_and_ids_are_refused_with_their_place() {
    let scene = Scene::start().await;
    let missing = scene.post("/api/rollouts", json!([{"input": 1}, {}])).await;
    assert_eq!(missing.status, 422);
    assert_eq!(missing.json()["detail"][0]["loc"], json!(["body", 1, "input"]));
    assert_eq!(scene.post("/api/rollouts", json!({"input": 1})).await.status, 422);
    let climbing = scene.post("/api/rollouts", json!([{"input": 1, "rollout_id": "../up"}])).await;
    assert_eq!(climbing.status, 422);
    assert_eq!(climbing.json()["detail"][0]["loc"], json!(["body", 0, "rollout_id"]));
}

#[tokio::test]
async fn unknown_paths_and_methods_are_answered_as_json() {
    let scene = Scene::start().await;
    let unknown = scene.get("/api/nothing").await;
    assert_eq!((unknown.status, unknown.json()), (404, json!({"detail": "Not Found"})));
    let wrong = scene.post("/proxy/state", json!({})).await;
    assert_eq!((wrong.status, wrong.json()), (405, json!({"detail": "Method Not Allowed"})));
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_by_name() {
    let scene = Scene::with(agl_gateway::GatewayConfig { body_limit: 1000, ..quick() }).await;
    scene.enqueue("r").await;
    for path in ["/api/rollouts".to_owned(), crate::scene::chat_path("r", "train")] {
        let large = scene.post(&path, json!({"messages": "x".repeat(2000)})).await;
        assert_eq!(large.status, 413, "{path}");
        assert!(large.detail().contains("1000 bytes") && large.detail().contains("body_limit"), "{}", large.detail());
    }
}
