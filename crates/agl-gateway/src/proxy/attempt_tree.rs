//! What the recorder knows of one attempt: its token tree, and what was asked and answered, for whoever asks again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use agl_core::trajectory::{CallOutcome, CallRow, Continuation, Delivery, NewCall, TokenTree, TreeError};
use agl_store::{CallRecord, StoredCall, Writer};
use bytes::Bytes;
use serde_json::{Map, Value};

use super::answer::Choice;
use super::recorder::AttemptKey;

/// See the [module](self).
pub(super) struct AttemptTree {
    pub(super) tree: TokenTree,
    next_seq: u64,
    pub(super) calls_begun: u64,
    /// The call of every row in the tree.
    calls: BTreeMap<u64, String>,
    /// Rows of other gateways that are just handing over the answer: they will say whether it arrived.
    underway: BTreeSet<u64>,
    /// What is here is not what is stored: it is to be built anew.
    pub(super) stale: bool,
    /// The answered calls by the digest of their request: the newest, and every one whose answer did not reach the harness, or
    /// may not have.
    pub(super) asked: HashMap<[u8; 32], Vec<Recorded>>,
    weight: Weight,
}

/// Tokens that a tree holds, counted among those of all trees for as long as it is there.
pub(super) struct Weight {
    tokens: usize,
    all: Arc<AtomicUsize>,
}

impl Weight {
    pub(super) fn among(all: &Arc<AtomicUsize>) -> Self {
        Self { tokens: 0, all: Arc::clone(all) }
    }

    fn add(&mut self, row: &CallRow) {
        let tokens = row.inserted.len() + 2 * row.sampled.len();
        self.tokens += tokens;
        self.all.fetch_add(tokens, Ordering::Relaxed);
    }
}

impl Drop for Weight {
    fn drop(&mut self) {
        self.all.fetch_sub(self.tokens, Ordering::Relaxed);
    }
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
    pub(super) fn rebuild(rows: Vec<StoredCall>, weight: Weight) -> Result<Self, TreeError> {
        let mut attempt = Self {
            tree: TokenTree::new(),
            next_seq: 0,
            calls_begun: 0,
            calls: BTreeMap::new(),
            underway: BTreeSet::new(),
            stale: false,
            asked: HashMap::new(),
            weight,
        };
        rows.into_iter().try_for_each(|stored| attempt.insert(stored))?;
        Ok(attempt)
    }

    /// What no row tells of the tree before: which calls have begun, and which answers a retry is being given.
    pub(super) fn inherit(&mut self, before: &Self) {
        self.calls_begun = self.calls_begun.max(before.calls_begun);
        for (digest, calls) in &before.asked {
            for call in calls.iter().filter(|call| call.claimed) {
                if let Some(same) = self.asked_with(digest, &call.seqs) {
                    same.claimed = true;
                }
            }
        }
    }

    /// Takes in what is stored from row `from` on: rows that are not here yet, and what has become of the others. False where
    /// what is here is not what is stored.
    pub(super) fn take_in(&mut self, stored: Vec<StoredCall>, from: u64) -> Result<bool, TreeError> {
        let mut known = self.calls.range(from..).count();
        for stored in stored {
            match self.calls.get(&stored.row.seq) {
                Some(call_id) if *call_id == stored.row.call_id => {
                    known -= 1;
                    self.hear(&stored)?;
                }
                None if stored.row.seq >= self.next_seq => self.insert(stored)?,
                _ => return Ok(false),
            }
        }
        Ok(known == 0)
    }

    /// The number of the next row.
    pub(super) fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// True while another gateway is handing over an answer to this question.
    pub(super) fn awaits(&self, digest: &[u8; 32]) -> bool {
        let calls = self.asked.get(digest).map_or(&[][..], Vec::as_slice);
        calls.iter().flat_map(|call| &call.seqs).any(|seq| self.underway.contains(seq))
    }

    /// True while another gateway is handing over any answer.
    pub(super) fn awaits_any(&self) -> bool {
        !self.underway.is_empty()
    }

    fn insert(&mut self, stored: StoredCall) -> Result<(), TreeError> {
        let is_underway = is_underway(&stored);
        let StoredCall { row, request_digest, settled, writer } = stored;
        // Where the gateway that wrote it is gone, nobody knows whether an answer left. If the harness asks the same again, it
        // did not.
        let may_be_lost = row.delivery == Delivery::Undelivered
            || (row.delivery == Delivery::Delivered && !settled && writer == Writer::Gone);
        if row.delivery != Delivery::Superseded {
            self.note_row(request_digest, &row, !may_be_lost);
        }
        if is_underway {
            self.underway.insert(row.seq);
        }
        if self.calls.last_key_value().is_none_or(|(_, call_id)| *call_id != row.call_id) {
            self.calls_begun += 1;
        }
        self.calls.insert(row.seq, row.call_id.clone());
        self.next_seq = row.seq + 1;
        self.weight.add(&row);
        self.tree.insert(row)
    }

    /// Notes what has become of a row that is here.
    fn hear(&mut self, stored: &StoredCall) -> Result<(), TreeError> {
        let StoredCall { row, request_digest, settled, writer } = stored;
        if is_underway(stored) {
            self.underway.insert(row.seq);
            return Ok(());
        }
        self.underway.remove(&row.seq);
        if !settled && *writer == Writer::Here {
            // This gateway knows better.
            return Ok(());
        }
        if *settled {
            self.tree.set_delivery(row.seq, row.delivery)?;
        }
        let Some(calls) = self.asked.get_mut(request_digest) else { return Ok(()) };
        if row.delivery == Delivery::Superseded {
            calls.retain(|call| !call.seqs.contains(&row.seq));
        } else if let Some(call) = calls.iter_mut().find(|call| call.seqs.contains(&row.seq)) {
            call.delivered = *settled && row.delivery == Delivery::Delivered;
        }
        if calls.is_empty() {
            self.asked.remove(request_digest);
        }
        Ok(())
    }

    /// A call has been stored.
    pub(super) fn recorded(&mut self, digest: [u8; 32], call: Recorded) {
        if call.answered {
            // Those that did not arrive are superseded by it.
            self.asked.remove(&digest);
        }
        self.note(digest, call);
    }

    /// Keeps a call in mind for whoever asks the same again.
    fn note(&mut self, digest: [u8; 32], call: Recorded) {
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

    /// Adds the call's rows to the tree and gives what is to be stored, and whether there is an answer in it.
    pub(super) fn add(&mut self, call: &Finished) -> Result<(CallRecord, bool), TreeError> {
        let delivery = if call.client_present { Delivery::Delivered } else { Delivery::Undelivered };
        let first_seq = self.next_seq;
        let (choices, missing) = match &call.result {
            CallResult::Answered(choices) => (choices.as_slice(), CallOutcome::NoTokenIds),
            CallResult::Failed => (&[][..], CallOutcome::Failed),
        };
        // A failure has no choices; what has none cannot be told again.
        let answered = !choices.is_empty();
        // A call without any answer is one empty row, so that it is counted.
        let nothing = [Choice::default()];
        let choices = if choices.is_empty() { &nothing } else { choices };
        let mut rows = Vec::with_capacity(choices.len());
        for (index, choice) in (0_u32..).zip(choices) {
            let outcome = if choice.ids.is_some() { CallOutcome::Ok } else { missing };
            let (prompt, sampled) =
                choice.ids.as_ref().map_or((&[][..], &[][..]), |(prompt, sampled)| (prompt, sampled));
            let row = self.tree.record(NewCall {
                seq: self.next_seq,
                call_id: call.call_id.clone(),
                choice: index,
                prompt,
                sampled: sampled.to_vec(),
                log_probs: choice.log_probs.clone(),
                versions: choice.versions.clone(),
                delivery,
                outcome,
                trainable: call.trainable,
            })?;
            self.calls.insert(row.seq, row.call_id.clone());
            self.next_seq += 1;
            self.weight.add(&row);
            rows.push(row);
        }
        let lost = self.asked.get(&call.digest).filter(|_| answered).map_or(&[][..], Vec::as_slice);
        let supersedes: Vec<u64> = lost
            .iter()
            // One that a retry is being given is on its way to the harness.
            .filter(|before| before.answered && !before.delivered && !before.claimed)
            .flat_map(|before| before.seqs.iter().copied())
            .collect();
        for &seq in &supersedes {
            self.tree.set_delivery(seq, Delivery::Superseded)?;
        }
        let mut data = call.data.clone();
        data.insert("call_id".to_owned(), call.call_id.clone().into());
        data.insert("seq".to_owned(), first_seq.into());
        data.insert("delivered".to_owned(), call.client_present.into());
        let record = CallRecord {
            rollout_id: call.key.rollout_id.clone(),
            attempt_id: call.key.attempt_id.clone(),
            timestamp: call.timestamp,
            data,
            request: call.request.clone(),
            response: call.response.clone(),
            rows,
            request_digest: call.digest,
            http_status: call.http_status,
            supersedes,
        };
        Ok((record, answered))
    }
}

fn is_underway(stored: &StoredCall) -> bool {
    !stored.settled && stored.writer == Writer::Elsewhere
}
