//! What is particular to the store on a server: several gateways share it, and the server may be away.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use agl_core::rollout::{Rollout, RolloutCreate, RolloutState, StatusPatch};
use agl_core::trajectory::{CallOutcome, CallRow, Delivery, VersionRun};
use agl_store::{
    CallRecord, Pause, Peers, PostgresStore, Presence, RegisteredModel, Settlement, Store, StoreError, Writer,
};
use serde_json::json;
use sqlx::{Executor, Row};
use support::Database;

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

/// The call with the number `seq` of its attempt, recorded by `who`.
fn call(who: &str, seq: u64) -> CallRecord {
    let row = CallRow {
        seq,
        call_id: format!("{who}-{seq}"),
        choice: 0,
        parent: seq.checked_sub(1),
        shared_prefix: 0,
        inserted: vec![1],
        sampled: vec![7],
        log_probs: None,
        versions: vec![VersionRun { version: 3, count: 1 }],
        delivery: Delivery::Delivered,
        outcome: CallOutcome::Ok,
        trainable: true,
    };
    let said: String = (0..200 * (seq + 1)).map(|n| format!("{:x} ", n.wrapping_mul(0x9E37_79B9_7F4A_7C15))).collect();
    CallRecord {
        rollout_id: "r".to_owned(),
        attempt_id: "0".to_owned(),
        timestamp: 1.0,
        data: json!({"status": "ok", "by": who}).as_object().cloned().unwrap(),
        request: said.into(),
        response: format!("{{\"by\":\"{who}\",\"seq\":{seq}}}").into(),
        rows: vec![row],
        request_digest: [0; 32],
        http_status: 200,
        supersedes: Vec::new(),
    }
}

async fn open(database: &Database) -> Arc<PostgresStore> {
    Arc::new(PostgresStore::open(&database.url).await.unwrap())
}

/// Two gateways on one database that has a rollout `r`.
async fn two(database: &Database) -> [Arc<PostgresStore>; 2] {
    let stores = [open(database).await, open(database).await];
    stores[0].create_rollouts(vec![rollout("r")]).await.unwrap();
    stores
}

fn refusal(opened: Result<PostgresStore, StoreError>) -> String {
    opened.expect_err("it is refused").to_string()
}

#[tokio::test]
async fn a_resolved_write_is_visible_to_another_connection_and_was_flushed() {
    let database = Database::create().await;
    // A careless default of the database does not count for our sessions.
    let name = database.url.rsplit('/').next().unwrap().split('?').next().unwrap().to_owned();
    let careless = format!("ALTER DATABASE {name} SET synchronous_commit = off");
    database.connect().await.execute(careless.as_str()).await.unwrap();
    let store = open(&database).await;
    store.create_rollouts(vec![rollout("r")]).await.unwrap();
    let mut raw = database.connect().await;
    let count: i64 = sqlx::query_scalar("SELECT count(*) FROM agl.rollouts").fetch_one(&mut raw).await.unwrap();
    assert_eq!(count, 1);
    // A trigger tells under which setting a write of ours was made.
    raw.execute(
        "CREATE TABLE public.seen (setting TEXT);
         CREATE FUNCTION public.see() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN INSERT INTO public.seen VALUES (current_setting(''synchronous_commit'')); RETURN NEW; END';
         CREATE TRIGGER see AFTER INSERT ON agl.rollouts FOR EACH ROW EXECUTE FUNCTION public.see();",
    )
    .await
    .unwrap();
    store.create_rollouts(vec![rollout("s")]).await.unwrap();
    let setting: String = sqlx::query_scalar("SELECT setting FROM public.seen").fetch_one(&mut raw).await.unwrap();
    assert_eq!(setting, "on");
}

#[tokio::test]
async fn a_store_that_is_opened_again_goes_on_where_it_was() {
    let database = Database::create().await;
    let store = open(&database).await;
    store.create_rollouts(vec![rollout("a"), rollout("b")]).await.unwrap();
    store.delete_rollout("b").await.unwrap();
    let secret = store.secret("keys", [7; 32]).await.unwrap();
    store.close().await;

    let store = open(&database).await;
    assert_eq!(*store.newest_change().borrow(), 3);
    assert!(store.rollout("a").await.unwrap().is_some());
    assert_eq!(store.secret("keys", [8; 32]).await.unwrap(), secret);
    store.create_rollouts(vec![rollout("c")]).await.unwrap();
    assert_eq!(store.changes(3, 10).await.unwrap()[0].cursor, 4);
}

#[tokio::test]
async fn gateways_that_start_at_once_on_an_empty_database_all_start() {
    let database = Database::create().await;
    let opening: Vec<_> = (0..5)
        .map(|_| {
            let url = database.url.clone();
            tokio::spawn(async move { PostgresStore::open(&url).await })
        })
        .collect();
    for store in opening {
        store.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_database_of_another_version_or_of_something_else_is_refused_by_name() {
    let database = Database::create().await;
    open(&database).await.close().await;
    database.connect().await.execute("UPDATE agl.about SET version = 999").await.unwrap();
    let refused = refusal(PostgresStore::open(&database.url).await);
    assert!(
        refused.contains("agl_test_") && refused.contains("999") && refused.contains("name another one"),
        "{refused}"
    );

    let database = Database::create().await;
    database.connect().await.execute("CREATE SCHEMA agl; CREATE TABLE agl.theirs (x INT)").await.unwrap();
    let refused = PostgresStore::open(&database.url).await.unwrap_err();
    assert!(matches!(refused, StoreError::NotOurs { .. }), "{refused}");
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named_without_the_password() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    drop(taken);
    let refused = PostgresStore::open(&format!("postgres://user:hunter2@127.0.0.1:{port}/d")).await.unwrap_err();
    assert!(matches!(refused, StoreError::Unreachable { .. }));
    let refused = refused.to_string();
    assert!(
        refused.contains(&format!("postgres://user@127.0.0.1:{port}/d")) && !refused.contains("hunter2"),
        "{refused}"
    );
    assert_eq!(agl_store::shown("postgresql://user:hunter2@h/d"), "postgresql://user@h/d");
}

#[tokio::test]
async fn of_two_gateways_that_record_the_same_number_one_hears_that_it_was_slower_and_has_written_nothing() {
    let database = Database::create().await;
    let [a, b] = two(&database).await;
    let mut recorded = Vec::new();
    for seq in 0..20 {
        let (first, second) = tokio::join!(a.record_call(call("a", seq)), b.record_call(call("b", seq)));
        let slower = match (&first, &second) {
            (Ok(()), Err(slower)) => ("a", slower),
            (Err(slower), Ok(())) => ("b", slower),
            other => panic!("one of them wins: {other:?}"),
        };
        assert!(matches!(slower.1, StoreError::Raced { .. }), "{}", slower.1);
        recorded.push(format!("{}-{seq}", slower.0));
    }
    let rows = b.calls("r", "0", 0).await.unwrap();
    assert_eq!(rows.iter().map(|stored| stored.row.call_id.clone()).collect::<Vec<_>>(), recorded);
    let events = a.events("r", "0", None).await.unwrap();
    assert_eq!(events.len(), 20);
    for (seq, event) in (0..).zip(events) {
        assert_eq!(event.request.unwrap().read().unwrap(), call("a", seq).request);
    }
    let bodies: i64 =
        sqlx::query_scalar("SELECT count(*) FROM agl.blobs").fetch_one(&mut database.connect().await).await.unwrap();
    assert_eq!(bodies, 40);
}

/// The connection may be lost after the commit: the call is made again, and is there once.
#[tokio::test]
async fn a_call_that_is_recorded_twice_is_there_once() {
    let database = Database::create().await;
    let [a, b] = two(&database).await;
    a.record_call(call("a", 0)).await.unwrap();
    a.record_call(call("a", 0)).await.unwrap();
    b.record_call(call("a", 0)).await.unwrap();
    assert_eq!((a.calls("r", "0", 0).await.unwrap().len(), a.events("r", "0", None).await.unwrap().len()), (1, 1));
}

#[tokio::test]
async fn a_gateway_that_does_not_know_of_a_deletion_cannot_build_on_what_is_gone() {
    let database = Database::create().await;
    let [a, b] = two(&database).await;
    for seq in 0..3 {
        a.record_call(call("a", seq)).await.unwrap();
    }
    b.delete_rollout("r").await.unwrap();
    assert!(matches!(a.record_call(call("a", 3)).await, Err(StoreError::RolloutNotFound(_))));
    b.create_rollouts(vec![rollout("r")]).await.unwrap();
    assert!(matches!(a.record_call(call("a", 3)).await, Err(StoreError::Raced { .. })));
    // Its cache of bodies is of the rollout before.
    a.record_call(call("a", 0)).await.unwrap();
    a.record_call(call("a", 1)).await.unwrap();
    for (seq, event) in (0..).zip(b.events("r", "0", None).await.unwrap()) {
        assert_eq!(event.request.unwrap().read().unwrap(), call("a", seq).request);
    }
}

#[tokio::test]
async fn a_row_that_has_been_delivered_is_not_superseded_by_a_gateway_that_has_not_heard_of_it() {
    let database = Database::create().await;
    let [a, b] = two(&database).await;
    a.record_call(call("a", 0)).await.unwrap();
    let (rollout_id, attempt_id) = ("r".to_owned(), "0".to_owned());
    a.settle(vec![Settlement { rollout_id, attempt_id, seqs: vec![0], delivery: Delivery::Delivered }]).await.unwrap();
    b.record_call(CallRecord { supersedes: vec![0], ..call("b", 1) }).await.unwrap();
    assert_eq!(a.calls("r", "0", 0).await.unwrap()[0].row.delivery, Delivery::Delivered);
}

#[tokio::test]
async fn changes_of_several_gateways_become_visible_in_the_order_of_their_cursors() {
    let database = Database::create().await;
    let stores = [open(&database).await, open(&database).await, open(&database).await];
    let writers: Vec<_> = (0..60_usize)
        .map(|n| {
            let store = Arc::clone(&stores[n % 2]);
            tokio::spawn(async move {
                let id = format!("r{n}");
                store.create_rollouts(vec![rollout(&id)]).await.unwrap();
                let failed = StatusPatch { state: Some(RolloutState::Failed), ..StatusPatch::default() };
                store.patch_rollout(&id, failed, 2.0).await.unwrap();
                if n % 3 == 0 {
                    store.delete_rollout(&id).await.unwrap();
                }
            })
        })
        .collect();
    let (mut cursor, mut newest) = (0, stores[2].newest_change());
    let tail = async {
        while cursor < 140 {
            newest.wait_for(|newest| *newest > cursor).await.unwrap();
            for change in stores[2].changes(cursor, 7).await.unwrap() {
                // None is missed: a later one would have been seen first otherwise.
                assert_eq!(change.cursor, cursor + 1);
                cursor = change.cursor;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), tail).await.expect("all changes are heard of");
    for writer in writers {
        writer.await.unwrap();
    }
    assert_eq!(stores[2].terminal(0, 1000).await.unwrap().total_terminal, 60);
}

#[tokio::test]
async fn what_another_gateway_changes_is_heard_of_soon_also_after_the_connection_was_lost() {
    let database = Database::create().await;
    let [a, b] = two(&database).await;
    let (mut newest, mut agreement) = (b.newest_change(), b.peers().unwrap().newest_agreement());
    for round in 0..2_u64 {
        a.create_rollouts(vec![rollout(&format!("r{round}"))]).await.unwrap();
        a.put_models(vec![RegisteredModel::new("m", format!("http://{round}"))]).await.unwrap();
        let heard = async {
            newest.wait_for(|newest| *newest == round + 2).await.unwrap();
            agreement.wait_for(|epoch| *epoch == round + 1).await.unwrap();
        };
        tokio::time::timeout(Duration::from_secs(20), heard).await.expect("it is heard of");
        hang_up(&database).await;
    }
}

/// As a restart of the server does.
async fn hang_up(database: &Database) {
    let mut raw = database.connect().await;
    let others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                  WHERE datname = current_database() AND pid <> pg_backend_pid()";
    raw.execute(others).await.unwrap();
}

#[tokio::test]
async fn lost_connections_are_made_again_and_nothing_is_lost_or_written_twice() {
    let database = Database::create().await;
    let [a, _] = two(&database).await;
    let hanging_up = async {
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_millis(30)).await;
            hang_up(&database).await;
        }
    };
    let recording = async {
        for seq in 0..60 {
            a.record_call(call("a", seq)).await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::join!(hanging_up, recording);
    assert_eq!(a.calls("r", "0", 0).await.unwrap().len(), 60);
    let events = a.events("r", "0", None).await.unwrap();
    for (seq, event) in (0..).zip(&events) {
        assert_eq!(event.request.as_ref().unwrap().read().unwrap(), call("a", seq).request);
    }
    assert_eq!(events.len(), 60);
}

#[tokio::test]
async fn gateways_know_of_each_other_and_of_what_is_agreed_on() {
    let database = Database::create().await;
    let [a, b] = two(&database).await;
    let (first, second) = (a.peers().unwrap(), b.peers().unwrap());
    first.check_in(Presence { inflight: 2, held: 0, epoch: 0 }).await.unwrap();
    second.check_in(Presence { inflight: 1, held: 3, epoch: 0 }).await.unwrap();
    let alive = first.roll_call().await.unwrap();
    assert_eq!(
        alive.iter().map(|peer| (peer.is_me, peer.presence.inflight)).collect::<Vec<_>>(),
        [(true, 2), (false, 1)]
    );

    let pause = Pause { retry_after_seconds: 5, reason: None, owner: None, lease_expires_at: 99.5 };
    assert!(a.put_pause(None, Some(pause.clone())).await.unwrap());
    let agreed = second.check_in(Presence { inflight: 0, held: 0, epoch: 0 }).await.unwrap();
    assert_eq!((agreed.epoch, agreed.pause), (1, Some(pause)));

    // One that ends says so; one that is killed counts until its lease is over.
    let before = first.check_in(Presence::default()).await.unwrap().last_upheaval;
    b.close().await;
    assert_eq!(first.roll_call().await.unwrap().len(), 1);
    assert!(first.check_in(Presence::default()).await.unwrap().last_upheaval > before);
    let killed = open(&database).await;
    killed.check_in(Presence { inflight: 9, held: 0, epoch: 1 }).await.unwrap();
    assert_eq!(first.roll_call().await.unwrap().len(), 2);
    let mut raw = database.connect().await;
    raw.execute("UPDATE agl.gateways SET seen_at = seen_at - interval '10 seconds' WHERE inflight = 9").await.unwrap();
    assert_eq!(first.roll_call().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_row_says_whether_the_gateway_that_wrote_it_lives() {
    let database = Database::create().await;
    let [a, b] = two(&database).await;
    a.record_call(call("a", 0)).await.unwrap();
    let writer = async |store: &PostgresStore| store.calls("r", "0", 0).await.unwrap()[0].writer;
    assert_eq!(writer(&b).await, Writer::Gone);
    a.check_in(Presence::default()).await.unwrap();
    assert_eq!((writer(&a).await, writer(&b).await), (Writer::Here, Writer::Elsewhere));
    a.close().await;
    assert_eq!(writer(&b).await, Writer::Gone);
    let mut raw = database.connect().await;
    let left = raw.fetch_one("SELECT left_at IS NOT NULL FROM agl.gateways").await.unwrap();
    assert!(left.get::<bool, _>(0));
}
