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

mod support;

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

#[tokio::test]
async fn a_known_rollout_id_returns_the_existing_rollout_untouched() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        store.patch_rollout("r", becoming(RolloutState::Running), 2.0).await.unwrap();
        let mut again = rollout("r");
        again.input = json!("something else");
        let answers = store.create_rollouts(vec![again, rollout("s")]).await.unwrap();
        assert_eq!(answers[0].status.state, RolloutState::Running);
        assert_eq!(answers[0].input, rollout("r").input);
        assert_eq!(answers[1].rollout_id, "s");
    }
}

#[tokio::test]
async fn a_rollout_created_twice_in_one_request_exists_once() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r"), rollout("r")]).await.unwrap();
        assert_eq!(store.list_rollouts(query(&[RolloutState::Queuing])).await.unwrap().len(), 1);
    }
}

#[tokio::test]
async fn rollouts_are_listed_by_state_oldest_first_in_pages_and_by_run() {
    for Opened { store, .. } in &all().await {
        for id in ["c", "a", "b"] {
            store.create_rollouts(vec![rollout(id)]).await.unwrap();
        }
        let mut other = rollout("other run");
        other.metadata.insert("run_id".to_owned(), json!(17));
        store.create_rollouts(vec![other]).await.unwrap();
        store.patch_rollout("a", becoming(RolloutState::Running), 2.0).await.unwrap();

        let ids = |page: &[Rollout]| page.iter().map(|rollout| rollout.rollout_id.clone()).collect::<Vec<_>>();
        let queuing = store.list_rollouts(query(&[RolloutState::Queuing])).await.unwrap();
        assert_eq!(ids(&queuing), ["c", "b", "other run"]);
        let all = store.list_rollouts(query(&RolloutState::ALL)).await.unwrap();
        assert_eq!(ids(&all), ["c", "a", "b", "other run"]);
        let page = RolloutQuery { after: Some("c".to_owned()), limit: 2, ..query(&RolloutState::ALL) };
        assert_eq!(ids(&store.list_rollouts(page).await.unwrap()), ["a", "b"]);
        let run = RolloutQuery { run_id: Some("17".to_owned()), ..query(&RolloutState::ALL) };
        assert_eq!(ids(&store.list_rollouts(run).await.unwrap()), ["other run"]);
        assert!(store.list_rollouts(query(&[])).await.unwrap().is_empty());
        let unknown = RolloutQuery { after: Some("gone".to_owned()), ..query(&RolloutState::ALL) };
        assert!(matches!(store.list_rollouts(unknown).await, Err(StoreError::RolloutNotFound(id)) if id == "gone"));
    }
}

#[tokio::test]
async fn an_illegal_transition_is_refused_and_changes_nothing() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        let refused = store.patch_rollout("r", becoming(RolloutState::Succeeded), 2.0).await.unwrap_err();
        assert_eq!(refused.to_string(), "Rollout r: cannot transition queuing -> succeeded");
        assert_eq!(store.rollout("r").await.unwrap().unwrap(), rollout("r"));
        let missing = store.patch_rollout("nobody", becoming(RolloutState::Running), 2.0).await.unwrap_err();
        assert!(matches!(missing, StoreError::RolloutNotFound(id) if id == "nobody"));
    }
}

#[tokio::test]
async fn the_terminal_cursor_counts_deleted_rollouts() {
    for Opened { store, .. } in &all().await {
        for id in ["a", "b", "c"] {
            store.create_rollouts(vec![rollout(id)]).await.unwrap();
        }
        for id in ["b", "a", "c"] {
            store.patch_rollout(id, becoming(RolloutState::Failed), 2.0).await.unwrap();
        }
        store.delete_rollout("a").await.unwrap();
        store.delete_rollout("a").await.unwrap();
        let page = store.terminal(0, 2).await.unwrap();
        assert_eq!(page.items.len(), 1);
        assert_eq!(page.items[0].rollout_id, "b");
        assert_eq!(page.items[0].data_id, "task of b");
        assert_eq!((page.next_after, page.total_terminal), (2, 3));
        let rest = store.terminal(2, 10).await.unwrap();
        assert_eq!(rest.items[0].rollout_id, "c");
        assert_eq!(rest.next_after, 3);
        assert_eq!(store.terminal(3, 10).await.unwrap().next_after, 3);
    }
}

#[tokio::test]
async fn the_change_log_tells_what_happened_since_a_cursor() {
    for Opened { store, .. } in &all().await {
        let mut newest = store.newest_change();
        assert_eq!(*newest.borrow_and_update(), 0);
        store.create_rollouts(vec![rollout("a"), rollout("b")]).await.unwrap();
        store.patch_rollout("a", becoming(RolloutState::Running), 2.0).await.unwrap();
        store.patch_rollout("a", StatusPatch::default(), 2.0).await.unwrap();
        store.delete_rollout("b").await.unwrap();
        assert_eq!(store.mark_consumed("run", 4, vec!["a".into(), "gone".into()]).await.unwrap(), 1);
        assert_eq!(store.mark_consumed("run", 4, vec!["a".into()]).await.unwrap(), 1);
        newest.changed().await.unwrap();
        assert_eq!(*newest.borrow(), 5);

        let changes = store.changes(1, 10).await.unwrap();
        let told: Vec<_> =
            changes.iter().map(|c| (c.cursor, c.kind, c.rollout_id.as_str(), c.rollout.is_some())).collect();
        // A store may leave out what came before a deletion.
        assert_eq!(
            told.strip_prefix(&[(2, ChangeKind::Created, "b", false)]).unwrap_or(&told),
            [
                (3, ChangeKind::Updated, "a", true),
                (4, ChangeKind::Deleted, "b", false),
                (5, ChangeKind::Consumed, "a", true),
            ]
        );
        assert_eq!(changes.last().unwrap().rollout.as_ref().unwrap().consumed.as_ref().unwrap().step, 4);
        assert_eq!(store.changes(2, 1).await.unwrap().len(), 1);
    }
}

#[tokio::test]
async fn attempts_are_numbered_from_zero_and_creating_a_known_one_changes_nothing() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        let (first, new) = store.create_attempt("r", None, 2.0).await.unwrap();
        assert_eq!((first.attempt.attempt_id.as_str(), new), ("0", true));
        let (again, new) = store.create_attempt("r", Some("0".into()), 3.0).await.unwrap();
        assert_eq!((again, new), (first, false));
        store.create_attempt("r", Some("7".into()), 3.0).await.unwrap();
        store.create_attempt("r", Some("by-hand".into()), 3.0).await.unwrap();
        let (next, _) = store.create_attempt("r", None, 4.0).await.unwrap();
        assert_eq!(next.attempt.attempt_id, "8");
        let ids: Vec<_> = store.attempts("r").await.unwrap().into_iter().map(|a| a.attempt.attempt_id).collect();
        assert_eq!(ids, ["0", "7", "by-hand", "8"]);
        assert!(matches!(store.create_attempt("nobody", None, 2.0).await, Err(StoreError::RolloutNotFound(_))));
    }
}

#[tokio::test]
async fn an_attempt_ends_with_its_failure_and_withdraws_its_key() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        store.create_attempt("r", None, 2.0).await.unwrap();
        let patch = AttemptPatch {
            state: Some(AttemptState::Failed),
            failure: Some(FailureClass::Infrastructure),
            exit_code: Some(-9),
            ..AttemptPatch::default()
        };
        let detail = store.patch_attempt("r", "0", patch, 3.0).await.unwrap();
        assert!(detail.attempt.agent_ended);
        assert_eq!(store.attempt("r", "0").await.unwrap().unwrap(), detail.attempt);
        let again = AttemptPatch { state: Some(AttemptState::Running), ..AttemptPatch::default() };
        assert!(matches!(store.patch_attempt("r", "0", again, 3.0).await, Err(StoreError::Illegal(_))));
        let missing = store.patch_attempt("r", "1", AttemptPatch::default(), 3.0).await;
        assert!(matches!(missing, Err(StoreError::AttemptNotFound { .. })));
    }
}

#[tokio::test]
async fn the_standing_of_a_call_is_never_older_than_an_acknowledged_change() {
    for Opened { store, .. } in &all().await {
        let standing = async || store.standing("r", "0").await.unwrap();
        assert_eq!(standing().await, None);
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        assert_eq!(standing().await.unwrap().attempt, None);
        store.create_attempt("r", None, 2.0).await.unwrap();
        assert!(!standing().await.unwrap().attempt.unwrap().agent_ended);
        let patch = AttemptPatch { agent_ended: Some(true), ..AttemptPatch::default() };
        store.patch_attempt("r", "0", patch, 3.0).await.unwrap();
        assert!(standing().await.unwrap().attempt.unwrap().agent_ended);
        store.patch_rollout("r", becoming(RolloutState::Running), 4.0).await.unwrap();
        assert_eq!(standing().await.unwrap().rollout.status.state, RolloutState::Running);
        store.mark_consumed("run-a", 1, vec!["r".to_owned()]).await.unwrap();
        assert!(standing().await.unwrap().rollout.consumed.is_some());
        store.delete_rollout("r").await.unwrap();
        assert_eq!(standing().await, None);
    }
}

#[tokio::test]
async fn events_keep_their_order_and_their_payload() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        store.append_event("r", "1", event("note", json!({"z": 1, "a": [null, 2.5]})), 2.0).await.unwrap();
        store.append_event("r", "0", event(REWARD, json!({"value": 1.0})), 3.0).await.unwrap();
        store.append_event("r", "1", event(REWARD, json!({"value": 0.0})), 4.0).await.unwrap();

        let events = store.events("r", "1", None).await.unwrap();
        assert_eq!(events.len(), 2);
        assert_eq!(serde_json::to_string(&events[0].event.data).unwrap(), r#"{"z":1,"a":[null,2.5]}"#);
        assert_eq!(store.events("r", "1", Some(REWARD)).await.unwrap()[0].event.timestamp, 4.0);
        assert!(store.events("r", "2", None).await.unwrap().is_empty());
        assert_eq!(store.attempts_with_events("r").await.unwrap(), ["1", "0"]);
        assert_eq!(store.count_events("r").await.unwrap(), 3);
        assert_eq!(store.count_events("unknown").await.unwrap(), 0);
        let missing = store.append_event("nobody", "0", event("note", json!({})), 2.0).await;
        assert!(matches!(missing, Err(StoreError::RolloutNotFound(_))));
        assert!(matches!(store.events("nobody", "0", None).await, Err(StoreError::RolloutNotFound(_))));
    }
}

#[tokio::test]
async fn a_model_call_comes_back_as_event_and_rows() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        store.create_attempt("r", None, 2.0).await.unwrap();
        let rows = vec![row(0, Delivery::Delivered), row(1, Delivery::Undelivered)];
        store.record_call(call(rows.clone())).await.unwrap();

        let stored = store.calls("r", "0", 0).await.unwrap();
        assert_eq!(stored.iter().map(|s| s.row.clone()).collect::<Vec<_>>(), rows);
        assert_eq!(stored[0].request_digest, [4; 32]);
        assert_eq!((stored[0].settled, stored[1].settled), (false, true));
        assert_eq!(store.calls("r", "0", 1).await.unwrap(), stored[1..]);

        let event = store.events("r", "0", Some(MODEL_REQUEST)).await.unwrap().remove(0).into_event().unwrap();
        assert_eq!(
            serde_json::to_string(&event.data).unwrap(),
            r#"{"model":"m","request":{"messages":[]},"response":{"choices":[{"token_ids":[7,8]}]},"http_status":200,"status":"ok"}"#
        );
        let detail = store.attempts("r").await.unwrap().remove(0);
        assert_eq!(detail.calls, 1);
        assert_eq!(detail.last_call.unwrap().http_status, 200);
        assert_eq!(store.attempts_with_events("r").await.unwrap(), ["0"]);
    }
}

#[tokio::test]
async fn a_response_that_is_no_json_reads_as_an_empty_object() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        let broken = CallRecord { response: b"<html>".as_slice().into(), ..call(vec![row(0, Delivery::Delivered)]) };
        store.record_call(broken).await.unwrap();
        let stored = store.events("r", "0", None).await.unwrap().remove(0);
        assert_eq!(stored.response.as_ref().unwrap().read().unwrap(), b"<html>");
        assert_eq!(stored.into_event().unwrap().data["response"], json!({}));
    }
}

#[tokio::test]
async fn deliveries_are_settled_and_a_superseded_row_stays_superseded() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        store.record_call(call(vec![row(0, Delivery::Undelivered)])).await.unwrap();
        store.record_call(CallRecord { supersedes: vec![0], ..call(vec![row(1, Delivery::Delivered)]) }).await.unwrap();
        let settle = |seq, delivery| Settlement {
            rollout_id: "r".to_owned(),
            attempt_id: "0".to_owned(),
            seqs: vec![seq],
            delivery,
        };
        let gone = Settlement { rollout_id: "nobody".to_owned(), ..settle(0, Delivery::Delivered) };
        store.settle(vec![settle(0, Delivery::Delivered), settle(1, Delivery::Undelivered), gone]).await.unwrap();
        let rows = store.calls("r", "0", 0).await.unwrap();
        assert_eq!(rows[0].row.delivery, Delivery::Superseded);
        assert_eq!(rows[1].row.delivery, Delivery::Undelivered);
        assert!(rows.iter().all(|row| row.settled));
    }
}

#[tokio::test]
async fn a_deleted_rollout_takes_everything_with_it_and_its_id_is_free_again() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        store.create_attempt("r", None, 2.0).await.unwrap();
        store.record_call(call(vec![row(0, Delivery::Delivered)])).await.unwrap();
        store.delete_rollout("r").await.unwrap();
        assert_eq!(store.rollout("r").await.unwrap(), None);
        assert!(matches!(store.record_call(call(vec![])).await, Err(StoreError::RolloutNotFound(_))));

        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        assert!(store.attempts("r").await.unwrap().is_empty());
        assert!(store.calls("r", "0", 0).await.unwrap().is_empty());
        assert!(store.events("r", "0", None).await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn models_are_replaced_by_model_and_endpoint_and_removed_by_either() {
    let model = |model: &str, endpoint: &str, version| RegisteredModel {
        version,
        kind: "vllm".to_owned(),
        trainable: Some(false),
        api_key_env: Some("KEY".to_owned()),
        stream: Some("through".to_owned()),
        ..RegisteredModel::new(model, endpoint)
    };
    for Opened { store, .. } in &all().await {
        store.put_models(vec![model("b", "y", 0), model("a", "x", 0), model("b", "x", 0)]).await.unwrap();
        store.put_models(vec![model("b", "x", 5)]).await.unwrap();
        assert_eq!(store.models().await.unwrap(), [model("a", "x", 0), model("b", "x", 5), model("b", "y", 0)]);
        store.delete_models("b", Some("x")).await.unwrap();
        assert_eq!(store.models().await.unwrap(), [model("a", "x", 0), model("b", "y", 0)]);
        store.delete_models("b", None).await.unwrap();
        assert_eq!(store.models().await.unwrap(), [model("a", "x", 0)]);
    }
}

#[tokio::test]
async fn the_pause_and_the_secret_are_kept() {
    let pause = Pause { retry_after_seconds: 5, reason: None, owner: Some("t".to_owned()), lease_expires_at: 99.5 };
    for Opened { store, .. } in &all().await {
        assert_eq!(store.pause().await.unwrap(), None);
        assert!(store.put_pause(None, Some(pause.clone())).await.unwrap());
        assert_eq!(store.pause().await.unwrap(), Some(pause.clone()));
        let other = Pause { owner: Some("other".to_owned()), ..pause.clone() };
        assert!(!store.put_pause(None, Some(other)).await.unwrap(), "somebody was faster");
        assert!(store.put_pause(Some(pause.clone()), None).await.unwrap());
        assert_eq!(store.pause().await.unwrap(), None);
        assert_eq!(store.secret("keys", [1; 32]).await.unwrap(), [1; 32]);
        assert_eq!(store.secret("keys", [2; 32]).await.unwrap(), [1; 32]);
    }
}

#[tokio::test]
async fn a_closed_store_says_so() {
    for Opened { store, .. } in &all().await {
        store.close().await;
        store.close().await;
        assert!(matches!(store.rollout("r").await, Err(StoreError::Closed)));
        assert!(matches!(store.create_rollouts(vec![rollout("r")]).await, Err(StoreError::Closed)));
    }
}

#[tokio::test]
async fn many_writers_at_once_lose_nothing() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        let tasks: Vec<_> = (0..300_u32)
            .map(|n| {
                let store = Arc::clone(store);
                tokio::spawn(async move {
                    let data: Map<String, Value> = json!({"n": n}).as_object().cloned().unwrap();
                    // Every third one names a rollout that does not exist: its failure must not touch its neighbours.
                    let id = if n % 3 == 0 { "nobody" } else { "r" };
                    store.append_event(id, "0", EventCreate { event_type: "note".into(), data }, 2.0).await.is_ok()
                })
            })
            .collect();
        let mut kept = 0;
        for task in tasks {
            kept += u32::from(task.await.unwrap());
        }
        assert_eq!(kept, 200);
        assert_eq!(store.events("r", "0", None).await.unwrap().len(), 200);
    }
}

#[tokio::test]
async fn a_list_leaves_out_no_state_however_often_and_in_whatever_order_they_are_named() {
    use RolloutState::{Failed, Queuing, Running, Succeeded};
    for Opened { store, _place } in all().await {
        let ids = ["queuing", "running", "succeeded", "failed"];
        store.create_rollouts(ids.map(rollout).to_vec()).await.unwrap();
        for (id, state) in [("running", Running), ("succeeded", Running), ("succeeded", Succeeded), ("failed", Failed)]
        {
            store.patch_rollout(id, becoming(state), 2.0).await.unwrap();
        }
        let states = [Queuing, Running, Queuing, Running, Queuing, Failed];
        let found = store.list_rollouts(query(&states)).await.unwrap();
        let found: Vec<_> = found.iter().map(|rollout| rollout.rollout_id.as_str()).collect();
        assert_eq!(found, ["queuing", "running", "failed"]);
        assert!(store.list_rollouts(query(&[])).await.unwrap().is_empty());
    }
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

#[tokio::test]
async fn bodies_come_back_whole_however_they_are_stored() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r"), rollout("s")]).await.unwrap();
        let mut sent = Vec::new();
        let mut seq = 0;
        for number in 0..80 {
            // A main agent and its sub-agent take turns, beside another rollout.
            for (rollout_id, agent) in [("r", "main"), ("r", "sub"), ("s", "main")] {
                let mut turn = turn(agent, number);
                turn.rows = vec![CallRow { parent: None, shared_prefix: 0, ..row(seq, Delivery::Delivered) }];
                turn.rollout_id = rollout_id.to_owned();
                seq += 1;
                if rollout_id == "r" {
                    sent.push((turn.request.clone(), turn.response.clone()));
                }
                store.record_call(turn).await.unwrap();
            }
        }
        let events = store.events("r", "0", None).await.unwrap();
        let (mut raw, mut stored) = (0, 0);
        for (event, (request, response)) in events.into_iter().zip(&sent) {
            for (body, expected) in [(event.request.unwrap(), request), (event.response.unwrap(), response)] {
                assert_eq!(&body.read().unwrap(), expected);
                raw += expected.len();
                stored += body.stored().len();
            }
        }
        assert!(stored * 10 < raw, "{stored} bytes for {raw}");
    }
}

#[tokio::test]
async fn a_rollout_that_is_deleted_and_made_anew_does_not_lean_on_what_is_gone() {
    for Opened { store, .. } in &all().await {
        for round in 0..2 {
            store.create_rollouts(vec![rollout("r")]).await.unwrap();
            for number in 0..3 {
                let rows = vec![CallRow { parent: None, shared_prefix: 0, ..row(number, Delivery::Delivered) }];
                store.record_call(CallRecord { rows, ..turn("main", number + round) }).await.unwrap();
            }
            for (number, event) in (0..).zip(store.events("r", "0", None).await.unwrap()) {
                assert_eq!(event.request.unwrap().read().unwrap(), turn("main", number + round).request);
            }
            store.delete_rollout("r").await.unwrap();
        }
    }
}

#[tokio::test]
async fn the_stored_bytes_grow_with_what_is_written_and_fall_when_it_is_deleted() {
    let [memory, sqlite, postgres] = &all().await;
    for (Opened { store, .. }, shrinks) in [(memory, true), (sqlite, true), (postgres, false)] {
        let empty = store.stored_bytes().await.unwrap();
        store.create_rollouts(vec![rollout("r"), rollout("s")]).await.unwrap();
        for seq in 0..100 {
            let rows = vec![CallRow { parent: None, shared_prefix: 0, ..row(seq, Delivery::Delivered) }];
            store.record_call(CallRecord { rows, ..turn("main", seq) }).await.unwrap();
        }
        let full = store.stored_bytes().await.unwrap();
        assert!(full > empty + 50_000, "{empty} → {full}");
        store.delete_rollout("r").await.unwrap();
        let left = store.stored_bytes().await.unwrap();
        assert!(left < empty + 20_000 || !shrinks, "{full} → {left}");
        assert!(left > 0);
    }
}

#[tokio::test]
async fn a_change_log_that_is_read_from_before_a_deletion_tells_of_it() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r"), rollout("s")]).await.unwrap();
        store.patch_rollout("r", becoming(RolloutState::Running), 2.0).await.unwrap();
        store.delete_rollout("r").await.unwrap();
        let changes = store.changes(0, 10).await.unwrap();
        let of_r: Vec<_> = changes.iter().filter(|change| change.rollout_id == "r").collect();
        assert_eq!(of_r.last().unwrap().kind, ChangeKind::Deleted);
        assert!(of_r.iter().all(|change| change.rollout.is_none()));
        assert_eq!(changes.last().unwrap().cursor, *store.newest_change().borrow());
    }
}

#[tokio::test]
async fn attempts_are_listed_in_the_order_in_which_they_were_made_whatever_was_heard_of_first() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        store.append_event("r", "b", event("note", json!({})), 1.0).await.unwrap();
        for id in ["a", "b"] {
            store.create_attempt("r", Some(id.to_owned()), 2.0).await.unwrap();
        }
        let ids: Vec<String> =
            store.attempts("r").await.unwrap().into_iter().map(|detail| detail.attempt.attempt_id).collect();
        assert_eq!(ids, ["a", "b"]);
    }
}

#[tokio::test]
async fn what_is_told_of_a_rollout_that_was_made_anew_does_not_concern_its_later_calls() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        let late = Settlement {
            rollout_id: "r".to_owned(),
            attempt_id: "0".to_owned(),
            seqs: vec![1],
            delivery: Delivery::Undelivered,
        };
        store.record_call(call(vec![row(0, Delivery::Delivered)])).await.unwrap();
        store.settle(vec![late]).await.unwrap();
        store.record_call(call(vec![row(1, Delivery::Delivered)])).await.unwrap();
        let calls = store.calls("r", "0", 0).await.unwrap();
        assert_eq!(calls.iter().map(|call| call.row.delivery).collect::<Vec<_>>(), [Delivery::Delivered; 2]);
    }
}
