//! The load: agents that play rollout after rollout, and the note of everything that was acknowledged to them.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use agl_client::GatewayClient;
use agl_core::rollout::{RolloutCreate, RolloutState, StatusPatch};
use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::harness::{Harness, Who};

/// A gateway that stays away longer than this is lost.
const PATIENCE: Duration = Duration::from_secs(120);

/// A call whose complete answer an agent has.
#[derive(Clone, Debug)]
pub struct Answered {
    pub call_id: String,
    pub asked: String,
    pub text: String,
}

/// What one rollout was told.
#[derive(Clone, Debug)]
pub struct Noted {
    pub rollout_id: String,
    pub calls: Vec<Answered>,
    /// The reasons of acknowledged rewards; no two are equal.
    pub rewards: Vec<String>,
}

/// What all were told.
#[derive(Default)]
pub struct Notes(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    rollouts: Vec<Noted>,
    calls: u64,
    asked_again: u64,
}

impl Notes {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap()
    }

    /// The rollouts that have ended.
    pub fn rollouts(&self) -> Vec<Noted> {
        self.inner().rollouts.clone()
    }

    pub fn calls(&self) -> u64 {
        self.inner().calls
    }

    /// How many calls were sent more than once.
    pub fn asked_again(&self) -> u64 {
        self.inner().asked_again
    }
}

struct Agent {
    number: usize,
    /// One after the other, until one answers.
    urls: Vec<String>,
    client: GatewayClient,
    http: reqwest::Client,
    harness: Harness,
    /// Sends the header by which the SDKs of OpenAI and Anthropic say that they ask again.
    counts_retries: bool,
    notes: Arc<Notes>,
}

/// Lets so many agents play on a thread of their own, beside whoever kills. Of several gateways each is called by as many agents, and by the
/// others when theirs does not answer.
pub fn play(
    agents: usize,
    gateways: &[GatewayClient],
    notes: &Arc<Notes>,
    stop: &watch::Sender<bool>,
) -> JoinHandle<()> {
    let (runtime, stop) = (Handle::current(), stop.subscribe());
    let (gateways, notes) = (gateways.to_vec(), Arc::clone(notes));
    tokio::task::spawn_blocking(move || {
        let agent = |number| Agent::new(number, &gateways, Arc::clone(&notes)).run(stop.clone());
        runtime.block_on(join_all((0..agents).map(agent)));
    })
}

impl Agent {
    fn new(number: usize, gateways: &[GatewayClient], notes: Arc<Notes>) -> Self {
        let urls = gateways.iter().map(|gateway| gateway.base_url().to_owned()).collect();
        Self {
            number,
            urls,
            client: gateways[number % gateways.len()].clone(),
            http: reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(60)).build().unwrap(),
            harness: Harness::of(number),
            counts_retries: (number / 8).is_multiple_of(2),
            notes,
        }
    }

    /// Plays rollouts to their end until asked to stop.
    async fn run(self, stop: watch::Receiver<bool>) {
        let mut round = 0;
        while !*stop.borrow() {
            self.rollout(&format!("agent-{}-{round}-{:08x}", self.number, rand::random::<u32>())).await;
            round += 1;
        }
    }

    async fn rollout(&self, id: &str) {
        let create: RolloutCreate =
            serde_json::from_value(json!({"input": {"data_id": id}, "rollout_id": id})).unwrap();
        self.client.create_rollouts(&[create]).await.unwrap();
        let key = self.client.create_attempt(id, "0").await.unwrap().key;
        self.becomes(id, RolloutState::Running).await;
        let mut noted = Noted { rollout_id: id.to_owned(), calls: Vec::new(), rewards: Vec::new() };
        let mut said = Vec::new();
        for turn in 0..rand::random_range(2..7) {
            let asked = question(id, turn);
            said.push((Who::User, asked.clone()));
            let (call_id, text) = self.ask(id, &key, &said).await;
            said.push((Who::Model, text.clone()));
            if rand::random_ratio(1, 4) {
                noted.rewards.push(self.reward(id, &key, Some(&call_id)).await);
            }
            noted.calls.push(Answered { call_id, asked, text });
            // An agent also does something by itself.
            let thinks = rand::random_range(0..50);
            tokio::time::sleep(Duration::from_millis(thinks)).await;
        }
        noted.rewards.push(self.reward(id, &key, None).await);
        self.becomes(id, RolloutState::Succeeded).await;
        self.notes.inner().rollouts.push(noted);
    }

    async fn becomes(&self, id: &str, state: RolloutState) {
        let status =
            StatusPatch { state: Some(state), last_attempt_id: Some("0".to_owned()), ..StatusPatch::default() };
        self.client.patch_rollout(id, &status).await.unwrap();
    }

    /// Asks until there is a complete answer: its call's id and its text.
    async fn ask(&self, id: &str, key: &str, said: &[(Who, String)]) -> (String, String) {
        let path = format!("proxy/rollout/{id}/attempt/0/mode/train/{}", self.harness.path());
        let (name, value) = self.harness.key(key);
        let body = self.harness.body(said).to_string();
        let answer = self.until_told(async |tries| {
            let mut request =
                self.http.post(self.url(tries, &path)).header(name, &value).header("content-type", "application/json");
            if self.counts_retries {
                request = request.header("x-stainless-retry-count", tries);
            }
            let response = request.body(body.clone()).send().await.ok()?;
            let status = response.status();
            let call_id = response.headers().get("x-agl-call-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
            let body = response.text().await.ok()?;
            if status.is_server_error() {
                return None;
            }
            assert!(status.is_success(), "{id}: {status} {body}");
            let text = self.harness.text(&body)?;
            Some((call_id.unwrap(), text))
        });
        let (tries, told) = answer.await;
        let mut notes = self.notes.inner();
        notes.calls += 1;
        notes.asked_again += u64::from(tries > 1);
        told
    }

    /// Posts a reward until it is acknowledged, and gives its reason.
    async fn reward(&self, id: &str, key: &str, call_id: Option<&str>) -> String {
        let reason = format!("{:016x}", rand::random::<u64>());
        let mut data = json!({"value": rand::random_range(-1.0..1.0), "reason": reason});
        if let Some(call_id) = call_id {
            data["call_id"] = json!(call_id);
        }
        let path = format!("api/rollouts/{id}/attempt/0/events");
        let event: Value = json!({"event_type": "reward", "data": data});
        self.until_told(async |tries| {
            let response = self.http.post(self.url(tries, &path)).bearer_auth(key).json(&event).send().await.ok()?;
            let status = response.status();
            let body = response.text().await.ok()?;
            if status.is_server_error() {
                return None;
            }
            assert!(status.is_success(), "{id}: {status} {body}");
            Some(())
        })
        .await;
        reason
    }

    fn url(&self, tries: u32, path: &str) -> String {
        let turn = self.number + usize::try_from(tries).unwrap();
        format!("{}/{path}", self.urls[turn % self.urls.len()])
    }

    /// Tries until something comes of it, and says how often that was.
    async fn until_told<T>(&self, attempt: impl AsyncFn(u32) -> Option<T>) -> (u32, T) {
        let deadline = Instant::now() + PATIENCE;
        let mut tries = 0;
        loop {
            if let Some(told) = attempt(tries).await {
                return (tries + 1, told);
            }
            tries += 1;
            assert!(Instant::now() < deadline, "agent {}: nobody answers at {:?}", self.number, self.urls);
            let pause = rand::random_range(5..150);
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
    }
}

/// What nobody else asks, of a length of its own.
fn question(id: &str, turn: u32) -> String {
    let words = rand::random_range(1..60);
    let text: String = (0..words).map(|_| format!(" {:x}", rand::random::<u32>())).collect();
    format!("{id} turn {turn}:{text}")
}
