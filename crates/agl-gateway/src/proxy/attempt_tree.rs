//! What the recorder knows of one attempt: its token tree, and what was asked and answered, for whoever asks again.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use agl_core::trajectory::{CallOutcome, CallRow, Continuation, Delivery, NewCall, TokenTree, TreeError};
use agl_store::{CallRecord, StoredCall};
use bytes::Bytes;
use serde_json::{Map, Value};

use super::answer::Choice;
use super::recorder::AttemptKey;

/// See the [module](self).
pub(super) struct AttemptTree {
    pub(super) tree: TokenTree,
    next_seq: u64,
    pub(super) calls_begun: u64,
    /// The answered calls by the digest of their request: the newest, and every one whose answer did not reach the harness, or
    /// may not have.
    pub(super) asked: HashMap<[u8; 32], Vec<Recorded>>,
    tokens: Arc<AtomicUsize>,
}

/// A call that has ended.
pub(crate) struct Finished {
    pub(crate) key: AttemptKey,
    pub(crate) call_id: String,
    pub(crate) timestamp: f64,
    /// The event's payload without `call_id`, `seq` and `delivered`.
    pub(crate) data: Map<String, Value>,
    pub(crate) request: Bytes,
    pub(crate) response: Bytes,
    pub(crate) result: CallResult,
    pub(crate) digest: [u8; 32],
    pub(crate) http_status: u16,
    pub(crate) trainable: bool,
    /// False where the harness has hung up already.
    pub(crate) client_present: bool,
}

/// A call that has been recorded.
#[derive(Clone, Debug)]
pub(crate) struct Recorded {
    pub(crate) call_id: String,
    pub(super) seqs: Vec<u64>,
    /// False where there is no answer that could be delivered.
    pub(super) answered: bool,
    /// The harness has the answer, as far as is known.
    pub(super) delivered: bool,
    /// A retry is being given this answer, or has it already.
    pub(super) claimed: bool,
    /// What each of its answers came to.
    pub(crate) answers: Vec<(CallOutcome, Continuation)>,
}

/// What came of it.
pub(crate) enum CallResult {
    Answered(Vec<Choice>),
    Failed,
}

impl AttemptTree {
    pub(super) fn rebuild(rows: Vec<StoredCall>, tokens: Arc<AtomicUsize>) -> Result<Self, TreeError> {
        let mut attempt = Self { tree: TokenTree::new(), next_seq: 0, calls_begun: 0, asked: HashMap::new(), tokens };
        let mut last_call = None;
        for StoredCall { row, request_digest, settled } in rows {
            // After a crash it is not known whether the last answers left. If the harness asks the same again, they did not.
            let may_be_lost =
                row.delivery == Delivery::Undelivered || (row.delivery == Delivery::Delivered && !settled);
            if row.delivery != Delivery::Superseded {
                attempt.note_row(request_digest, &row, !may_be_lost);
            }
            if last_call.as_ref() != Some(&row.call_id) {
                attempt.calls_begun += 1;
                last_call = Some(row.call_id.clone());
            }
            attempt.next_seq = row.seq + 1;
            attempt.count(&row);
            attempt.tree.insert(row)?;
        }
        Ok(attempt)
    }

    /// Keeps a call in mind for whoever asks the same again.
    pub(super) fn note(&mut self, digest: [u8; 32], call: Recorded) {
        let calls = self.asked.entry(digest).or_default();
        calls.retain(|before| before.answered && !before.delivered);
        calls.push(call);
    }

    /// The call of these rows, if it is still kept in mind.
    pub(super) fn asked_with(&mut self, digest: &[u8; 32], seqs: &[u64]) -> Option<&mut Recorded> {
        self.asked.get_mut(digest)?.iter_mut().find(|call| call.seqs == seqs)
    }

    /// As [`Self::note`], row by row.
    fn note_row(&mut self, digest: [u8; 32], row: &CallRow, delivered: bool) {
        let newest = self.asked.get_mut(&digest).and_then(|calls| calls.last_mut());
        let answered = row.outcome != CallOutcome::Failed;
        match newest.filter(|newest| newest.call_id == row.call_id) {
            Some(newest) => newest.seqs.push(row.seq),
            None => {
                let (call_id, seqs) = (row.call_id.clone(), vec![row.seq]);
                self.note(digest, Recorded { call_id, seqs, answered, delivered, claimed: false, answers: Vec::new() });
            }
        }
    }

    fn count(&self, row: &CallRow) {
        self.tokens.fetch_add(row.inserted.len() + 2 * row.sampled.len(), Ordering::Relaxed);
    }

    /// Adds the call's rows to the tree and gives what is to be stored, and whether there is an answer in it.
    pub(super) fn add(&mut self, call: Finished) -> Result<(CallRecord, bool), TreeError> {
        let delivery = if call.client_present { Delivery::Delivered } else { Delivery::Undelivered };
        let first_seq = self.next_seq;
        let (choices, missing) = match call.result {
            CallResult::Answered(choices) => (choices, CallOutcome::NoTokenIds),
            CallResult::Failed => (Vec::new(), CallOutcome::Failed),
        };
        // A failure has no choices; what has none cannot be told again.
        let answered = !choices.is_empty();
        // A call without any answer is one empty row, so that it is counted.
        let choices = if choices.is_empty() { vec![Choice::default()] } else { choices };
        let mut rows = Vec::with_capacity(choices.len());
        for (index, choice) in (0_u32..).zip(choices) {
            let outcome = if choice.ids.is_some() { CallOutcome::Ok } else { missing };
            let (prompt, sampled) = choice.ids.unwrap_or_default();
            let row = self.tree.record(NewCall {
                seq: self.next_seq,
                call_id: call.call_id.clone(),
                choice: index,
                prompt: &prompt,
                sampled,
                log_probs: choice.log_probs,
                versions: choice.versions,
                delivery,
                outcome,
                trainable: call.trainable,
            })?;
            self.next_seq += 1;
            self.count(&row);
            rows.push(row);
        }
        let lost = if answered { self.asked.remove(&call.digest).unwrap_or_default() } else { Vec::new() };
        let supersedes: Vec<u64> = lost
            .into_iter()
            // One that a retry is being given is on its way to the harness.
            .filter(|before| before.answered && !before.delivered && !before.claimed)
            .flat_map(|before| before.seqs)
            .collect();
        for &seq in &supersedes {
            self.tree.set_delivery(seq, Delivery::Superseded)?;
        }
        let mut data = call.data;
        data.insert("call_id".to_owned(), call.call_id.into());
        data.insert("seq".to_owned(), first_seq.into());
        data.insert("delivered".to_owned(), call.client_present.into());
        let record = CallRecord {
            rollout_id: call.key.rollout_id,
            attempt_id: call.key.attempt_id,
            timestamp: call.timestamp,
            data,
            request: call.request,
            response: call.response,
            rows,
            request_digest: call.digest,
            http_status: call.http_status,
            supersedes,
        };
        Ok((record, answered))
    }
}
