//! Attempts, their keys and what the keys open.

use reqwest::Method;
use serde_json::{Value, json};

use crate::scene::{Answer, Reply, Scene, chat_path, quick};

async fn attempt(scene: &Scene, id: &str) -> (String, String) {
    let grant = scene.post(&format!("/api/rollouts/{id}/attempts"), json!({})).await;
    assert_eq!(grant.status, 201, "{}", grant.text);
    let text = |name: &str| grant.json()[name].as_str().unwrap().to_owned();
    (text("key"), text("reward_key"))
}

async fn event(scene: &Scene, id: &str, key: &str, event_type: &str) -> Answer {
    let body = json!({"event_type": event_type, "data": {"value": 1.0}});
    scene.send(Method::POST, &format!("/api/rollouts/{id}/attempt/0/events"), key, Some(&body)).await
}

async fn call(scene: &Scene, id: &str, key: &str) -> Answer {
    scene.send(Method::POST, &chat_path(id, "train"), key, Some(&json!({"messages": []}))).await
}

#[tokio::test]
async fn attempts_are_numbered_and_asking_again_gives_the_same_keys() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let first = scene.post("/api/rollouts/r/attempts", json!({})).await.json();
    assert_eq!(first["attempt_id"], "0");
    assert_eq!((&first["state"], &first["calls"], &first["last_call"]), (&json!("starting"), &json!(0), &Value::Null));
    let again = scene.post("/api/rollouts/r/attempts", json!({"attempt_id": "0"})).await;
    assert_eq!((again.status, again.json()), (201, first));
    let second = scene.post("/api/rollouts/r/attempts", json!({})).await.json();
    assert_eq!(second["attempt_id"], "1");
    let listed = scene.get("/api/rollouts/r/attempts").await.json();
    assert_eq!(listed.as_array().unwrap().len(), 2);
    assert!(listed[0].get("key").is_none());
    assert_eq!(scene.get("/api/rollouts/nobody/attempts").await.status, 404);
    assert_eq!(scene.post("/api/rollouts/r/attempts", json!({"attempt_id": "a/b"})).await.status, 422);
}

#[tokio::test]
async fn an_attempt_tells_how_its_calls_went() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let (key, _) = attempt(&scene, "r").await;
    call(&scene, "r", &key).await;
    scene.upstream.will(Reply::json(400, &json!({"error": "no"})));
    call(&scene, "r", &key).await;
    let listed = scene.get("/api/rollouts/r/attempts").await.json();
    assert_eq!(listed[0]["calls"], 2);
    assert_eq!(listed[0]["last_call"], json!({"http_status": 400, "status": "error"}));
}

#[tokio::test]
async fn a_patch_follows_the_attempts_state_machine() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    attempt(&scene, "r").await;
    let patch = async |body: Value| scene.patch("/api/rollouts/r/attempts/0", body).await;
    assert_eq!(patch(json!({"state": "succeeded"})).await.status, 409);
    assert_eq!(patch(json!({"state": "running", "runner": {"pid": 7}})).await.json()["runner"]["pid"], 7);
    let failed = patch(json!({"state": "failed", "failure": "timeout", "exit_code": -9})).await.json();
    assert_eq!((&failed["failure"], &failed["agent_ended"]), (&json!("timeout"), &json!(true)));
    assert_eq!(patch(json!({"nonsense": 1})).await.status, 422);
    assert_eq!(scene.patch("/api/rollouts/r/attempts/9", json!({})).await.status, 404);
}

#[tokio::test]
async fn an_agent_posts_rewards_and_notes_of_its_own_but_forges_no_call() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let (key, _) = attempt(&scene, "r").await;
    for (event_type, status) in [("reward", 200), ("note", 200), ("model_request", 403)] {
        assert_eq!(event(&scene, "r", &key, event_type).await.status, status, "{event_type}");
    }
}

#[tokio::test]
async fn a_reward_key_posts_events_but_does_not_call_the_model() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let (_, reward_key) = attempt(&scene, "r").await;
    assert_eq!(event(&scene, "r", &reward_key, "reward").await.status, 200);
    assert_eq!(call(&scene, "r", &reward_key).await.status, 403);
    assert_eq!(scene.upstream.asked().len(), 0);
}

#[tokio::test]
async fn where_the_evaluator_rewards_the_agent_cannot() {
    let scene = Scene::start().await;
    let config = json!({"reward_source": "evaluator"});
    scene.post("/api/rollouts", json!([{"rollout_id": "r", "input": 1, "config": config}])).await;
    let (key, reward_key) = attempt(&scene, "r").await;
    let refused = event(&scene, "r", &key, "reward").await;
    assert_eq!(refused.status, 403);
    assert!(refused.detail().contains("evaluator"));
    assert_eq!(event(&scene, "r", &key, "note").await.status, 200);
    assert_eq!(event(&scene, "r", &reward_key, "reward").await.status, 200);
}

#[tokio::test]
async fn where_the_evaluator_rewards_nobody_does_so_by_leaving_out_the_key() {
    let scene = Scene::with(agl_gateway::GatewayConfig { key: String::new(), ..quick() }).await;
    for (id, config) in [("r", json!({"reward_source": "evaluator"})), ("free", json!({}))] {
        let create = json!([{"rollout_id": id, "input": 1, "config": config}]);
        assert_eq!(scene.send(Method::POST, "/api/rollouts", "", Some(&create)).await.status, 201);
    }
    let grant = scene.send(Method::POST, "/api/rollouts/r/attempts", "", Some(&json!({}))).await.json();
    let refused = event(&scene, "r", "", "reward").await;
    assert_eq!(refused.status, 403);
    assert!(refused.detail().contains("evaluator's key"), "{}", refused.detail());
    assert_eq!(event(&scene, "r", grant["reward_key"].as_str().unwrap(), "reward").await.status, 200);
    assert_eq!(event(&scene, "r", "", "note").await.status, 200);
    assert_eq!(event(&scene, "free", "", "reward").await.status, 200);
}

#[tokio::test]
async fn an_agents_key_opens_only_the_mode_of_its_rollout() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let (key, _) = attempt(&scene, "r").await;
    let refused = scene.send(Method::POST, &chat_path("r", "val"), &key, Some(&json!({"messages": []}))).await;
    assert_eq!(refused.status, 403);
    assert!(refused.detail().contains("mode train") && refused.detail().contains("mode val"), "{}", refused.detail());
    assert_eq!(call(&scene, "r", &key).await.status, 200);
}

#[tokio::test]
async fn an_attempt_tells_whether_the_gateway_was_restarted_under_it() {
    let mut scene = Scene::start().await;
    scene.enqueue("r").await;
    attempt(&scene, "r").await;
    let younger = async |scene: &Scene| {
        let told = scene.get("/api/rollouts/r/attempts").await.json()[0].clone();
        told["gateway_started_at"].as_f64().unwrap() > told["created_at"].as_f64().unwrap()
    };
    assert!(!younger(&scene).await);
    scene.restart().await;
    assert!(younger(&scene).await);
    let patched = scene.patch("/api/rollouts/r/attempts/0", json!({"state": "running"})).await.json();
    assert!(patched["gateway_started_at"].is_f64());
}

#[tokio::test]
async fn keys_end_with_whom_they_were_made_for() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let (key, reward_key) = attempt(&scene, "r").await;
    scene.patch("/api/rollouts/r/attempts/0", json!({"state": "running"})).await;
    scene.patch("/api/rollouts/r/attempts/0", json!({"agent_ended": true})).await;
    let ended = call(&scene, "r", &key).await;
    assert_eq!(ended.status, 403);
    assert!(ended.detail().contains("agent of attempt 0"), "{}", ended.detail());
    assert_eq!(event(&scene, "r", &key, "note").await.status, 403);
    assert_eq!(event(&scene, "r", &reward_key, "reward").await.status, 200);
    scene.patch("/api/rollouts/r/attempts/0", json!({"state": "succeeded"})).await;
    assert_eq!(event(&scene, "r", &reward_key, "reward").await.status, 403);
}

#[tokio::test]
async fn an_agents_key_ends_with_its_rollout() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    let (key, reward_key) = attempt(&scene, "r").await;
    scene.post("/api/rollouts/r/cancel", json!({})).await;
    assert_eq!(call(&scene, "r", &key).await.status, 403);
    assert_eq!(event(&scene, "r", &reward_key, "reward").await.status, 200);
    assert_eq!(scene.call("r", json!({})).await.status, 200);
    scene.delete("/api/rollouts/r").await;
    assert_eq!(call(&scene, "r", &key).await.status, 401);
}
