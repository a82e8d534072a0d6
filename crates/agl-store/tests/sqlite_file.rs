//! What is particular to the store in a file: it survives, it refuses what it cannot read, and a full disk loses nothing.
#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::path::PathBuf;

use agl_core::rollout::{Rollout, RolloutCreate, RolloutState, StatusPatch};
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
    assert!(matches!(refused, StoreError::DatabaseVersion { found: 999, supported: 4, .. }));
    let message = refused.to_string();
    assert!(message.contains("agl.db") && message.contains("999") && message.contains("name another one"), "{message}");
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

/// A rollout that ends after a call with `bytes` of what cannot be compressed.
async fn a_rollout_of(store: &SqliteStore, id: &str, bytes: usize) {
    let mut state = id.bytes().fold(0x9E37_79B9_7F4A_7C15_u64, |state, byte| state.rotate_left(9) ^ u64::from(byte));
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    })
    .take(bytes)
    .collect();
    store.create_rollouts(vec![rollout(id)]).await.unwrap();
    let call = agl_store::CallRecord {
        rollout_id: id.to_owned(),
        attempt_id: "0".to_owned(),
        timestamp: 1.0,
        data: serde_json::Map::new(),
        request: noise.into(),
        response: bytes::Bytes::new(),
        rows: Vec::new(),
        request_digest: [0; 32],
        http_status: 200,
        supersedes: Vec::new(),
    };
    store.record_call(call).await.unwrap();
    for state in [RolloutState::Running, RolloutState::Succeeded] {
        let patch = StatusPatch { state: Some(state), ..StatusPatch::default() };
        store.patch_rollout(id, patch, 2.0).await.unwrap();
    }
}

#[tokio::test]
async fn a_file_whose_oldest_rollouts_are_deleted_does_not_grow_and_keeps_its_cursors() {
    let (_folder, path) = fresh();
    let store = SqliteStore::open(&path).await.unwrap();
    let mut largest_early = 0;
    let mut largest = 0;
    for number in 0..400_u64 {
        a_rollout_of(&store, &format!("r{number}"), 100_000).await;
        if let Some(old) = number.checked_sub(20) {
            store.delete_rollout(&format!("r{old}")).await.unwrap();
        }
        let size = std::fs::metadata(&path).unwrap().len();
        largest = largest.max(size);
        if number < 100 {
            largest_early = largest;
        }
    }
    assert!(largest <= largest_early + largest_early / 10, "{largest_early} bytes after 100 rollouts, later {largest}");
    let page = store.terminal(0, 1000).await.unwrap();
    assert_eq!((page.items.len(), page.next_after, page.total_terminal), (20, 400, 400));
    store.close().await;
    let raw = Connection::open(&path).unwrap();
    for (table, most) in
        [("rollouts", 20), ("terminal_order", 20), ("attempts", 20), ("events", 20 * 2), ("changes", 20 * 3 + 380)]
    {
        let rows: i64 = raw.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0)).unwrap();
        assert!(rows <= most, "{rows} rows of {table}");
    }
    let whole: String = raw.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(whole, "ok");
}

#[tokio::test]
async fn a_file_that_has_become_too_large_shrinks_when_its_rollouts_are_deleted() {
    let (_folder, path) = fresh();
    let store = SqliteStore::open(&path).await.unwrap();
    for number in 0..200 {
        a_rollout_of(&store, &format!("r{number}"), 150_000).await;
    }
    let full = store.stored_bytes().await.unwrap();
    for number in 0..190 {
        store.delete_rollout(&format!("r{number}")).await.unwrap();
    }
    let left = store.stored_bytes().await.unwrap();
    assert!(left * 10 < full, "{full} → {left}");
    store.close().await;
    let size = std::fs::metadata(&path).unwrap().len();
    assert!(size < full / 3, "{size} bytes for {left}, once {full}");
    let store = SqliteStore::open(&path).await.unwrap();
    for number in 190..200 {
        let event = store.events(&format!("r{number}"), "0", None).await.unwrap().remove(0);
        assert_eq!(event.request.unwrap().read().unwrap().len(), 150_000);
    }
}

#[tokio::test]
async fn a_file_that_still_has_the_ends_of_deleted_rollouts_counts_but_does_not_list_them() {
    let (_folder, path) = fresh();
    SqliteStore::open(&path).await.unwrap().close().await;
    // As versions before this one left it.
    let raw = Connection::open(&path).unwrap();
    raw.execute(
        "INSERT INTO terminal_order (rollout_id, state, data_id, is_train) VALUES ('old', 'failed', '', 1)",
        [],
    )
    .unwrap();
    drop(raw);
    let store = SqliteStore::open(&path).await.unwrap();
    a_rollout_of(&store, "r", 10).await;
    let page = store.terminal(0, 10).await.unwrap();
    assert_eq!((page.items.len(), page.next_after, page.total_terminal), (1, 2, 2));
    assert_eq!(page.items[0].rollout_id, "r");
}
