//! Harnesses that hang up: what is still captured, and what a retry makes of it.

use std::time::Duration;

use serde_json::{Value, json};

use crate::scene::{KEY, Reply, Scene, chat_path, completion, quick, until};

/// Sends a call and hangs up once it is at the upstream.
async fn hang_up(scene: &Scene, body: &str, asked_before: usize) {
    let request =
        scene.http.post(format!("{}{}", scene.url, chat_path("r", "train"))).bearer_auth(KEY).body(body.to_owned());
    let call = tokio::spawn(request.send());
    scene.upstream.was_asked(asked_before + 1).await;
    call.abort();
    // The pool would keep the connection: aborting the task drops it with its request unanswered.
    let _aborted = call.await;
    // Nothing tells when the gateway has noticed; it takes well under a millisecond on an idle machine.
    tokio::time::sleep(Duration::from_millis(250)).await;
}

async fn counts(scene: &Scene) -> Value {
    scene.sequences("r").await["counts"].clone()
}

#[tokio::test]
async fn capture_goes_on_when_the_harness_hangs_up_and_the_answer_is_not_live() {
    let mut config = quick();
    config.hangup_grace_seconds = 20.0;
    let scene = Scene::with(config).await;
    scene.enqueue("r").await;
    scene.upstream.will(Reply::json(200, &completion(&[1, 2], &[7])).waiting());
    hang_up(&scene, "{}", 0).await;
    scene.upstream.release();
    until("the call is recorded", async || scene.events("r").await.len() == 1).await;
    let event = scene.events("r").await.remove(0);
    assert_eq!((&event["data"]["delivered"], &event["data"]["http_status"]), (&json!(false), &json!(200)));
    let counts = counts(&scene).await;
    assert_eq!((&counts["undelivered"], &counts["live"]), (&json!(1), &json!(0)));
    assert_eq!(scene.sequences("r").await["sequences"], json!([]));
}

#[tokio::test]
async fn an_equal_call_afterwards_gets_the_answer_that_did_not_arrive() {
    let mut config = quick();
    config.hangup_grace_seconds = 20.0;
    let scene = Scene::with(config).await;
    scene.enqueue("r").await;
    scene.upstream.will(Reply::json(200, &completion(&[1, 2], &[7])).waiting());
    hang_up(&scene, r#"{"messages":[1]}"#, 0).await;
    scene.upstream.release();
    until("the call is recorded", async || scene.events("r").await.len() == 1).await;

    scene.upstream.will_sample(&[1, 2], &[9]);
    assert_eq!(scene.call("r", json!({"messages": [2]})).await.status, 200);
    assert_eq!(counts(&scene).await["undelivered"], 1, "another body is another call");
    let answer = scene.call("r", json!({"messages": [1]})).await;
    assert_eq!(answer.text, completion(&[1, 2], &[7]).to_string());
    let events = scene.events("r").await;
    assert_eq!(answer.header("x-agl-call-id"), events[0]["data"]["call_id"].as_str());
    assert_eq!((events.len(), scene.upstream.asked().len()), (2, 2), "nothing was sampled again");
    let counts = counts(&scene).await;
    assert_eq!((&counts["superseded"], &counts["undelivered"], &counts["live"]), (&json!(0), &json!(0), &json!(2)));
    let rows = scene.sequences("r").await["sequences"].clone();
    assert_eq!((&rows[0]["token_ids"], &rows[1]["token_ids"]), (&json!([1, 2, 7]), &json!([1, 2, 9])));
    scene.upstream.will_sample(&[1, 2], &[8]);
    scene.call("r", json!({"messages": [1]})).await;
    assert_eq!(scene.events("r").await.len(), 3, "now it has arrived: asked once more, it is another draw");
}

#[tokio::test]
async fn a_call_that_says_it_is_a_retry_gets_the_newest_answer_even_if_it_seemed_to_arrive() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.upstream.will_sample(&[1, 2], &[7]);
    scene.upstream.will_sample(&[1, 2], &[8]);
    for _ in 0..2 {
        scene.call("r", json!({})).await;
    }
    let retried = retry(&scene, "{}").await;
    assert_eq!(retried, completion(&[1, 2], &[8]).to_string());
    assert_eq!(scene.upstream.asked().len(), 2);
    assert_eq!(counts(&scene).await["live"], 2);
}

#[tokio::test]
async fn equal_calls_beside_each_other_stay_apart_even_where_one_is_a_retry() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    for sampled in [7, 8, 9] {
        scene.upstream.will(Reply::json(200, &completion(&[1, 2], &[sampled])).waiting());
    }
    let ask = || async { scene.call("r", json!({})).await.text };
    let beside = async {
        scene.upstream.was_asked(2).await;
        let release = async {
            scene.upstream.was_asked(3).await;
            scene.upstream.release();
        };
        tokio::join!(retry(&scene, "{}"), release).0
    };
    let (first, second, third) = tokio::join!(ask(), ask(), beside);
    let mut answers = [first, second, third];
    answers.sort_unstable();
    assert_eq!(answers, [7, 8, 9].map(|sampled| completion(&[1, 2], &[sampled]).to_string()));
    assert_eq!(counts(&scene).await["live"], 3);
}

#[tokio::test]
async fn the_retry_of_a_failure_is_a_call_of_its_own_and_what_is_no_answer_is_not_given_again() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.upstream.will_sample(&[1, 2], &[7]);
    scene.call("r", json!({})).await;
    scene.upstream.will(Reply::json(400, &json!({})));
    assert_eq!(scene.call("r", json!({})).await.status, 400);
    scene.upstream.will_sample(&[1, 2], &[8]);
    assert_eq!(retry(&scene, "{}").await, completion(&[1, 2], &[8]).to_string());

    scene.upstream.will(Reply::json(200, &json!({"choices": []})));
    assert_eq!(scene.call("r", json!({"stream": true})).await.status, 502);
    scene.upstream.will_sample(&[1, 2], &[9]);
    assert!(retry(&scene, r#"{"stream":true}"#).await.contains("hi"));
    assert_eq!(scene.upstream.asked().len(), 5);
}

/// Asks as an SDK does that did not hear of its first try.
async fn retry(scene: &Scene, body: &'static str) -> String {
    let request = scene.http.post(format!("{}{}", scene.url, chat_path("r", "train"))).bearer_auth(KEY);
    let answer = request.header("x-stainless-retry-count", "1").body(body).send().await.unwrap();
    answer.text().await.unwrap()
}

#[tokio::test]
async fn the_same_prompt_asked_twice_and_answered_twice_is_trained_twice() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.upstream.will_sample(&[1, 2], &[7]);
    scene.upstream.will_sample(&[1, 2], &[7]);
    for _ in 0..2 {
        scene.call("r", json!({"messages": []})).await;
    }
    let counts = counts(&scene).await;
    assert_eq!((&counts["live"], &counts["superseded"]), (&json!(2), &json!(0)));
}

#[tokio::test]
async fn after_the_grace_the_upstream_call_is_given_up_and_recorded() {
    let scene = Scene::with(agl_gateway::GatewayConfig { hangup_grace_seconds: 1.5, ..quick() }).await;
    scene.enqueue("r").await;
    scene.upstream.will(Reply::json(200, &completion(&[1, 2], &[7])).waiting());
    hang_up(&scene, "{}", 0).await;
    assert_eq!(scene.get("/proxy/state").await.json()["inflight"], 1);
    until("the call is given up", async || scene.events("r").await.len() == 1).await;
    assert_eq!(scene.get("/proxy/state").await.json()["inflight"], 0);
    let data = scene.events("r").await[0]["data"].clone();
    assert_eq!(
        (&data["http_status"], &data["status"], &data["delivered"]),
        (&json!(499), &json!("error"), &json!(false))
    );
    assert_eq!(counts(&scene).await["live"], 0);
}

#[tokio::test]
async fn a_harness_that_hangs_up_and_asks_again_takes_its_seat_in_the_call_that_runs() {
    let mut config = quick();
    config.hangup_grace_seconds = 20.0;
    let scene = Scene::with(config).await;
    scene.enqueue("r").await;
    scene.upstream.will(Reply::json(200, &completion(&[1, 2], &[7])).waiting());
    hang_up(&scene, r#"{"stream":true}"#, 0).await;
    let release = async {
        tokio::time::sleep(Duration::from_millis(250)).await;
        scene.upstream.release();
    };
    let (answer, ()) = tokio::join!(scene.call("r", json!({"stream": true})), release);
    assert!(answer.text.contains(r#""content":"hi""#), "{}", answer.text);
    let events = scene.events("r").await;
    assert_eq!((events.len(), scene.upstream.asked().len()), (1, 1));
    assert_eq!(events[0]["data"]["delivered"], true);
    let counts = counts(&scene).await;
    assert_eq!((&counts["live"], &counts["undelivered"]), (&json!(1), &json!(0)));
}

#[tokio::test]
async fn what_was_undelivered_is_so_after_a_restart_too() {
    let mut config = quick();
    config.hangup_grace_seconds = 20.0;
    let mut scene = Scene::with(config).await;
    scene.enqueue("r").await;
    scene.call("r", json!({"messages": [0]})).await;
    scene.upstream.will(Reply::json(200, &completion(&[1, 2], &[7])).waiting());
    hang_up(&scene, r#"{"messages":[1]}"#, 1).await;
    scene.upstream.release();
    until("the call is recorded", async || scene.events("r").await.len() == 2).await;
    scene.restart().await;
    assert_eq!(counts(&scene).await["undelivered"], 1);
    scene.call("r", json!({"messages": [1]})).await;
    assert_eq!(scene.upstream.asked().len(), 2, "it gets the answer of before the restart");
    scene.call("r", json!({"messages": [0]})).await;
    let counts = counts(&scene).await;
    assert_eq!((&counts["superseded"], &counts["undelivered"], &counts["live"]), (&json!(0), &json!(0), &json!(3)));
}
