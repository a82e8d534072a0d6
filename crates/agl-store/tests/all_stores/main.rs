//! One set of behaviours, run against every store.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::sync::Arc;

use agl_core::attempt::{AttemptPatch, AttemptState, FailureClass};
use agl_core::event::{EventCreate, MODEL_REQUEST, REWARD};
use agl_core::rollout::{Rollout, RolloutCreate, RolloutState, StatusPatch};
use agl_core::trajectory::{CallOutcome, CallRow, Delivery, VersionRun};
use agl_store::{
    CallRecord, ChangeKind, MemoryStore, Pause, PostgresStore, RegisteredModel, RolloutQuery, Settlement, SharedStore,
    SqliteStore, StoreError,
};
use serde_json::{Map, Value, json};

mod calls;
mod rollouts;
#[path = "../support/mod.rs"]
mod support;
mod whole;

use support::Database;

/// A store and what must outlive it.
struct Opened {
    store: SharedStore,
    _place: Box<dyn std::any::Any>,
}

async fn all() -> [Opened; 3] {
    let folder = tempfile::tempdir().unwrap();
    let sqlite = SqliteStore::open(folder.path().join("agl.db")).await.unwrap();
    let database = Database::create().await;
    let postgres = PostgresStore::open(&database.url).await.unwrap();
    [
        Opened { store: Arc::new(MemoryStore::new()), _place: Box::new(()) },
        Opened { store: Arc::new(sqlite), _place: Box::new(folder) },
        Opened { store: Arc::new(postgres), _place: Box::new(database) },
    ]
}

fn rollout(id: &str) -> Rollout {
    let metadata = json!({"run_id": "run-a"}).as_object().cloned();
    let create = RolloutCreate {
        input: json!({"data_id": format!("task of {id}"), "nested": {"π": 3.25}}),
        is_train: true,
        config: None,
        metadata,
        rollout_id: None,
        retry_of: None,
    };
    Rollout::new(create, id.to_owned(), 1.5)
}

fn becoming(state: RolloutState) -> StatusPatch {
    StatusPatch { state: Some(state), ..StatusPatch::default() }
}

fn query(states: &[RolloutState]) -> RolloutQuery {
    RolloutQuery { states: states.to_vec(), after: None, limit: 100, run_id: None }
}

fn row(seq: u64, delivery: Delivery) -> CallRow {
    CallRow {
        seq,
        call_id: format!("call-{seq}"),
        choice: 0,
        parent: seq.checked_sub(1),
        shared_prefix: u32::try_from(seq).unwrap() * 7,
        inserted: vec![1, 200, 151_935],
        sampled: vec![7, 8],
        log_probs: (seq.is_multiple_of(2)).then(|| vec![-0.25, -1e-7]),
        versions: vec![VersionRun { version: 3, count: 2 }],
        delivery,
        outcome: CallOutcome::Ok,
        trainable: true,
    }
}

fn call(rows: Vec<CallRow>) -> CallRecord {
    let data = json!({"model": "m", "request": null, "response": null, "http_status": 200, "status": "ok"});
    CallRecord {
        rollout_id: "r".to_owned(),
        attempt_id: "0".to_owned(),
        timestamp: 9.0,
        data: data.as_object().cloned().unwrap(),
        request: br#"{"messages":[]}"#.as_slice().into(),
        response: br#"{"choices":[{"token_ids":[7,8]}]}"#.as_slice().into(),
        rows,
        request_digest: [4; 32],
        http_status: 200,
        supersedes: Vec::new(),
    }
}

fn event(event_type: &str, data: Value) -> EventCreate {
    EventCreate { event_type: event_type.to_owned(), data: data.as_object().cloned().unwrap_or_default() }
}

/// What a harness sends in its turn: all it sent before, and something new.
fn turn(agent: &str, number: u64) -> CallRecord {
    let said = |number: u64| -> String {
        let words = (1..200_u64).map(|word| word.wrapping_mul(number + 3).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        words.map(|word| format!("{word:x} ")).collect()
    };
    let messages: Vec<String> = (0..=number).map(|number| format!("{agent} {}", said(number))).collect();
    CallRecord {
        request: json!({"model": "policy", "messages": messages}).to_string().into(),
        response: json!({"prompt_token_ids": messages, "choices": []}).to_string().into(),
        ..call(vec![row(0, Delivery::Delivered)])
    }
}
