//! Two gateways on one database.

use std::str::FromStr;
use std::time::Duration;

use agl_gateway::{Gateway, GatewayConfig};
use serde_json::{Value, json};
use sqlx::ConnectOptions;
use sqlx::postgres::PgConnectOptions;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::scene::{KEY, MODEL, Reply, Scene, chat_path, completion, quick, until};
use crate::support::Database;
use crate::watch::Watcher;

/// Two gateways, and the database that must outlive them. The first one's upstream serves both.
struct Pair {
    a: Scene,
    b: Scene,
    _database: Database,
}

impl Pair {
    async fn start() -> Self {
        let database = Database::create().await;
        let config = GatewayConfig { store: database.url.clone(), ..quick() };
        let a = Scene::with(config.clone()).await;
        let b = Scene::without_model(config).await;
        a.enqueue("r").await;
        Self { a, b, _database: database }
    }

    /// Both show the same; gives it.
    async fn state(&self) -> Value {
        let (a, b) = (self.a.get("/proxy/state").await, self.b.get("/proxy/state").await);
        assert_eq!((a.status, b.status), (200, 200), "{} {}", a.text, b.text);
        assert_eq!(a.json()["inflight"], b.json()["inflight"]);
        b.json()
    }
}

#[tokio::test]
async fn a_pause_through_one_holds_calls_at_both_until_a_resume_through_the_other() {
    let pair = Pair::start().await;
    let paused = pair.a.post("/proxy/pause", json!({"owner": "trainer", "reason": "weights"})).await;
    assert_eq!((paused.status, &paused.json()["inflight"]), (200, &json!(0)), "{}", paused.text);
    let other = pair.b.post("/proxy/pause", json!({"owner": "somebody else"})).await;
    assert_eq!(other.status, 409);
    let (at_a, at_b, ()) =
        tokio::join!(pair.a.call("r", json!({"messages": [1]})), pair.b.call("r", json!({"messages": [2]})), async {
            until("both are held", async || pair.state().await["held"] == 2).await;
            assert!(pair.a.upstream.asked().is_empty());
            assert_eq!(pair.b.post("/proxy/resume", json!({"owner": "trainer"})).await.status, 200);
        });
    assert_eq!((at_a.status, at_b.status), (200, 200), "{} {}", at_a.text, at_b.text);
    assert_eq!(pair.a.sequences("r").await["counts"]["live"], 2);
}

#[tokio::test]
async fn calls_in_flight_are_counted_together_and_none_is_behind_a_pause_that_shows_none() {
    let pair = Pair::start().await;
    for prompt in [[1, 2], [1, 3]] {
        pair.a.upstream.will(Reply::json(200, &completion(&prompt, &[7])).waiting());
    }
    let (at_a, at_b, ()) =
        tokio::join!(pair.a.call("r", json!({"messages": [1]})), pair.b.call("r", json!({"messages": [2]})), async {
            pair.a.upstream.was_asked(2).await;
            assert_eq!(pair.b.post("/proxy/pause", json!({})).await.json()["inflight"], 2);
            assert_eq!(pair.a.get("/proxy/state").await.json()["inflight"], 2);
            pair.a.upstream.release();
            let drained = async |gateway: &Scene| gateway.get("/proxy/state").await.json()["inflight"] == 0;
            until("both have drained", async || drained(&pair.a).await && drained(&pair.b).await).await;
        });
    assert_eq!((at_a.status, at_b.status), (200, 200));
}

#[tokio::test]
async fn calls_of_one_attempt_through_both_in_turn_are_one_row_of_exactly_what_was_sampled() {
    let pair = Pair::start().await;
    let (mut prompt, mut mask) = (vec![1, 2], vec![0, 0]);
    for turn in 0..10_u32 {
        pair.a.upstream.will_sample(&prompt, &[100 + turn, 200 + turn]);
        let gateway = if turn % 2 == 0 { &pair.a } else { &pair.b };
        let answer = gateway.call("r", json!({"messages": [turn]})).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        prompt.extend([100 + turn, 200 + turn, 3]);
        mask.extend([1, 1, 0]);
    }
    prompt.pop();
    mask.pop();
    for gateway in [&pair.a, &pair.b] {
        let sequences = gateway.sequences("r").await;
        assert_eq!(sequences["sequences"].as_array().unwrap().len(), 1);
        assert_eq!(sequences["sequences"][0]["token_ids"], json!(prompt));
        assert_eq!(sequences["sequences"][0]["mask"], json!(mask));
    }
    let seqs: Vec<Value> = pair.b.events("r").await.iter().map(|event| event["data"]["seq"].clone()).collect();
    assert_eq!(seqs, (0..10).map(Value::from).collect::<Vec<_>>());
}

#[tokio::test]
async fn calls_that_race_on_both_are_all_recorded_once() {
    let pair = Pair::start().await;
    let (mut calls, per_gateway) = (Vec::new(), 20);
    for n in 0..per_gateway {
        for gateway in [&pair.a, &pair.b] {
            let url = format!("{}{}", gateway.url, chat_path("r", "train"));
            let body = json!({"messages": [n, gateway.url]}).to_string();
            calls.push(tokio::spawn(gateway.http.post(url).bearer_auth(KEY).body(body).send()));
        }
    }
    let mut ids = Vec::new();
    for call in calls {
        let answer = call.await.unwrap().unwrap();
        assert_eq!(answer.status(), 200);
        ids.push(answer.headers()["x-agl-call-id"].to_str().unwrap().to_owned());
    }
    let mut recorded: Vec<String> =
        pair.a.events("r").await.iter().map(|event| event["data"]["call_id"].as_str().unwrap().to_owned()).collect();
    ids.sort_unstable();
    recorded.sort_unstable();
    assert_eq!(recorded, ids);
    for gateway in [&pair.a, &pair.b] {
        assert_eq!(gateway.sequences("r").await["counts"]["live"], 2 * per_gateway);
    }
}

#[tokio::test]
async fn an_answer_that_did_not_arrive_through_one_is_what_its_retry_gets_through_the_other() {
    let pair = Pair::start().await;
    // Both know the attempt before.
    for gateway in [&pair.a, &pair.b] {
        assert_eq!(gateway.call("r", json!({"messages": [gateway.url]})).await.status, 200);
    }
    pair.a.upstream.will(Reply { delay: Duration::from_millis(200), ..Reply::json(200, &completion(&[1, 5], &[8])) });
    let url = format!("{}{}", pair.a.url, chat_path("r", "train"));
    let body = json!({"messages": ["lost"]});
    let impatient = pair.a.http.post(url).bearer_auth(KEY).timeout(Duration::from_millis(100));
    impatient.header("content-type", "application/json").body(body.to_string()).send().await.unwrap_err();
    until("it is recorded", async || pair.b.events("r").await.len() == 3).await;
    let counts = pair.b.sequences("r").await["counts"].clone();
    assert_eq!((&counts["live"], &counts["undelivered"]), (&json!(2), &json!(1)), "{counts}");

    let again = pair.b.call("r", body).await;
    assert_eq!(again.text, completion(&[1, 5], &[8]).to_string());
    assert_eq!(pair.a.upstream.asked().len(), 3, "nothing was sampled twice");
    // The gateway that had it as undelivered hears that it has arrived.
    until("it is live at both", async || {
        let counts =
            [pair.a.sequences("r").await, pair.b.sequences("r").await].map(|all| all["counts"]["live"].clone());
        counts == [json!(3), json!(3)]
    })
    .await;
}

#[tokio::test]
async fn an_equal_call_through_the_other_is_a_draw_of_its_own() {
    let pair = Pair::start().await;
    for sampled in [7, 8] {
        pair.a.upstream.will_sample(&[1, 2], &[sampled]);
    }
    assert_eq!(pair.a.call("r", json!({"messages": [1]})).await.status, 200);
    assert_eq!(pair.b.call("r", json!({"messages": [1]})).await.status, 200);
    assert_eq!(pair.a.upstream.asked().len(), 2);
    assert_eq!(pair.a.sequences("r").await["counts"]["live"], 2);
}

#[tokio::test]
async fn what_is_registered_through_one_is_known_to_the_other_when_it_is_answered() {
    let pair = Pair::start().await;
    for version in 4..14 {
        let model = json!([{"model": MODEL, "endpoint": pair.a.upstream.endpoint, "version": version}]);
        pair.a.register(model).await;
        assert_eq!(pair.b.get("/api/models").await.json()[0]["version"], version);
    }
    pair.b.delete("/api/models").await;
    assert_eq!(pair.a.get("/api/models").await.json(), json!([]));
}

#[tokio::test]
async fn a_watch_through_one_tells_what_happens_through_the_other() {
    let pair = Pair::start().await;
    let mut watcher = Watcher::connect(&pair.b, "").await;
    assert_eq!(watcher.told().await.1, "snapshot");
    pair.a.enqueue("s").await;
    pair.a.set_state("r", "running").await;
    // The snapshot may be followed by what it contains already.
    let mut told: Vec<(u64, String, String)> = Vec::new();
    while told.last().is_none_or(|(cursor, ..)| *cursor < 3) {
        told.push(watcher.told().await);
    }
    let told: Vec<_> = told.into_iter().map(|(cursor, kind, id)| (cursor, format!("{kind} {id}"))).collect();
    assert!(told.ends_with(&[(2, "created s".to_owned()), (3, "updated r".to_owned())]), "{told:?}");
}

#[tokio::test]
async fn an_attempts_key_of_one_opens_the_other_and_ends_at_both() {
    let pair = Pair::start().await;
    let key = pair.a.post("/api/rollouts/r/attempts", json!({})).await.json()["key"].as_str().unwrap().to_owned();
    let with_key = async || {
        pair.b.send(reqwest::Method::POST, &chat_path("r", "train"), &key, Some(&json!({"messages": []}))).await.status
    };
    assert_eq!(with_key().await, 200);
    pair.a.patch("/api/rollouts/r/attempts/0", json!({"agent_ended": true})).await;
    assert_eq!(with_key().await, 403);
}

/// A gateway with a runtime of its own, which can be ended as `kill -9` ends a process: in the middle of whatever it does, and
/// without a word to anybody.
struct Mortal {
    url: String,
    runtime: tokio::runtime::Runtime,
}

impl Mortal {
    async fn start(config: GatewayConfig) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let gateway = runtime.spawn(Gateway::bind(config)).await.unwrap().unwrap();
        let url = format!("http://{}", gateway.addr());
        runtime.spawn(gateway.serve(std::future::pending()));
        Self { url, runtime }
    }

    fn kill(self) {
        self.runtime.shutdown_background();
    }
}

#[tokio::test]
async fn a_gateway_that_was_killed_does_not_hang_a_pause_and_its_calls_are_not_counted_any_more() {
    let database = Database::create().await;
    let config = GatewayConfig { store: database.url.clone(), ..quick() };
    let scene = Scene::with(config.clone()).await;
    scene.enqueue("r").await;
    let mortal = Mortal::start(config).await;
    let begun = scene.post("/api/rollouts/r/attempts", json!({})).await.json()["gateway_started_at"].as_f64().unwrap();
    scene.upstream.will(Reply::json(200, &completion(&[1, 2], &[7])).waiting());
    let call = scene.http.post(format!("{}{}", mortal.url, chat_path("r", "train"))).bearer_auth(KEY).body("{}");
    let lost = tokio::spawn(call.send());
    scene.upstream.was_asked(1).await;
    until("its call is counted", async || scene.get("/proxy/state").await.json()["inflight"] == 1).await;
    mortal.kill();
    lost.await.unwrap().unwrap_err();

    let paused = scene.post("/proxy/pause", json!({})).await;
    assert_eq!((paused.status, &paused.json()["inflight"]), (200, &json!(0)), "{}", paused.text);
    // What was under way may have been lost: a failed attempt of before is not the agent's fault.
    let attempts = scene.get("/api/rollouts/r/attempts").await.json();
    assert!(attempts[0]["gateway_started_at"].as_f64().unwrap() > begun);
}

/// The way to a database, which can be cut.
struct Link {
    url: String,
    is_whole: watch::Sender<bool>,
}

impl Link {
    async fn to(database: &Database) -> Self {
        let options = PgConnectOptions::from_str(&database.url).unwrap();
        let server = (options.get_host().to_owned(), options.get_port());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let here = listener.local_addr().unwrap();
        let url = options.host("127.0.0.1").port(here.port()).to_url_lossy().to_string();
        let (is_whole, state) = watch::channel(true);
        tokio::spawn(async move {
            while let Ok((mut from, _)) = listener.accept().await {
                let (server, mut state) = (server.clone(), state.clone());
                tokio::spawn(async move {
                    let Ok(mut to) = TcpStream::connect(server).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut from, &mut to) => {}
                        _ = state.wait_for(|is_whole| !is_whole) => {}
                    }
                });
            }
        });
        Self { url, is_whole }
    }
}

/// Cut off from its database, a gateway holds calls by itself, gives up the one that is at the server, and goes on when it is
/// back.
#[tokio::test]
async fn a_gateway_that_loses_its_database_fences_itself_and_recovers() {
    let database = Database::create().await;
    let link = Link::to(&database).await;
    let scene = Scene::with(GatewayConfig { store: link.url.clone(), ..quick() }).await;
    scene.enqueue("r").await;
    scene.upstream.will(Reply::json(200, &completion(&[9, 9], &[9])).waiting());
    let (answer, ()) = tokio::join!(scene.call("r", json!({"messages": []})), async {
        scene.upstream.was_asked(1).await;
        link.is_whole.send_replace(false);
        let refused = scene.get("/proxy/state").await;
        assert_eq!(refused.status, 503, "{}", refused.text);
        assert!(refused.detail().contains("cannot be reached"), "{}", refused.text);
        until("the call is held", async || scene.get("/metrics").await.text.contains("agl_gateway_held 1")).await;
        assert_eq!(scene.upstream.asked().len(), 1);
        link.is_whole.send_replace(true);
    });
    assert_eq!(answer.text, completion(&[1, 2], &[7]).to_string());
    assert_eq!(scene.sequences("r").await["sequences"][0]["token_ids"], json!([1, 2, 7]));
}
