//! What is stuck is named, once.

use std::time::Duration;

use agl_gateway::GatewayConfig;
use serde_json::json;

use crate::scene::{Reply, Scene, completion, quick, until};

fn watchful() -> GatewayConfig {
    GatewayConfig { watchdog_seconds: 0.2, ..quick() }
}

async fn metric(scene: &Scene, series: &str) -> f64 {
    let text = scene.get("/metrics").await.text;
    let found = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.trim().parse().ok());
    found.unwrap_or(0.0)
}

/// How many things wait too long now, and how many ever have.
async fn stuck(scene: &Scene, waits_for: &str) -> (f64, f64) {
    let label = format!("{{waits_for=\"{waits_for}\"}}");
    let now = metric(scene, &format!("agl_gateway_stuck{label}")).await;
    (now, metric(scene, &format!("agl_gateway_stuck_total{label}")).await)
}

#[tokio::test]
async fn a_call_at_its_server_for_too_long_is_named_once_and_forgotten_when_it_is_answered() {
    let scene = Scene::with(watchful()).await;
    scene.enqueue("r").await;
    scene.upstream.will(Reply::json(200, &completion(&[1], &[2])).waiting());
    let (answer, ()) = tokio::join!(scene.call("r", json!({})), async {
        until("it is named", async || stuck(&scene, "server").await == (1.0, 1.0)).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(stuck(&scene, "server").await, (1.0, 1.0), "once");
        scene.upstream.release();
    });
    assert_eq!(answer.status, 200);
    assert_eq!(stuck(&scene, "server").await, (0.0, 1.0));
    assert_eq!(stuck(&scene, "resume").await, (0.0, 0.0), "it waited for nothing else");
}

#[tokio::test]
async fn a_call_held_for_long_is_named() {
    let scene = Scene::with(watchful()).await;
    scene.enqueue("r").await;
    scene.post("/proxy/pause", json!({"owner": "trainer"})).await;
    let (answer, ()) = tokio::join!(scene.call("r", json!({})), async {
        until("it is named", async || stuck(&scene, "resume").await == (1.0, 1.0)).await;
        scene.post("/proxy/resume", json!({})).await;
    });
    assert_eq!((answer.status, stuck(&scene, "resume").await), (200, (0.0, 1.0)));
}

#[tokio::test]
async fn a_write_that_does_not_commit_and_deliveries_that_are_not_written_are_named() {
    let scene = Scene::with(watchful()).await;
    scene.enqueue("r").await;
    assert_eq!(scene.call("r", json!({"messages": [1]})).await.status, 200);
    let other = rusqlite::Connection::open(scene.database()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let (answer, ()) = tokio::join!(scene.call("r", json!({"messages": [2]})), async {
        until("the write is named", async || stuck(&scene, "commit").await == (1.0, 1.0)).await;
        until("the deliveries are named", async || stuck(&scene, "deliveries").await.0 == 1.0).await;
        other.execute_batch("ROLLBACK").unwrap();
    });
    assert_eq!((answer.status, stuck(&scene, "commit").await), (200, (0.0, 1.0)));
}

#[tokio::test]
#[expect(clippy::disallowed_methods, reason = "the gateway runs on this very thread, which is to come late")]
async fn an_event_loop_that_comes_late_is_counted() {
    let scene = Scene::with(watchful()).await;
    std::thread::sleep(Duration::from_millis(700));
    let late = async || metric(&scene, "agl_gateway_event_loop_late_total").await >= 1.0;
    until("it is counted", late).await;
    assert!(scene.get("/metrics").await.text.contains("agl_gateway_event_loop_lag_seconds"));
}
