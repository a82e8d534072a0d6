//! What a row says: the columns, and how they are read off a rollout.

use agl_client::SequencesResponse;
use agl_core::event::Event;
use agl_core::rollout::Rollout;
use agl_core::trajectory::Sequence;
use clap::ValueEnum;
use serde_json::{Value, json};

/// What a row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// A training sequence: token ids, mask, log-probs and policy versions of a chain of calls.
    Sequences,
    /// A rollout: task, outcome, and what its calls came to.
    Rollouts,
    /// A model call of the attempt that counts, also a failed one: ids and the whole request and response.
    Calls,
}

/// What was found of a rollout.
pub struct Found {
    pub rollout: Rollout,
    pub sequences: SequencesResponse,
    /// The model calls, where rows are calls.
    pub calls: Vec<Event>,
}

/// A column. Any value may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    pub name: &'static str,
    pub kind: Kind,
}

/// What a column holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Text,
    /// Any JSON; text in parquet.
    Json,
    Integer,
    Number,
    Flag,
    Integers,
    Numbers,
}

/// A value of a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    Missing,
    Text(String),
    Json(Value),
    Integer(i64),
    Number(f64),
    Flag(bool),
    Integers(Vec<i64>),
    Numbers(Vec<f32>),
}

const fn column(name: &'static str, kind: Kind) -> Column {
    Column { name, kind }
}

/// Every row begins with these.
const OF_ROLLOUT: [Column; 8] = [
    column("rollout_id", Kind::Text),
    column("attempt_id", Kind::Text),
    column("run_id", Kind::Text),
    column("group", Kind::Text),
    column("data_id", Kind::Text),
    column("is_train", Kind::Flag),
    column("state", Kind::Text),
    column("reward", Kind::Number),
];

const SEQUENCES: [Column; 7] = [
    column("sequence", Kind::Integer),
    column("prompt_ids", Kind::Integers),
    column("response_ids", Kind::Integers),
    column("response_mask", Kind::Integers),
    column("response_log_probs", Kind::Numbers),
    column("response_versions", Kind::Integers),
    column("calls", Kind::Json),
];

const ROLLOUTS: [Column; 12] = [
    column("created_at", Kind::Number),
    column("updated_at", Kind::Number),
    column("error_message", Kind::Text),
    column("retry_of", Kind::Text),
    column("consumed_step", Kind::Integer),
    column("calls", Kind::Integer),
    column("live_calls", Kind::Integer),
    column("failed_calls", Kind::Integer),
    column("sequences", Kind::Integer),
    column("trained_tokens", Kind::Integer),
    column("input", Kind::Json),
    column("metadata", Kind::Json),
];

const CALLS: [Column; 16] = [
    column("call_id", Kind::Text),
    column("seq", Kind::Integer),
    column("timestamp", Kind::Number),
    column("agent", Kind::Text),
    column("dialect", Kind::Text),
    column("model", Kind::Text),
    column("model_version", Kind::Integer),
    column("http_status", Kind::Integer),
    column("latency_ms", Kind::Number),
    column("trained", Kind::Flag),
    column("call_reward", Kind::Number),
    column("prompt_ids", Kind::Integers),
    column("response_ids", Kind::Integers),
    column("response_log_probs", Kind::Numbers),
    column("request", Kind::Json),
    column("response", Kind::Json),
];

impl What {
    /// The columns, in order.
    pub fn columns(self) -> Vec<Column> {
        let own: &[Column] = match self {
            Self::Sequences => &SEQUENCES,
            Self::Rollouts => &ROLLOUTS,
            Self::Calls => &CALLS,
        };
        [&OF_ROLLOUT, own].concat()
    }

    /// A rollout's rows, each with a value per column.
    pub fn rows(self, found: &Found) -> Vec<Vec<Cell>> {
        let begun = of_rollout(found);
        let row = |own: Vec<Cell>| [begun.clone(), own].concat();
        match self {
            Self::Sequences => {
                let sequences = found.sequences.assembly.sequences.iter().enumerate();
                sequences.map(|(index, sequence)| row(of_sequence(index, sequence, &found.sequences))).collect()
            }
            Self::Rollouts => vec![row(of_whole(found))],
            Self::Calls => found.calls.iter().map(|call| row(of_call(call, &found.sequences))).collect(),
        }
    }
}

fn of_rollout(Found { rollout, sequences, .. }: &Found) -> Vec<Cell> {
    let own_data_id = || Some(rollout.data_id()).filter(|id| !id.is_empty()).map(Cell::Text);
    let data_id = rollout.metadata.get("data_id").map(plain).filter(|cell| *cell != Cell::Missing);
    vec![
        Cell::Text(rollout.rollout_id.clone()),
        Cell::Text(sequences.attempt_id.clone()),
        rollout.metadata.get("run_id").map_or(Cell::Missing, plain),
        rollout.metadata.get("group").map_or(Cell::Missing, plain),
        data_id.or_else(own_data_id).unwrap_or(Cell::Missing),
        Cell::Flag(rollout.is_train),
        Cell::Text(rollout.status.state.to_string()),
        sequences.reward.map_or(Cell::Missing, Cell::Number),
    ]
}

fn of_sequence(index: usize, sequence: &Sequence, all: &SequencesResponse) -> Vec<Cell> {
    let prompt = sequence.prompt_length;
    let ids = |ids: &[u32]| Cell::Integers(ids.iter().map(|id| i64::from(*id)).collect());
    let calls = sequence.calls.iter().map(|call| {
        json!({
            "call_id": call.call_id,
            "seq": call.seq,
            "start": call.start - prompt,
            "end": call.end - prompt,
            "trained": call.trainable,
            "reward": call_reward(all, &call.call_id),
        })
    });
    vec![
        integer(index),
        ids(&sequence.token_ids[..prompt]),
        ids(&sequence.token_ids[prompt..]),
        Cell::Integers(sequence.mask[prompt..].iter().map(|bit| i64::from(*bit)).collect()),
        sequence.log_probs.as_ref().map_or(Cell::Missing, |values| Cell::Numbers(values[prompt..].to_vec())),
        Cell::Integers(sequence.policy_versions[prompt..].to_vec()),
        Cell::Json(calls.collect()),
    ]
}

fn of_whole(Found { rollout, sequences, .. }: &Found) -> Vec<Cell> {
    let assembly = &sequences.assembly;
    let status = &rollout.status;
    let text = |text: &Option<String>| text.clone().map_or(Cell::Missing, Cell::Text);
    vec![
        Cell::Number(status.created_at),
        Cell::Number(status.updated_at),
        text(&status.error_message),
        text(&rollout.retry_of),
        rollout.consumed.as_ref().map_or(Cell::Missing, |consumed| integer(consumed.step)),
        integer(assembly.counts.calls),
        integer(assembly.counts.live),
        integer(assembly.counts.failed),
        integer(assembly.sequences.len()),
        integer(assembly.sequences.iter().map(Sequence::trained_tokens).sum::<usize>()),
        Cell::Json(rollout.input.clone()),
        Cell::Json(Value::Object(rollout.metadata.clone())),
    ]
}

fn of_call(event: &Event, all: &SequencesResponse) -> Vec<Cell> {
    let null = Value::Null;
    let field = |name: &str| event.data.get(name).unwrap_or(&null);
    let (response, call_id) = (field("response"), field("call_id").as_str().unwrap_or_default());
    let choice = &response["choices"][0];
    let whole = |value: &Value| value.as_i64().map_or(Cell::Missing, Cell::Integer);
    let is_this = |sequence: &Sequence| sequence.calls.iter().any(|span| span.call_id == call_id && span.trainable);
    vec![
        plain(field("call_id")),
        whole(field("seq")),
        Cell::Number(event.timestamp),
        plain(field("agent")),
        plain(field("dialect")),
        plain(field("model")),
        whole(field("model_version")),
        whole(field("http_status")),
        field("latency_ms").as_f64().map_or(Cell::Missing, Cell::Number),
        Cell::Flag(all.assembly.sequences.iter().any(is_this)),
        call_reward(all, call_id).map_or(Cell::Missing, Cell::Number),
        ids_of(&response["prompt_token_ids"]).or_else(|| ids_of(&choice["prompt_token_ids"])).unwrap_or(Cell::Missing),
        ids_of(&choice["token_ids"]).unwrap_or(Cell::Missing),
        log_probs_of(&choice["logprobs"]).map_or(Cell::Missing, Cell::Numbers),
        Cell::Json(field("request").clone()),
        Cell::Json(response.clone()),
    ]
}

/// A text or number as text.
fn plain(value: &Value) -> Cell {
    match value {
        Value::Null => Cell::Missing,
        Value::String(text) => Cell::Text(text.clone()),
        other => Cell::Text(other.to_string()),
    }
}

fn integer(number: impl TryInto<i64>) -> Cell {
    Cell::Integer(number.try_into().unwrap_or(i64::MAX))
}

/// The last reward that names the call.
fn call_reward(all: &SequencesResponse, call_id: &str) -> Option<f64> {
    all.call_rewards.iter().rev().find(|(of, _)| of == call_id).map(|(_, value)| *value)
}

fn ids_of(value: &Value) -> Option<Cell> {
    value.as_array()?.iter().map(Value::as_i64).collect::<Option<_>>().map(Cell::Integers)
}

/// Of a chat completion, or of a completion.
fn log_probs_of(value: &Value) -> Option<Vec<f32>> {
    let single = |value: &Value| value.as_f64().map(|value| value as f32);
    if let Some(content) = value["content"].as_array() {
        return content.iter().map(|token| single(&token["logprob"])).collect();
    }
    value["token_logprobs"].as_array()?.iter().map(single).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A rollout of two calls in one sequence, the second of which has its own reward.
    pub fn example() -> Found {
        let rollout = json!({
            "rollout_id": "r", "input": {"question": "1 + 1?"}, "is_train": true,
            "metadata": {"run_id": "run-a", "group": "g7", "data_id": 3},
            "status": {"state": "succeeded", "created_at": 10.5, "updated_at": 12.0},
            "consumed": {"run_id": "run-a", "step": 4},
        });
        let sequences = json!({
            "rollout_id": "r", "attempt_id": "1", "reward": 0.5, "call_rewards": [["c2", -1.0]],
            "level": "trajectory", "breaks": [],
            "sequences": [{
                "token_ids": [1, 2, 7, 8, 3, 9], "mask": [0, 0, 1, 1, 0, 1],
                "log_probs": [0.0, 0.0, -0.25, -0.5, 0.0, -1.5], "policy_versions": [-1, -1, 4, 4, -1, 5],
                "prompt_length": 2,
                "calls": [{"seq": 0, "call_id": "c1", "start": 2, "end": 4, "trainable": true},
                          {"seq": 1, "call_id": "c2", "start": 5, "end": 6, "trainable": true}],
            }],
            "counts": {"calls": 3, "live": 2, "failed": 1, "without_token_ids": 0, "undelivered": 0, "superseded": 0,
                       "frozen": 0, "merges": 1, "breaks": 0},
        });
        let event = |data: Value| {
            let event = json!({"event_type": "model_request", "rollout_id": "r", "attempt_id": "1", "timestamp": 11.0});
            let mut event = event.as_object().cloned().unwrap();
            event.insert("data".to_owned(), data);
            serde_json::from_value(Value::Object(event)).unwrap()
        };
        let calls = vec![
            event(json!({"call_id": "c2", "seq": 1, "model": "policy", "model_version": 5, "http_status": 200,
                         "latency_ms": 2.5, "dialect": "openai.chat", "request": {"messages": []},
                         "response": {"prompt_token_ids": [1, 2, 7, 8, 3], "choices": [
                            {"token_ids": [9], "logprobs": {"content": [{"logprob": -1.5}]}}]}})),
            event(json!({"call_id": "c3", "seq": 2, "http_status": 503, "request": {}, "response": {"detail": "no"}})),
        ];
        Found {
            rollout: serde_json::from_value(rollout).unwrap(),
            sequences: serde_json::from_value(sequences).unwrap(),
            calls,
        }
    }

    fn cell(what: What, row: usize, name: &str) -> Cell {
        let at = what.columns().iter().position(|column| column.name == name).unwrap();
        what.rows(&example())[row][at].clone()
    }

    #[test]
    fn a_sequence_is_split_behind_its_first_prompt_and_its_lists_stay_parallel() {
        let of = |name| cell(What::Sequences, 0, name);
        assert_eq!(of("prompt_ids"), Cell::Integers(vec![1, 2]));
        assert_eq!(of("response_ids"), Cell::Integers(vec![7, 8, 3, 9]));
        assert_eq!(of("response_mask"), Cell::Integers(vec![1, 1, 0, 1]));
        assert_eq!(of("response_log_probs"), Cell::Numbers(vec![-0.25, -0.5, 0.0, -1.5]));
        assert_eq!(of("response_versions"), Cell::Integers(vec![4, 4, -1, 5]));
        let Cell::Json(calls) = of("calls") else { panic!("calls are JSON") };
        assert_eq!((&calls[1]["start"], &calls[1]["end"], &calls[1]["reward"]), (&json!(3), &json!(4), &json!(-1.0)));
        assert_eq!((of("run_id"), of("data_id")), (Cell::Text("run-a".into()), Cell::Text("3".into())));
        assert_eq!((of("attempt_id"), of("reward")), (Cell::Text("1".into()), Cell::Number(0.5)));
    }

    #[test]
    fn a_call_has_its_own_ids_and_a_failed_one_has_none() {
        let of = |row, name| cell(What::Calls, row, name);
        assert_eq!(of(0, "prompt_ids"), Cell::Integers(vec![1, 2, 7, 8, 3]));
        assert_eq!((of(0, "response_ids"), of(0, "trained")), (Cell::Integers(vec![9]), Cell::Flag(true)));
        assert_eq!(of(0, "response_log_probs"), Cell::Numbers(vec![-1.5]));
        assert_eq!(of(0, "call_reward"), Cell::Number(-1.0));
        assert_eq!((of(1, "response_ids"), of(1, "trained")), (Cell::Missing, Cell::Flag(false)));
        assert_eq!(of(1, "http_status"), Cell::Integer(503));
    }

    #[test]
    fn a_rollout_says_what_its_calls_came_to() {
        let of = |name| cell(What::Rollouts, 0, name);
        assert_eq!((of("calls"), of("live_calls")), (Cell::Integer(3), Cell::Integer(2)));
        assert_eq!((of("sequences"), of("trained_tokens")), (Cell::Integer(1), Cell::Integer(3)));
        assert_eq!((of("consumed_step"), of("error_message")), (Cell::Integer(4), Cell::Missing));
    }

    #[test]
    fn every_row_has_a_value_for_each_column_and_every_column_stands_in_the_page() {
        let page = include_str!("../../../../../../docs/export.md");
        for what in What::value_variants() {
            let columns = what.columns();
            for row in what.rows(&example()) {
                assert_eq!(row.len(), columns.len(), "{what:?}");
            }
            for Column { name, .. } in columns {
                assert!(page.contains(&format!("| `{name}` |")), "{name} is not in docs/export.md");
            }
        }
    }
}
