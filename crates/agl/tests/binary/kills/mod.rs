//! `./x check kills`: a hundred times `kill -9` of the gateway at random moments, under sixty-four agents that call it in every
//! dialect and ask again when their connection breaks. What any of them was told is there at the end, and exactly once.
//!
//! * [`agents`] — the load: rollout after rollout, and a note of everything that was acknowledged.
//! * [`harness`] — one turn in each dialect, streamed or not.
//! * [`audit`] — the notes against what the gateway holds; a quick test shows that it notices what is lost.

mod agents;
mod audit;
mod harness;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use agl_client::GatewayClient;
use agl_client::wire::Model;
use agl_mock_llm::{Fault, FaultRule, MockLlm, Script};
use tokio::sync::watch;

use self::agents::Notes;
use crate::support::{Running, agl, free_port};

const KILLS: usize = 100;
const AGENTS: usize = 64;
/// How long a gateway may live once it answers …
const LONGEST_LIFE: Duration = Duration::from_millis(2500);
/// … but every fourth dies this soon, mostly while it starts and reads what the one before has left.
const EARLY_DEATH: Duration = Duration::from_millis(300);
/// A gateway that does not answer by then does not come back.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long the agents may take to bring what they have begun to its end.
const LAST_ROUND: Duration = Duration::from_secs(180);
const KEY: &str = "server-key";
const POLICY: &str = "policy";
/// The policy version that the model is registered with.
const VERSION: u64 = 3;

/// The gateway that is killed, on one address and one store.
struct Victim {
    folder: PathBuf,
    address: String,
    store: String,
    running: Running,
}

impl Victim {
    fn start(folder: &Path, address: String, store: String) -> Self {
        let running = serve(folder, &address, &store);
        Self { folder: folder.to_owned(), address, store, running }
    }

    fn client(&self) -> GatewayClient {
        GatewayClient::new(&format!("http://{}", self.address), KEY).unwrap()
    }

    /// `kill -9`, and a new one at once.
    fn kill(&mut self) {
        assert!(!self.running.has_ended(), "the gateway ended by itself:\n{}", self.running.output());
        self.running.kill();
        self.running = serve(&self.folder, &self.address, &self.store);
    }
}

fn server(model: &MockLlm) -> Model {
    Model {
        model: POLICY.to_owned(),
        endpoint: model.endpoint(),
        version: VERSION,
        kind: Some("vllm".to_owned()),
        trainable: None,
        upstream_model: None,
        api_key_env: None,
        stream: None,
    }
}

/// Waits until the gateway answers, and says how long that took.
async fn answers(client: &GatewayClient, victim: &Victim) -> Duration {
    let began = Instant::now();
    while !client.healthz().await {
        assert!(began.elapsed() < START_LIMIT, "the gateway does not come back:\n{}", victim.running.output());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    began.elapsed()
}

fn serve(folder: &Path, address: &str, store: &str) -> Running {
    let mut command = agl();
    command.args(["serve", "--key", KEY, "--listen", address, "--store", store]);
    Running::start(&mut command, "serve", folder)
}

/// `AGL_TEST_KILLS`, `AGL_TEST_KILLS_STORE` and `AGL_TEST_KILLS_GATEWAYS` change what `./x check kills` does.
fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes: ./x check kills"]
async fn a_hundred_kills_of_the_gateway_lose_nothing_that_was_acknowledged() {
    let began = Instant::now();
    let kills = setting("AGL_TEST_KILLS").map_or(KILLS, |text| text.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("gateway.db");
    let (store, file) = match setting("AGL_TEST_KILLS_STORE") {
        Some(store) => (store, None),
        None => (format!("sqlite:{}", database.display()), Some(database)),
    };
    // It answers with what it was told last, so that every answer is known from its question.
    let slow = |seconds, probability| FaultRule::with_probability(Fault::Delay { seconds }, probability);
    let script = Script { keep_requests: 0, faults: vec![slow(0.5, 0.05), slow(0.1, 0.4)], ..Script::default() };
    let model = MockLlm::start(script).await.unwrap();
    // Several on one store: while one is killed, the others go on.
    let gateways = setting("AGL_TEST_KILLS_GATEWAYS").map_or(1, |text| text.parse().unwrap());
    let start = |_| Victim::start(folder.path(), format!("127.0.0.1:{}", free_port()), store.clone());
    let mut victims: Vec<Victim> = (0..gateways).map(start).collect();
    let clients: Vec<GatewayClient> = victims.iter().map(Victim::client).collect();
    for (client, victim) in clients.iter().zip(&victims) {
        answers(client, victim).await;
    }
    clients[0].register_models(&[server(&model)]).await.unwrap();
    let (notes, stop) = (Arc::new(Notes::default()), watch::Sender::new(false));
    let playing = agents::play(AGENTS, &clients, &notes, &stop);

    let (mut calls_at_the_model, mut acknowledged, mut early, mut starts) = (0, 0, 0, Vec::new());
    for kill in 1..=kills {
        let index = rand::random_range(0..gateways);
        let (client, victim) = (&clients[index], &mut victims[index]);
        let part = rand::random_range(0.0..1.0);
        if rand::random_ratio(1, 4) {
            early += 1;
            tokio::time::sleep(EARLY_DEATH.mul_f64(part)).await;
        } else {
            starts.push(answers(client, victim).await);
            tokio::time::sleep(LONGEST_LIFE.mul_f64(part)).await;
            calls_at_the_model += model.in_flight();
        }
        victim.kill();
        // An agent that found a fault has ended them all: it says below what it found.
        if playing.is_finished() {
            break;
        }
        if kill % 10 == 0 {
            let before = std::mem::replace(&mut acknowledged, notes.calls());
            println!("{kill} kills, {acknowledged} calls acknowledged");
            assert!(acknowledged > before, "nobody was answered during ten lives of the gateway");
        }
    }
    stop.send_replace(true);
    tokio::time::timeout(LAST_ROUND, playing).await.unwrap().unwrap();
    // Once more, so that what is looked at is what a gateway finds on its disk.
    victims.iter_mut().for_each(Victim::kill);
    let load = began.elapsed();
    let found = audit::audit(&clients[0], &notes).await;
    for victim in &mut victims {
        assert!(victim.running.terminate().success(), "{}", victim.running.output());
    }
    if let Some(file) = &file {
        audit::database(file);
    }
    starts.sort_unstable();
    println!(
        "{} kills ({early} of them early) in {:.0} s, {:.1} calls at the model at each of the others; answering again after \
         {} ms (median; at most {}); then {:.0} s of looking: {} rollouts; {} calls \
         acknowledged, 0 lost ({} asked more than once, {} live answers that nobody acknowledged); {} rewards \
         acknowledged, 0 lost ({} stored twice); {} sequences with {} trained tokens, 0 corrupt",
        kills + gateways,
        load.as_secs_f64(),
        calls_at_the_model as f64 / starts.len() as f64,
        starts[starts.len() / 2].as_millis(),
        starts[starts.len() - 1].as_millis(),
        (began.elapsed() - load).as_secs_f64(),
        found.rollouts,
        found.calls,
        notes.asked_again(),
        found.unacknowledged,
        found.rewards,
        found.rewards_twice,
        found.sequences,
        found.trained_tokens,
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_notices_what_is_lost_or_changed() {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("gateway.db");
    let sqlite = |path: &Path| format!("sqlite:{}", path.display());
    let model = MockLlm::start(Script::default()).await.unwrap();
    let mut gateway = Victim::start(folder.path(), format!("127.0.0.1:{}", free_port()), sqlite(&database));
    gateway.client().register_models(&[server(&model)]).await.unwrap();
    let (notes, stop) = (Arc::new(Notes::default()), watch::Sender::new(false));
    let playing = agents::play(8, &[gateway.client()], &notes, &stop);
    while notes.rollouts().len() < 16 {
        assert!(!playing.is_finished());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    stop.send_replace(true);
    playing.await.unwrap();
    assert!(gateway.running.terminate().success());

    let newest_call = "WHERE number = (SELECT max(number) FROM events WHERE rows IS NOT NULL)";
    for (number, (what, change)) in [
        ("nothing", "SELECT 1".to_owned()),
        ("a call", format!("DELETE FROM events {newest_call}")),
        ("a delivery", "UPDATE deliveries SET delivery = 'undelivered' WHERE seq = 0".to_owned()),
        // The last byte of a call's rows is of a log-prob.
        (
            "a number",
            format!("UPDATE events SET rows = CAST(substr(rows, 1, length(rows) - 1) || x'3e' AS BLOB) {newest_call}"),
        ),
        (
            "a reward",
            "DELETE FROM events WHERE number = (SELECT max(number) FROM events WHERE rows IS NULL)".to_owned(),
        ),
        (
            "the end of a body",
            "UPDATE events SET request = substr(request, 1, length(request) - 4) WHERE base IS NULL".to_owned(),
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let copy = folder.path().join(format!("copy-{number}.db"));
        std::fs::copy(&database, &copy).unwrap();
        rusqlite::Connection::open(&copy).unwrap().execute_batch(&change).unwrap();
        let gateway = Victim::start(folder.path(), format!("127.0.0.1:{}", free_port()), sqlite(&copy));
        let (client, notes) = (gateway.client(), Arc::clone(&notes));
        answers(&client, &gateway).await;
        let found = tokio::spawn(async move { audit::audit(&client, &notes).await }).await;
        assert_eq!(found.is_ok(), what == "nothing", "{what}: {found:?}");
    }
}
