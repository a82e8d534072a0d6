//! The stream of changes.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::scene::{KEY, Scene};

/// A watcher's connection.
pub struct Watcher {
    response: reqwest::Response,
    buffer: String,
}

impl Watcher {
    pub async fn connect(scene: &Scene, query: &str) -> Self {
        let url = format!("{}/api/rollouts/watch{query}", scene.url);
        let response = scene.http.get(url).bearer_auth(KEY).send().await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self { response, buffer: String::new() }
    }

    /// The next event: its id and data.
    async fn next(&mut self) -> Option<(u64, Value)> {
        loop {
            if let Some(end) = self.buffer.find("\n\n") {
                let block: String = self.buffer.drain(..end + 2).collect();
                let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
                let (Some(id), Some(data)) = (field("id:"), field("data:")) else { continue };
                assert_eq!(field("event:"), Some("rollout"));
                return Some((id.parse().unwrap(), serde_json::from_str(data).unwrap()));
            }
            let chunk =
                tokio::time::timeout(Duration::from_secs(20), self.response.chunk()).await.expect("an event comes");
            self.buffer.push_str(std::str::from_utf8(&chunk.unwrap()?).unwrap());
        }
    }

    pub async fn told(&mut self) -> (u64, String, String) {
        let (id, data) = self.next().await.unwrap();
        assert_eq!(data["cursor"], id);
        (id, data["kind"].as_str().unwrap().to_owned(), data["rollout_id"].as_str().unwrap().to_owned())
    }
}

fn told(cursor: u64, kind: &str, rollout: &str) -> (u64, String, String) {
    (cursor, kind.to_owned(), rollout.to_owned())
}

#[tokio::test]
async fn a_watch_begins_with_what_has_not_ended_and_goes_on_with_what_changes() {
    let scene = Scene::start().await;
    for id in ["a", "b", "done"] {
        scene.enqueue(id).await;
    }
    scene.set_state("done", "failed").await;
    let mut watcher = Watcher::connect(&scene, "").await;
    assert_eq!(watcher.told().await, told(4, "snapshot", "a"));
    assert_eq!(watcher.told().await, told(4, "snapshot", "b"));
    scene.enqueue("c").await;
    scene.set_state("a", "running").await;
    scene.delete("/api/rollouts/b").await;
    scene.post("/api/rollouts/consumed", json!({"run_id": "x", "step": 1, "rollout_ids": ["done"]})).await;
    assert_eq!(watcher.told().await, told(5, "created", "c"));
    let (_, updated) = watcher.next().await.unwrap();
    assert_eq!((&updated["kind"], &updated["rollout"]["status"]["state"]), (&json!("updated"), &json!("running")));
    let (_, deleted) = watcher.next().await.unwrap();
    assert_eq!(
        (&deleted["kind"], &deleted["rollout"], &deleted["rollout_id"]),
        (&json!("deleted"), &Value::Null, &json!("b"))
    );
    assert_eq!(watcher.told().await, told(8, "consumed", "done"));
}

#[tokio::test]
async fn a_watch_resumes_from_its_cursor_also_after_a_restart() {
    let mut scene = Scene::start().await;
    scene.enqueue("a").await;
    let mut watcher = Watcher::connect(&scene, "").await;
    let (cursor, ..) = watcher.told().await;
    scene.restart().await;
    assert_eq!(watcher.next().await, None, "a stopping gateway ends its streams");
    scene.enqueue("b").await;
    let mut watcher = Watcher::connect(&scene, &format!("?after={cursor}")).await;
    assert_eq!(watcher.told().await, told(2, "created", "b"));
    let mut from_the_start = Watcher::connect(&scene, "?after=0").await;
    assert_eq!(from_the_start.told().await, told(1, "created", "a"));
    assert_eq!(from_the_start.told().await, told(2, "created", "b"));
    assert_eq!(scene.get("/api/rollouts/watch?after=x").await.status, 422);
}

#[tokio::test]
async fn a_cursor_of_another_store_begins_with_a_snapshot() {
    let scene = Scene::start().await;
    scene.enqueue("a").await;
    let mut watcher = Watcher::connect(&scene, "?after=900").await;
    assert_eq!(watcher.told().await, told(1, "snapshot", "a"));
    scene.enqueue("b").await;
    assert_eq!(watcher.told().await, told(2, "created", "b"));
}

#[tokio::test]
async fn a_snapshot_of_many_rollouts_is_complete() {
    let scene = Scene::start().await;
    let rollouts: Vec<Value> = (0..1200).map(|n| json!({"rollout_id": format!("r{n}"), "input": n})).collect();
    scene.post("/api/rollouts", json!(rollouts)).await;
    let mut watcher = Watcher::connect(&scene, "").await;
    for n in 0..1200 {
        assert_eq!(watcher.told().await, told(1200, "snapshot", &format!("r{n}")));
    }
    scene.enqueue("next").await;
    assert_eq!(watcher.told().await, told(1201, "created", "next"));
}

#[tokio::test]
async fn a_new_rollout_reaches_a_watcher_soon() {
    let scene = Scene::start().await;
    let mut watcher = Watcher::connect(&scene, "").await;
    let mut waits = Vec::new();
    for n in 0..20 {
        let started = Instant::now();
        let (_, told) = tokio::join!(scene.enqueue(Box::leak(format!("r{n}").into_boxed_str())), watcher.told());
        assert_eq!(told.1, "created");
        waits.push(started.elapsed());
    }
    waits.sort_unstable();
    println!("from POST to watcher: median {:?}, slowest {:?}", waits[10], waits[19]);
    assert!(waits[10] < Duration::from_millis(500));
}
