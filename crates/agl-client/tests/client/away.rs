//! What a caller sees while the gateway is killed and started again.

use std::time::{Duration, Instant};

use crate::scripted::{Scripted, Step};
use agl_client::rollouts::EventFormat;
use agl_client::{ClientError, GatewayClient};
use agl_core::attempt::{AttemptPatch, AttemptState};
use agl_core::event::EventCreate;
use agl_core::rollout::{RolloutCreate, RolloutState, StatusPatch};
use serde_json::{Value, json};

fn client(url: &str) -> GatewayClient {
    GatewayClient::new(url, "secret").unwrap().with_patience(Duration::from_secs(10))
}

fn rollout(state: &str) -> Value {
    json!({"rollout_id": "r1", "input": {"q": 1}, "is_train": true, "config": {"timeout_seconds": 5}, "metadata": {},
           "status": {"state": state, "version": 2, "created_at": 1.0, "updated_at": 2.0}})
}

fn attempt(state: &str) -> Value {
    json!({"rollout_id": "r1", "attempt_id": "0", "state": state, "created_at": 1.0, "updated_at": 2.0,
           "calls": 3, "last_call": {"http_status": 503, "status": "error"}})
}

fn answer(status: u16, body: &Value) -> Step {
    Step::Answer(status, body.to_string())
}

fn running() -> StatusPatch {
    StatusPatch { state: Some(RolloutState::Running), ..StatusPatch::default() }
}

#[tokio::test]
async fn a_call_waits_for_a_gateway_that_is_restarted() {
    // Taken, so that nobody else gets it, and not listened on: connections are refused.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    let started = Instant::now();
    let call = tokio::spawn(async move { client(&url).get_rollout("r1").await });
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert!(!call.is_finished());
    let detail = json!({"rollout": rollout("running"), "attempts": ["0"]});
    let server = Scripted::on(
        socket.listen(8).unwrap(),
        vec![answer(503, &json!({"detail": "starting"})), Step::HangUp, answer(200, &detail)],
    );
    let detail = call.await.unwrap().unwrap();
    assert_eq!(detail.rollout.status.state, RolloutState::Running);
    assert_eq!(server.lines(), ["GET /api/rollouts/r1"; 3]);
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn patience_ends_with_an_error_that_names_the_address_and_the_remedy() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let client = client(&url).with_patience(Duration::from_millis(300));
    let error = client.list_models().await.unwrap_err();
    assert!(matches!(&error, ClientError::Unreachable { waited, .. } if *waited >= Duration::from_millis(300)));
    let message = error.to_string();
    assert!(message.contains(&url) && message.contains("agl serve"), "{message}");
}

#[tokio::test]
async fn an_event_whose_answer_was_lost_is_not_sent_twice() {
    let server = Scripted::start(vec![Step::HangUp, answer(200, &json!({}))]).await;
    let event = EventCreate { event_type: "reward".into(), data: serde_json::Map::new() };
    let error = client(&server.url).post_event("r1", "0", &event).await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
    assert_eq!(server.lines(), ["POST /api/rollouts/r1/attempt/0/events"]);
}

#[tokio::test]
async fn rollouts_without_an_id_get_one_before_they_are_sent_so_that_a_repetition_creates_no_second() {
    let server = Scripted::start(vec![Step::HangUp, answer(201, &json!([rollout("queuing")]))]).await;
    let create: RolloutCreate = serde_json::from_value(json!({"input": 7})).unwrap();
    client(&server.url).create_rollouts(&[create]).await.unwrap();
    let asked = server.asked();
    let first: Value = serde_json::from_str(&asked[0].body).unwrap();
    assert_eq!(first[0]["rollout_id"].as_str().unwrap().len(), 32);
    assert_eq!(asked[0].body, asked[1].body);
}

#[tokio::test]
async fn a_conflict_after_a_lost_answer_is_success_where_the_state_is_what_was_asked() {
    let server = Scripted::start(vec![
        Step::HangUp,
        answer(409, &json!({"detail": "Rollout r1: cannot transition running -> running"})),
        answer(200, &json!({"rollout": rollout("running"), "attempts": []})),
    ])
    .await;
    let patched = client(&server.url).patch_rollout("r1", &running()).await.unwrap();
    assert_eq!(patched.status.state, RolloutState::Running);
    assert_eq!(server.lines(), ["PATCH /api/rollouts/r1", "PATCH /api/rollouts/r1", "GET /api/rollouts/r1"]);
    assert_eq!(server.asked()[0].body, r#"{"status":{"state":"running"}}"#);
}

#[tokio::test]
async fn a_conflict_after_a_lost_answer_is_a_conflict_where_somebody_else_ended_the_rollout() {
    let server = Scripted::start(vec![
        Step::HangUp,
        answer(409, &json!({"detail": "Rollout r1: cannot transition failed -> running"})),
        answer(200, &json!({"rollout": rollout("failed"), "attempts": []})),
    ])
    .await;
    let error = client(&server.url).patch_rollout("r1", &running()).await.unwrap_err();
    assert!(error.is_conflict());
    assert!(error.to_string().contains("cannot transition failed -> running"), "{error}");
}

#[tokio::test]
async fn a_conflict_on_the_first_try_is_a_conflict() {
    let server = Scripted::start(vec![answer(409, &json!({"detail": "no"}))]).await;
    assert!(client(&server.url).patch_rollout("r1", &running()).await.unwrap_err().is_conflict());
    assert_eq!(server.lines().len(), 1);
}

#[tokio::test]
async fn an_attempt_patch_is_judged_in_the_same_way() {
    let server = Scripted::start(vec![
        Step::HangUp,
        answer(409, &json!({"detail": "no"})),
        answer(200, &json!([attempt("succeeded")])),
    ])
    .await;
    let patch = AttemptPatch { state: Some(AttemptState::Succeeded), ..AttemptPatch::default() };
    // Spawned: the futures of the client must be able to move between threads.
    let url = server.url.clone();
    let call = tokio::spawn(async move { client(&url).patch_attempt("r1", "0", &patch).await });
    let detail = call.await.unwrap().unwrap();
    assert_eq!(detail.calls, 3);
    assert!(detail.last_call.unwrap().failed_upstream());
}

#[tokio::test]
async fn a_patch_that_changes_no_state_is_sent_again_when_its_answer_breaks_off() {
    let server = Scripted::start(vec![Step::Broken(200), answer(200, &attempt("running"))]).await;
    let patch = AttemptPatch { agent_ended: Some(true), ..AttemptPatch::default() };
    let detail = client(&server.url).patch_attempt("r1", "0", &patch).await.unwrap();
    assert_eq!(detail.calls, 3);
    assert_eq!(server.lines(), ["PATCH /api/rollouts/r1/attempts/0"; 2]);
}

#[tokio::test]
async fn a_refusal_is_not_repeated_and_carries_the_gateways_detail() {
    let server = Scripted::start(vec![answer(401, &json!({"detail": "Invalid or missing API key"}))]).await;
    let error = client(&server.url).events("r1", Some("reward"), EventFormat::Triplet).await.unwrap_err();
    let message = error.to_string();
    assert!(message.contains("Invalid or missing API key") && message.contains("started with"), "{message}");
    assert_eq!(server.lines(), ["GET /api/rollouts/r1/events?event_type=reward&format=triplet"]);
    assert!(server.asked()[0].head.contains("authorization: bearer secret"));
}

#[tokio::test]
async fn ids_are_escaped_in_paths_and_a_path_prefix_is_kept() {
    let server = Scripted::start(vec![answer(404, &json!({"detail": "Rollout not found"}))]).await;
    let error = client(&format!("{}/agl/", server.url)).get_rollout("a/b c?d").await.unwrap_err();
    assert!(error.is_not_found());
    assert_eq!(server.lines(), ["GET /agl/api/rollouts/a%2Fb%20c%3Fd"]);
}

#[test]
fn an_address_that_is_none_is_refused_with_the_form_it_should_have() {
    for address in ["localhost:8080", "https://x", ""] {
        let message = GatewayClient::new(address, "").unwrap_err().to_string();
        assert!(message.contains("http://HOST:PORT"), "{message}");
    }
}
