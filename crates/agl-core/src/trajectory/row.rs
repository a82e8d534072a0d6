//! What is stored of a model call: one row per sampled answer, from which the tree of an attempt can be rebuilt.

use serde::{Deserialize, Serialize};

/// One sampled answer of one model call. A call with `n > 1` choices is `n` rows with one `call_id`.
///
/// The prompt is `path(parent)[..shared_prefix] ++ inserted`, where `path(parent)` is the parent's prompt and answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallRow {
    /// Position in the attempt; `(attempt, seq)` is unique and counts up in the order of recording.
    pub seq: u64,
    /// What the proxy told the harness in `X-Agl-Call-Id`.
    pub call_id: String,
    /// Which of the call's choices.
    pub choice: u32,
    /// The `seq` of the row whose path this prompt starts with; `None` where it shares nothing.
    pub parent: Option<u64>,
    /// How many tokens of that path the prompt starts with.
    pub shared_prefix: u32,
    /// The rest of the prompt.
    pub inserted: Vec<u32>,
    /// The tokens that the policy sampled.
    pub sampled: Vec<u32>,
    /// Parallel to `sampled`; `None` where the server sent none (validation).
    pub log_probs: Option<Vec<f32>>,
    /// Policy version of each sampled token, run-length coded; the counts add up to `sampled.len()`.
    pub versions: Vec<VersionRun>,
    /// Whether the answer reached the harness.
    pub delivery: Delivery,
    /// Whether there are tokens to train on, or why not.
    pub outcome: CallOutcome,
    /// False for answers of a frozen or external model: context, never trained.
    pub trainable: bool,
}

/// `count` tokens sampled by policy version `version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionRun {
    /// Policy version.
    pub version: u64,
    /// How many tokens.
    pub count: u32,
}

/// Run-length codes one version per token.
#[must_use]
pub fn version_runs(versions: impl IntoIterator<Item = u64>) -> Vec<VersionRun> {
    let mut runs: Vec<VersionRun> = Vec::new();
    for version in versions {
        match runs.last_mut() {
            Some(run) if run.version == version => run.count += 1,
            _ => runs.push(VersionRun { version, count: 1 }),
        }
    }
    runs
}

/// Whether a call's answer reached the harness. Only delivered answers are live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Delivery {
    /// The harness has it.
    Delivered,
    /// The harness hung up before it came.
    Undelivered,
    /// The harness hung up and asked the same again: the retry counts instead.
    Superseded,
}

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallOutcome {
    /// Answered, with token ids.
    Ok,
    /// The upstream or the gateway failed it.
    Failed,
    /// Answered, but without token ids: the server cannot be trained on.
    NoTokenIds,
}

impl CallRow {
    /// True for an answered call whose tokens the harness received: what training may use as a link of a chain.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.outcome == CallOutcome::Ok && self.delivery == Delivery::Delivered
    }
}
