//! What was acknowledged against what the gateway holds, rollout by rollout.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use agl_client::GatewayClient;
use agl_client::rollouts::EventFormat;
use agl_core::event::{Event, MODEL_REQUEST, REWARD};
use agl_core::rollout::RolloutState;
use agl_core::trajectory::{Level, Sequence};
use agl_mock_llm::answer::{log_prob, read_request};
use agl_mock_llm::tokenizer::{MESSAGE_END, encode};
use futures_util::{StreamExt, stream};
use serde_json::Value;

use super::VERSION;
use super::agents::{Answered, Noted, Notes};

/// Rollouts looked at beside each other.
const AT_ONCE: usize = 8;

/// How much was looked at, and found to be there.
#[derive(Clone, Copy, Debug, Default)]
pub struct Found {
    pub rollouts: usize,
    pub calls: usize,
    /// Answers that are trained on though no agent has them: the connection had taken the answer, and broke before it was read.
    pub unacknowledged: usize,
    pub rewards: usize,
    /// Rewards whose first acknowledgement was lost: agents post those again.
    pub rewards_twice: usize,
    pub sequences: usize,
    pub trained_tokens: usize,
}

/// Looks at every rollout; panics at the first thing that is not as it was acknowledged.
pub async fn audit(client: &GatewayClient, notes: &Notes) -> Found {
    let each = stream::iter(notes.rollouts()).map(|noted| {
        let client = client.clone();
        async move { tokio::spawn(async move { rollout(&client, &noted).await }).await.unwrap() }
    });
    let all: Vec<Found> = each.buffer_unordered(AT_ONCE).collect().await;
    all.into_iter().fold(Found::default(), |sum, found| Found {
        rollouts: sum.rollouts + found.rollouts,
        calls: sum.calls + found.calls,
        unacknowledged: sum.unacknowledged + found.unacknowledged,
        rewards: sum.rewards + found.rewards,
        rewards_twice: sum.rewards_twice + found.rewards_twice,
        sequences: sum.sequences + found.sequences,
        trained_tokens: sum.trained_tokens + found.trained_tokens,
    })
}

/// A call as the model answered it.
struct Sampled {
    prompt: Vec<u32>,
    sampled: Vec<u32>,
}

async fn rollout(client: &GatewayClient, noted: &Noted) -> Found {
    let id = &noted.rollout_id;
    let whole = client.get_rollout(id).await.unwrap_or_else(|error| panic!("{id} is lost: {error}")).rollout;
    assert_eq!(whole.status.state, RolloutState::Succeeded, "{id}");
    let events = client.events(id, None, EventFormat::Raw).await.unwrap();
    let transitions = client.sequences(id, Level::Transition, None).await.unwrap().assembly;
    let trajectories = client.sequences(id, Level::Trajectory, None).await.unwrap().assembly;

    let answered = answered_calls(id, &events);
    let live = live_calls(id, &transitions.sequences, &answered);
    assert_eq!(transitions.counts.live, live.len(), "{id}: every live call is a transition");
    for call in &noted.calls {
        let found = live.get(call.call_id.as_str());
        let found = found.unwrap_or_else(|| panic!("{id}: the acknowledged {call:?} is lost, or not live"));
        is_what_was_acknowledged(id, call, found);
    }
    let trained_tokens = trained_exactly_once(id, &trajectories.sequences, &live);

    let mut rewards: HashMap<&str, usize> = HashMap::new();
    for event in events.iter().filter(|event| event.event_type == REWARD) {
        *rewards.entry(event.data["reason"].as_str().unwrap()).or_default() += 1;
    }
    for reason in &noted.rewards {
        assert!(rewards.contains_key(reason.as_str()), "{id}: the acknowledged reward {reason} is lost");
    }
    assert_eq!(rewards.len(), noted.rewards.len(), "{id}: a reward that nobody posted");
    Found {
        rollouts: 1,
        calls: noted.calls.len(),
        unacknowledged: live.len() - noted.calls.len(),
        rewards: noted.rewards.len(),
        rewards_twice: rewards.values().filter(|count| **count > 1).count(),
        sequences: trajectories.sequences.len(),
        trained_tokens,
    }
}

/// What the model answered, by call: worked out once more from each request, and compared with the response beside it.
fn answered_calls<'a>(id: &str, events: &'a [Event]) -> HashMap<&'a str, Sampled> {
    let calls = events.iter().filter(|event| event.event_type == MODEL_REQUEST);
    let mut answered = HashMap::new();
    for event in calls.filter(|event| event.data["http_status"] == 200) {
        let (request, response) = (&event.data["request"], &event.data["response"]);
        let call_id = event.data["call_id"].as_str().unwrap();
        let asked = read_request(true, request, agl_mock_llm::Shape::default())
            .unwrap_or_else(|error| panic!("{id} {call_id}: {error}"));
        let mut sampled = encode(&asked.last_text);
        sampled.push(MESSAGE_END);
        let prompt = asked.prompts[0].clone();
        assert_eq!(ids(&response["prompt_token_ids"]), prompt, "{id} {call_id}");
        assert_eq!(ids(&response["choices"][0]["token_ids"]), sampled, "{id} {call_id}");
        let twice = answered.insert(call_id, Sampled { prompt, sampled });
        assert!(twice.is_none(), "{id}: {call_id} is recorded twice");
    }
    answered
}

fn ids(list: &Value) -> Vec<u32> {
    list.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

/// The live calls: each row holds the exact tokens of the call's event, their log-probs and their version.
fn live_calls<'a>(
    id: &str,
    transitions: &'a [Sequence],
    answered: &'a HashMap<&str, Sampled>,
) -> HashMap<&'a str, &'a Sampled> {
    let mut live = HashMap::new();
    for row in transitions {
        let [span] = row.calls.as_slice() else { panic!("{id}: a transition is one call: {:?}", row.calls) };
        let call = answered.get(span.call_id.as_str());
        let call = call.unwrap_or_else(|| panic!("{id}: {} has tokens but no answer", span.call_id));
        let (prompt, sampled) = row.token_ids.split_at(span.start);
        assert_eq!((prompt, sampled), (&call.prompt[..], &call.sampled[..]), "{id} {}", span.call_id);
        assert_eq!(row.mask[..span.start].iter().max(), Some(&0), "{id}");
        assert!(row.mask[span.start..].iter().all(|bit| *bit == 1), "{id}");
        let log_probs = row.log_probs.as_ref().unwrap();
        for (position, token) in row.token_ids.iter().enumerate().skip(span.start) {
            assert!((log_probs[position] - log_prob(position, *token)).abs() < 1e-6, "{id} {}", span.call_id);
            assert_eq!(row.policy_versions[position], VERSION.cast_signed(), "{id} {}", span.call_id);
        }
        assert!(live.insert(span.call_id.as_str(), call).is_none(), "{id}: {} is trained twice", span.call_id);
    }
    live
}

fn is_what_was_acknowledged(id: &str, call: &Answered, stored: &Sampled) {
    let mut told = encode(&call.text);
    told.push(MESSAGE_END);
    assert_eq!(stored.sampled, told, "{id} {}: another answer than the agent got", call.call_id);
    assert_eq!(call.text, call.asked, "{id} {}: the model says what it was told", call.call_id);
}

/// Every token of a live call stands in exactly one row with mask 1, and nothing else does. Gives how many there are.
fn trained_exactly_once(id: &str, rows: &[Sequence], live: &HashMap<&str, &Sampled>) -> usize {
    let mut seen = HashSet::new();
    let mut trained = 0;
    for row in rows {
        let mut mask = vec![0; row.token_ids.len()];
        for span in &row.calls {
            let call = live.get(span.call_id.as_str());
            let call = call.unwrap_or_else(|| panic!("{id}: {} is trained and not live", span.call_id));
            assert!(seen.insert(span.call_id.as_str()), "{id}: {} is trained twice", span.call_id);
            assert_eq!(&row.token_ids[..span.start], &call.prompt[..], "{id} {}", span.call_id);
            assert_eq!(&row.token_ids[span.start..span.end], &call.sampled[..], "{id} {}", span.call_id);
            mask[span.start..span.end].fill(1);
            trained += call.sampled.len();
        }
        assert_eq!(row.mask, mask, "{id}");
    }
    assert_eq!(seen.len(), live.len(), "{id}: a live call is in no row");
    trained
}

/// The file by itself: SQLite finds no fault in it, and nothing in it points to what is not there.
pub fn database(file: &Path) {
    let database = rusqlite::Connection::open(file).unwrap();
    let check: String = database.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(check, "ok");
    let count = |sql: &str| database.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    for (what, sql) in [
        ("calls whose base is missing", "SELECT count(*) FROM events WHERE base NOT IN (SELECT number FROM events)"),
        (
            "calls that stand behind another attempt's",
            "SELECT count(*) FROM events call JOIN events base ON base.number = call.base WHERE base.attempt <> call.attempt",
        ),
        (
            "calls with the number of another",
            "SELECT count(*) - count(DISTINCT attempt || '/' || seq) FROM events WHERE seq IS NOT NULL",
        ),
        ("events without an attempt", "SELECT count(*) FROM events WHERE attempt NOT IN (SELECT number FROM attempts)"),
        (
            "attempts without a rollout",
            "SELECT count(*) FROM attempts WHERE rollout_id NOT IN (SELECT rollout_id FROM rollouts)",
        ),
    ] {
        assert_eq!(count(sql), 0, "{what}");
    }
}
