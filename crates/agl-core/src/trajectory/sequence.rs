//! From the tree to training rows.
//!
//! At `trajectory` level a row is a chain of calls in which every `(p_i, a_i) ⪯ p_{i+1}` holds; the first call that extends
//! another continues its row, every further one opens a row of its own in which the shared answer is context. At `transition`
//! level every call is a row. Either way each sampled token of each live, trainable call is trained exactly once.

use serde::{Deserialize, Serialize};

use super::row::{CallOutcome, Delivery};
use super::tree::{NodeId, Recorded, TokenTree};

/// How calls become rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Best-effort merging: one row per chain of calls.
    #[default]
    Trajectory,
    /// One row per call.
    Transition,
}

/// One training row. `token_ids`, `mask`, `log_probs` and `policy_versions` are parallel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sequence {
    /// Prompt, answers and what the harness inserted between them.
    pub token_ids: Vec<u32>,
    /// 1 where the policy sampled the token in this row's own calls, 0 for context.
    pub mask: Vec<u8>,
    /// Recorded log-prob where `mask` is 1, else 0. `None` if a trained token has none.
    pub log_probs: Option<Vec<f32>>,
    /// Policy version where `mask` is 1, else −1.
    pub policy_versions: Vec<i64>,
    /// Length of the first call's prompt.
    pub prompt_length: usize,
    /// The calls of this row, oldest first.
    pub calls: Vec<CallSpan>,
}

impl Sequence {
    /// Number of trained tokens.
    #[must_use]
    pub fn trained_tokens(&self) -> usize {
        self.mask.iter().filter(|&&bit| bit == 1).count()
    }
}

/// Where a call's sampled tokens stand in a row: `token_ids[start..end]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallSpan {
    /// See [`super::CallRow::seq`].
    pub seq: u64,
    /// See [`super::CallRow::call_id`].
    pub call_id: String,
    /// First sampled token.
    pub start: usize,
    /// One past the last.
    pub end: usize,
    /// False for an answer of a frozen model.
    pub trainable: bool,
}

/// A call that shares the opening of an earlier path but does not extend it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathBreak {
    /// The call that opened a new path.
    pub seq: u64,
    /// Its id.
    pub call_id: String,
    /// The call whose path it left.
    pub previous_seq: u64,
    /// How many tokens the two share.
    pub at: usize,
    /// True where they part inside the earlier path's very first prompt: another conversation, a sub-agent say.
    pub new_conversation: bool,
    /// What the earlier path says from [`PathBreak::WINDOW_BEFORE`] tokens before `at`, cut to a window.
    pub previous_tokens: Vec<u32>,
    /// What the new prompt says from the same place, cut to a window twice as long.
    pub tokens: Vec<u32>,
}

impl PathBreak {
    /// Shared tokens kept before the break, so that characters split over tokens decode.
    pub const WINDOW_BEFORE: usize = 8;
    /// Tokens kept after it.
    pub const WINDOW_AFTER: usize = 256;
}

/// What became of an attempt's calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeCounts {
    /// Recorded answers (a call with `n` choices counts `n`).
    pub calls: usize,
    /// Delivered, with ids.
    pub live: usize,
    /// Failed at the upstream or the gateway.
    pub failed: usize,
    /// Answered without token ids.
    pub without_token_ids: usize,
    /// The harness hung up and did not ask again.
    pub undelivered: usize,
    /// The harness hung up and asked again.
    pub superseded: usize,
    /// Live answers of frozen models.
    pub frozen: usize,
    /// Calls that continued a row.
    pub merges: usize,
    /// Calls that left an earlier path (without new conversations).
    pub breaks: usize,
}

/// The rows of one attempt and how they came about.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Assembly {
    /// How calls became rows.
    pub level: Level,
    /// Rows with at least one trained token, in the order of their first call.
    pub sequences: Vec<Sequence>,
    /// Every call that opened a new path, oldest first.
    pub breaks: Vec<PathBreak>,
    /// See [`TreeCounts`].
    pub counts: TreeCounts,
}

impl TokenTree {
    /// Reads the training rows off the tree.
    #[must_use]
    pub fn sequences(&self, level: Level) -> Assembly {
        let links = self.links();
        let mut has_continuation = vec![false; self.calls.len()];
        let mut continues = vec![None; self.calls.len()];
        let mut chains: Vec<Vec<usize>> = Vec::new();
        let mut chain_of = vec![usize::MAX; self.calls.len()];
        for (index, call) in self.calls.iter().enumerate().filter(|(_, call)| call.is_live()) {
            debug_assert!(call.outcome == CallOutcome::Ok);
            match links[index] {
                Some(before) if level == Level::Trajectory && !has_continuation[before] => {
                    has_continuation[before] = true;
                    continues[index] = Some(before);
                    chain_of[index] = chain_of[before];
                    chains[chain_of[before]].push(index);
                }
                _ => {
                    chain_of[index] = chains.len();
                    chains.push(vec![index]);
                }
            }
        }
        let first_prompts: Vec<Option<u32>> = chain_of
            .iter()
            .map(|&chain| Some(self.depth(self.calls[*chains.get(chain)?.first()?].prompt_end)))
            .collect();
        let breaks = self.breaks(&links, &first_prompts);
        let mut counts = self.counts();
        counts.merges = continues.iter().flatten().count();
        counts.breaks = breaks.iter().filter(|found| !found.new_conversation).count();
        let sequences = chains.iter().filter_map(|chain| self.row(chain)).collect();
        Assembly { level, sequences, breaks, counts }
    }

    /// For each live call the newest of the longest live paths `(p_i, a_i)` that its prompt starts with.
    fn links(&self) -> Vec<Option<usize>> {
        (0..self.calls.len())
            .map(|index| {
                let call = &self.calls[index];
                if !call.is_live() {
                    return None;
                }
                let mut node = call.prompt_end;
                loop {
                    let ends = &self.nodes[node].ends;
                    if let Some(&found) = ends.iter().rev().find(|&&end| end < index && self.calls[end].is_live()) {
                        return Some(found);
                    }
                    if node == self.nodes[node].parent {
                        return None;
                    }
                    node = self.nodes[node].parent;
                }
            })
            .collect()
    }

    fn row(&self, chain: &[usize]) -> Option<Sequence> {
        let (first, last) = (chain.first()?, chain.last()?);
        if !chain.iter().any(|&index| self.calls[index].trainable && self.sampled_length(&self.calls[index]) > 0) {
            return None;
        }
        let token_ids = self.tokens_to(self.calls[*last].path_end);
        let mut mask = vec![0; token_ids.len()];
        let mut log_probs = Some(vec![0.0; token_ids.len()]);
        let mut policy_versions = vec![-1; token_ids.len()];
        let mut calls = Vec::with_capacity(chain.len());
        for &index in chain {
            let call = &self.calls[index];
            let (start, end) = (self.depth(call.prompt_end) as usize, self.depth(call.path_end) as usize);
            calls.push(CallSpan {
                seq: call.seq,
                call_id: call.call_id.clone(),
                start,
                end,
                trainable: call.trainable,
            });
            if !call.trainable {
                continue;
            }
            mask[start..end].fill(1);
            match (&call.log_probs, &mut log_probs) {
                (Some(recorded), Some(row)) => row[start..end].copy_from_slice(recorded),
                _ => log_probs = None,
            }
            let versions = call.versions.iter().flat_map(|run| {
                std::iter::repeat_n(i64::try_from(run.version).unwrap_or(i64::MAX), run.count as usize)
            });
            for (slot, version) in policy_versions[start..end].iter_mut().zip(versions) {
                *slot = version;
            }
        }
        let prompt_length = self.depth(self.calls[*first].prompt_end) as usize;
        Some(Sequence { token_ids, mask, log_probs, policy_versions, prompt_length, calls })
    }

    fn breaks(&self, links: &[Option<usize>], first_prompts: &[Option<u32>]) -> Vec<PathBreak> {
        let mut found = Vec::new();
        for (index, call) in self.calls.iter().enumerate().filter(|(_, call)| call.is_live()) {
            let Some(previous) = call.parent.and_then(|seq| self.position(seq)).filter(|&i| self.calls[i].is_live())
            else {
                continue;
            };
            let at = call.shared_prefix;
            let parts = at < self.depth(call.prompt_end) && at < self.depth(self.calls[previous].path_end);
            if !parts || links[index] == Some(previous) {
                continue;
            }
            let from = (at as usize).saturating_sub(PathBreak::WINDOW_BEFORE);
            let window = |node: NodeId, after: usize| {
                let tokens = self.tokens_to(node);
                tokens[from..tokens.len().min(at as usize + after)].to_vec()
            };
            found.push(PathBreak {
                seq: call.seq,
                call_id: call.call_id.clone(),
                previous_seq: self.calls[previous].seq,
                at: at as usize,
                new_conversation: first_prompts[previous].is_none_or(|first| at < first),
                previous_tokens: window(self.calls[previous].path_end, PathBreak::WINDOW_AFTER),
                tokens: window(call.prompt_end, 2 * PathBreak::WINDOW_AFTER),
            });
        }
        found
    }

    fn counts(&self) -> TreeCounts {
        let mut counts = TreeCounts { calls: self.calls.len(), ..TreeCounts::default() };
        for call in &self.calls {
            match (call.outcome, call.delivery) {
                (CallOutcome::Failed, _) => counts.failed += 1,
                (CallOutcome::NoTokenIds, _) => counts.without_token_ids += 1,
                (CallOutcome::Ok, Delivery::Undelivered) => counts.undelivered += 1,
                (CallOutcome::Ok, Delivery::Superseded) => counts.superseded += 1,
                (CallOutcome::Ok, Delivery::Delivered) => {
                    counts.live += 1;
                    counts.frozen += usize::from(!call.trainable);
                }
            }
        }
        counts
    }

    pub(super) fn depth(&self, node: NodeId) -> u32 {
        self.nodes[node].depth
    }

    fn sampled_length(&self, call: &Recorded) -> u32 {
        self.depth(call.path_end) - self.depth(call.prompt_end)
    }
}

/// Length limits, applied after assembly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LengthLimits {
    /// A row whose initial prompt is longer is dropped (`trajectory_max_prompt_length`).
    pub max_prompt_length: usize,
    /// What stands more than this many tokens behind the initial prompt is cut off (`trajectory_max_response_length`).
    pub max_response_length: usize,
}

/// What the limits cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitCounts {
    /// Rows dropped for their prompt.
    pub dropped_rows: usize,
    /// Rows cut.
    pub truncated_rows: usize,
    /// Rows that held no trained token after the cut, and were dropped.
    pub emptied_rows: usize,
    /// Trained tokens lost to any of these.
    pub lost_tokens: usize,
}

impl LengthLimits {
    /// Drops and cuts, and says what it cost.
    #[must_use]
    pub fn apply(self, sequences: Vec<Sequence>) -> (Vec<Sequence>, LimitCounts) {
        let mut counts = LimitCounts::default();
        let kept = sequences
            .into_iter()
            .filter_map(|mut row| {
                let before = row.trained_tokens();
                if row.prompt_length > self.max_prompt_length {
                    counts.dropped_rows += 1;
                    counts.lost_tokens += before;
                    return None;
                }
                let limit = row.prompt_length.saturating_add(self.max_response_length);
                if row.token_ids.len() > limit {
                    counts.truncated_rows += 1;
                    truncate(&mut row, limit);
                }
                let after = row.trained_tokens();
                counts.lost_tokens += before - after;
                counts.emptied_rows += usize::from(after == 0);
                (after > 0).then_some(row)
            })
            .collect();
        (kept, counts)
    }
}

fn truncate(row: &mut Sequence, length: usize) {
    row.token_ids.truncate(length);
    row.mask.truncate(length);
    row.policy_versions.truncate(length);
    if let Some(log_probs) = &mut row.log_probs {
        log_probs.truncate(length);
    }
    row.calls.retain_mut(|span| {
        span.end = span.end.min(length);
        span.start < length
    });
}
