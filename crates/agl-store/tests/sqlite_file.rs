//! What is particular to the store in a file: it survives, it refuses what it cannot read, and a full disk loses nothing.
#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::path::PathBuf;

use agl_core::rollout::{Rollout, RolloutCreate};
use agl_store::{SqliteStore, Store, StoreError};
use rusqlite::Connection;
use serde_json::json;

fn rollout(id: &str) -> Rollout {
    let create = RolloutCreate {
        input: json!({}),
        is_train: true,
        config: None,
        metadata: None,
        rollout_id: None,
        retry_of: None,
    };
    Rollout::new(create, id.to_owned(), 1.0)
}

fn fresh() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agl.db");
    (folder, path)
}

#[tokio::test]
async fn a_resolved_write_is_visible_to_another_connection() {
    let (_folder, path) = fresh();
    let store = SqliteStore::open(&path).await.unwrap();
    store.create_rollouts(vec![rollout("r")]).await.unwrap();
    let raw = Connection::open(&path).unwrap();
    let count: i64 = raw.query_row("SELECT count(*) FROM rollouts", [], |row| row.get(0)).unwrap();
    assert_eq!(count, 1);
    let mode: String = raw.query_row("PRAGMA journal_mode", [], |row| row.get(0)).unwrap();
    assert_eq!(mode, "wal");
}

#[tokio::test]
async fn a_store_that_is_opened_again_goes_on_where_it_was() {
    let (_folder, path) = fresh();
    let store = SqliteStore::open(&path).await.unwrap();
    store.create_rollouts(vec![rollout("a"), rollout("b")]).await.unwrap();
    store.delete_rollout("b").await.unwrap();
    let secret = store.secret("keys", [7; 32]).await.unwrap();
    store.close().await;

    let store = SqliteStore::open(&path).await.unwrap();
    assert_eq!(*store.newest_change().borrow(), 3);
    assert!(store.rollout("a").await.unwrap().is_some());
    assert_eq!(store.secret("keys", [8; 32]).await.unwrap(), secret);
    store.create_rollouts(vec![rollout("c")]).await.unwrap();
    assert_eq!(store.changes(3, 10).await.unwrap()[0].cursor, 4);
}

#[tokio::test]
async fn a_database_of_another_version_is_refused_by_name() {
    let (_folder, path) = fresh();
    SqliteStore::open(&path).await.unwrap().close().await;
    Connection::open(&path).unwrap().pragma_update(None, "user_version", 999).unwrap();
    let refused = SqliteStore::open(&path).await.unwrap_err();
    assert!(matches!(refused, StoreError::DatabaseVersion { found: 999, supported: 3, .. }));
    let message = refused.to_string();
    assert!(
        message.contains("agl.db") && message.contains("999") && message.contains("name another file"),
        "{message}"
    );
}

#[tokio::test]
async fn a_file_of_something_else_is_refused_and_left_alone() {
    let (_folder, path) = fresh();
    Connection::open(&path).unwrap().execute_batch("CREATE TABLE theirs (x)").unwrap();
    assert!(matches!(SqliteStore::open(&path).await.unwrap_err(), StoreError::NotOurs { .. }));

    let text = path.with_file_name("notes.txt");
    let content = "not a database, but longer than the header of one would be: ".repeat(20);
    std::fs::write(&text, &content).unwrap();
    assert!(matches!(SqliteStore::open(&text).await.unwrap_err(), StoreError::NotOurs { .. }));
    assert_eq!(std::fs::read_to_string(&text).unwrap(), content);
}

#[tokio::test]
async fn a_folder_that_does_not_exist_is_named() {
    let (folder, _) = fresh();
    let path = folder.path().join("missing").join("agl.db");
    let refused = SqliteStore::open(&path).await.unwrap_err().to_string();
    assert!(refused.contains("missing") && refused.contains("folder exists"), "{refused}");
}

#[tokio::test]
async fn a_second_gateway_on_the_same_file_is_refused() {
    let (_folder, path) = fresh();
    let first = SqliteStore::open(&path).await.unwrap();
    assert!(matches!(SqliteStore::open(&path).await.unwrap_err(), StoreError::InUse { .. }));
    first.close().await;
    SqliteStore::open(&path).await.unwrap();
}

#[tokio::test]
async fn bodies_of_before_a_restart_are_read_and_stood_beside_by_those_of_after_it() {
    let (_folder, path) = fresh();
    let call = |seq: u64| {
        let text: String =
            (0..400 * (seq + 1)).map(|word| format!("{:x} ", word.wrapping_mul(0x9E37_79B9_7F4A_7C15))).collect();
        agl_store::CallRecord {
            rollout_id: "r".to_owned(),
            attempt_id: "0".to_owned(),
            timestamp: 1.0,
            data: serde_json::Map::new(),
            request: text.clone().into(),
            response: text.into(),
            rows: Vec::new(),
            request_digest: [0; 32],
            http_status: 200,
            supersedes: Vec::new(),
        }
    };
    for round in 0..2 {
        let store = SqliteStore::open(&path).await.unwrap();
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        for seq in 0..3 {
            store.record_call(call(3 * round + seq)).await.unwrap();
        }
        for (seq, event) in (0..).zip(store.events("r", "0", None).await.unwrap()) {
            assert_eq!(event.response.unwrap().read().unwrap(), call(seq).response);
        }
        store.close().await;
    }
}
