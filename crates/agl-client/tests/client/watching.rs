//! The stream of changes across lost connections.

use std::time::Duration;

use crate::scripted::{Scripted, Step};
use agl_client::{Change, ChangeKind, ClientError, GatewayClient};
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use serde_json::{Value, json};

fn rollout(id: &str) -> Value {
    json!({"rollout_id": id, "input": null, "status": {"state": "queuing", "created_at": 1.0, "updated_at": 2.0}})
}

fn change(cursor: u64, kind: &str, id: &str) -> String {
    let data = json!({"cursor": cursor, "kind": kind, "rollout_id": id, "rollout": rollout(id)});
    format!("id: {cursor}\nevent: rollout\ndata: {data}\n\n")
}

async fn next(stream: &mut BoxStream<'static, Result<Change, ClientError>>) -> (u64, ChangeKind, String) {
    let change = tokio::time::timeout(Duration::from_secs(5), stream.next()).await.unwrap().unwrap().unwrap();
    (change.cursor, change.kind, change.rollout_id)
}

#[tokio::test]
async fn a_watch_resumes_after_the_last_change_it_saw() {
    let server = Scripted::start(vec![
        Step::Stream(change(7, "snapshot", "a") + ": beat\n\n"),
        Step::Stream(change(8, "created", "b") + "id: 9\nevent: rol"),
        Step::Answer(503, "{}".into()),
        Step::Stream(change(9, "updated", "b")),
    ])
    .await;
    let mut stream = GatewayClient::new(&server.url, "").unwrap().watch(None);
    assert_eq!(next(&mut stream).await, (7, ChangeKind::Snapshot, "a".into()));
    assert_eq!(next(&mut stream).await, (8, ChangeKind::Created, "b".into()));
    assert_eq!(next(&mut stream).await, (9, ChangeKind::Updated, "b".into()));
    assert_eq!(
        server.lines(),
        [
            "GET /api/rollouts/watch",
            "GET /api/rollouts/watch?after=7",
            "GET /api/rollouts/watch?after=8",
            "GET /api/rollouts/watch?after=8",
        ]
    );
}

#[tokio::test]
async fn a_snapshot_that_broke_off_is_completed_by_a_list() {
    let server = Scripted::start(vec![
        Step::Stream(change(7, "snapshot", "a")),
        Step::Answer(200, json!([rollout("a"), rollout("b")]).to_string()),
        Step::Stream(change(8, "updated", "a")),
    ])
    .await;
    let mut stream = GatewayClient::new(&server.url, "").unwrap().watch(None);
    for id in ["a", "a", "b"] {
        assert_eq!(next(&mut stream).await, (7, ChangeKind::Snapshot, id.into()));
    }
    assert_eq!(next(&mut stream).await, (8, ChangeKind::Updated, "a".into()));
    assert_eq!(
        server.lines(),
        [
            "GET /api/rollouts/watch",
            "GET /api/rollouts?state_in=queuing&state_in=running&limit=500",
            "GET /api/rollouts/watch?after=7",
        ]
    );
}

#[tokio::test]
async fn a_watch_with_a_wrong_key_says_so_and_ends() {
    let server = Scripted::start(vec![Step::Answer(401, r#"{"detail":"Invalid or missing API key"}"#.into())]).await;
    let mut stream = GatewayClient::new(&server.url, "wrong").unwrap().watch(Some(3));
    let error = stream.next().await.unwrap().unwrap_err();
    assert_eq!(error.status(), Some(401));
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn a_watch_reports_that_the_gateway_is_away_and_goes_on_when_it_is_back() {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    let client = GatewayClient::new(&url, "").unwrap().with_patience(Duration::from_millis(100));
    let mut stream = client.watch(Some(3));
    assert!(matches!(stream.next().await, Some(Err(ClientError::Unreachable { .. }))));
    let _server = Scripted::on(socket.listen(8).unwrap(), vec![Step::Stream(change(4, "deleted", "a"))]);
    assert_eq!(next(&mut stream).await, (4, ChangeKind::Deleted, "a".into()));
}

#[tokio::test]
async fn a_server_that_ends_every_stream_at_once_is_not_asked_in_a_hot_loop() {
    let server = Scripted::start(vec![Step::Stream(String::new()); 1000]).await;
    let mut stream = GatewayClient::new(&server.url, "").unwrap().watch(Some(3));
    assert!(tokio::time::timeout(Duration::from_millis(700), stream.next()).await.is_err());
    // 20, 40, 80, … ms, each at least half of it: six or seven tries.
    assert!(server.lines().len() < 12, "{}", server.lines().len());
}
