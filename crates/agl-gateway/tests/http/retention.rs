//! What is kept, and what is deleted once there is too much of it.

use agl_gateway::GatewayConfig;
use agl_gateway::config::RetentionConfig;
use serde_json::{Value, json};

use crate::health::value;
use crate::scene::{Scene, quick, until};

/// Limits whose protections have run out at once.
fn eager() -> RetentionConfig {
    RetentionConfig {
        protect_seconds: 0.0,
        protect_unconsumed_seconds: 0.0,
        every_seconds: 0.05,
        ..RetentionConfig::default()
    }
}

async fn keeping(retention: RetentionConfig) -> Scene {
    Scene::with(GatewayConfig { retention, ..quick() }).await
}

impl Scene {
    /// A rollout that has ended, after a call with a body of that many bytes.
    async fn ended(&self, id: &str, is_train: bool, bytes: usize) {
        let create = json!([{"rollout_id": id, "input": {}, "is_train": is_train, "metadata": {"run_id": "run"}}]);
        assert_eq!(self.post("/api/rollouts", create).await.status, 201);
        // Hexadecimal digits of a random number: they compress to half.
        let noise: String = (0..bytes / 16).map(|_| format!("{:016x}", rand::random::<u64>())).collect();
        let path = crate::scene::chat_path(id, if is_train { "train" } else { "val" });
        assert_eq!(self.post(&path, json!({"messages": [{"role": "user", "content": noise}]})).await.status, 200);
        self.set_state(id, "running").await;
        assert_eq!(self.set_state(id, "succeeded").await.status, 200);
    }

    async fn living(&self) -> Vec<String> {
        let path = "/api/rollouts?state_in=queuing&state_in=running&state_in=succeeded&state_in=failed";
        let listed = self.get(path).await.json();
        listed.as_array().unwrap().iter().map(|rollout| rollout["rollout_id"].as_str().unwrap().to_owned()).collect()
    }

    async fn metric(&self, series: &str) -> Option<f64> {
        value(&self.get("/metrics").await.text, series)
    }
}

fn deleted(limit: &str) -> String {
    format!("agl_gateway_retention_deleted_total{{limit=\"{limit}\"}}")
}

#[tokio::test]
async fn of_the_ended_rollouts_only_so_many_are_kept_and_the_cursor_counts_on() {
    let scene = keeping(RetentionConfig { keep_rollouts: Some(2), ..eager() }).await;
    scene.enqueue("open").await;
    for number in 0..5 {
        scene.ended(&format!("r{number}"), number % 2 == 0, 100).await;
    }
    until("two ended rollouts are left", async || scene.living().await.len() == 3).await;
    assert_eq!(scene.living().await, ["open", "r3", "r4"], "the oldest ended go first, and what has not ended stays");
    let page = scene.get("/api/rollouts/terminal").await.json();
    assert_eq!((&page["next_after"], &page["total_terminal"]), (&json!(5), &json!(5)));
    scene.ended("r5", true, 100).await;
    let newer = scene.get("/api/rollouts/terminal?after=5").await.json();
    assert_eq!((&newer["items"][0]["rollout_id"], &newer["next_after"]), (&json!("r5"), &json!(6)));
    until("one more has gone", async || scene.metric(&deleted("count")).await == Some(4.0)).await;
    assert_eq!(scene.get("/api/rollouts/r3/events").await.status, 404);
    assert_eq!(scene.sequences("r5").await["counts"]["live"], 1);
}

#[tokio::test]
async fn what_ended_too_long_ago_is_deleted() {
    let scene = keeping(RetentionConfig { max_age_seconds: Some(0.3), ..eager() }).await;
    scene.enqueue("open").await;
    for id in ["a", "b"] {
        scene.ended(id, true, 100).await;
    }
    until("the ended ones are too old", async || scene.living().await == ["open"]).await;
    until("both are counted", async || scene.metric(&deleted("age")).await == Some(2.0)).await;
}

#[tokio::test]
async fn a_store_that_has_grown_too_large_loses_its_oldest_rollouts() {
    for store in ["memory", &GatewayConfig::default().store] {
        let retention = RetentionConfig { max_bytes: Some(1_500_000), ..eager() };
        let scene = Scene::with(GatewayConfig { retention, store: store.to_owned(), ..quick() }).await;
        for number in 0..20 {
            scene.ended(&format!("r{number:02}"), true, 400_000).await;
        }
        let bytes = async || scene.metric("agl_gateway_store_bytes").await.unwrap();
        until("the store is small enough", async || bytes().await <= 1_500_000.0).await;
        let living = scene.living().await;
        assert!((3..15).contains(&living.len()), "{living:?}");
        assert_eq!(living.last().map(String::as_str), Some("r19"));
        let gone = Some((20 - living.len()) as f64);
        until("all are counted", async || scene.metric(&deleted("size")).await == gone).await;
    }
}

#[tokio::test]
async fn a_train_rollout_that_no_checkpoint_has_consumed_is_not_deleted() {
    let retention = RetentionConfig {
        keep_rollouts: Some(0),
        max_bytes: Some(0),
        max_age_seconds: Some(0.0),
        protect_unconsumed_seconds: 3600.0,
        ..eager()
    };
    let scene = keeping(retention).await;
    for (id, is_train) in [("trained", true), ("waits", true), ("validation", false)] {
        scene.ended(id, is_train, 100).await;
    }
    until("the validation rollout has gone", async || !scene.living().await.contains(&"validation".to_owned())).await;
    until("the others are passed over", async || scene.metric("agl_gateway_retention_protected").await == Some(2.0))
        .await;
    assert_eq!(scene.living().await, ["trained", "waits"]);
    let mark: Value = json!({"run_id": "run", "step": 1, "rollout_ids": ["trained"]});
    assert_eq!(scene.post("/api/rollouts/consumed", mark).await.status, 200);
    until("the consumed one has gone", async || scene.living().await == ["waits"]).await;
    assert_eq!(scene.sequences("waits").await["counts"]["live"], 1);
}

#[tokio::test]
async fn what_has_only_just_ended_is_not_deleted() {
    let retention = RetentionConfig { keep_rollouts: Some(0), protect_seconds: 3600.0, ..eager() };
    let scene = keeping(retention).await;
    scene.ended("r", false, 100).await;
    until("it is passed over", async || scene.metric("agl_gateway_retention_protected").await == Some(1.0)).await;
    assert_eq!(scene.living().await, ["r"]);
}

#[tokio::test]
async fn limits_that_cannot_be_used_are_named() {
    let config = GatewayConfig { retention: RetentionConfig { every_seconds: 0.0, ..eager() }, ..quick() };
    let refused = agl_gateway::Gateway::bind(config).await.unwrap_err().to_string();
    assert!(refused.contains("retention.every_seconds") && refused.contains("60"), "{refused}");
}
