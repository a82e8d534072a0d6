//! Writes what was called and answered, before the answer leaves.
//!
//! Per attempt an [`AttemptTree`] decides what a call adds to what is stored already. The trees are a cache: one that is not here
//! is rebuilt from the stored rows. Calls of one attempt are recorded one after the other, those of different attempts beside each
//! other.
//!
//! Where several gateways share the store, calls of one attempt may come through any of them. A tree then takes in what the others
//! have recorded before it answers a question of the past; and where another was faster with a row's number, nothing is written,
//! the tree is built anew, and the call recorded again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use agl_core::trajectory::{Assembly, CallRow, Level, TreeError};
use agl_store::{SharedStore, StoreError};
use hashlink::LinkedHashMap;
use tokio::sync::{OwnedMutexGuard, mpsc};

use super::attempt_tree::{AttemptTree, Finished, Recorded, Weight};
use super::deliveries::{Parcel, SETTLE_EVERY, settle_deliveries};

/// When the cached trees hold more tokens than this, those not used for longest go. About 4 bytes each.
const MAX_CACHED_TOKENS: usize = 64 << 20;
/// And never more trees than this.
const MAX_CACHED_TREES: usize = 8192;
/// Another gateway says so soon what became of an answer that it hands over.
const NEWS_PATIENCE: Duration = Duration::from_secs(1);
/// Each time that another gateway was faster it has recorded a call: so often in a row means that something is wrong.
const MAX_RACES: u32 = 50;
/// See the [module](self).
pub(crate) struct Recorder {
    pub(super) store: SharedStore,
    /// Other gateways may record calls too: a dead one is known to be so after this lease.
    others: Option<Duration>,
    /// Those not used for longest first.
    trees: Mutex<LinkedHashMap<AttemptKey, Tree>>,
    /// Tokens in all of them together.
    cached_tokens: Arc<AtomicUsize>,
    pub(super) outbox: mpsc::UnboundedSender<Parcel>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AttemptKey {
    pub(crate) rollout_id: String,
    pub(crate) attempt_id: String,
}

/// `None` until it is loaded.
type Tree = Arc<tokio::sync::Mutex<Option<AttemptTree>>>;

/// Why a call could not be recorded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the stored calls of attempt {attempt_id} of rollout {rollout_id} contradict each other: {source}")]
    Tree { rollout_id: String, attempt_id: String, source: TreeError },
    #[error("a task of the recorder ended early")]
    Lost,
}

impl Recorder {
    /// A recorder and the task that writes deliveries, which ends when the recorder is gone.
    pub(crate) fn start(store: SharedStore) -> Arc<Self> {
        let (outbox, inbox) = mpsc::unbounded_channel();
        let others = store.peers().map(|peers| peers.lease());
        let recorder = Arc::new(Self { store, others, trees: Mutex::default(), cached_tokens: Arc::default(), outbox });
        tokio::spawn(settle_deliveries(Arc::downgrade(&recorder), inbox));
        recorder
    }

    /// The number of this call in its attempt, from 0: calls count when they begin.
    pub(crate) async fn begin_call(&self, key: &AttemptKey) -> Result<u64, RecordError> {
        let mut guard = self.open(key).await?;
        let attempt = loaded(&mut guard)?;
        attempt.calls_begun += 1;
        Ok(attempt.calls_begun - 1)
    }

    /// Writes the call.
    pub(crate) async fn record(&self, call: Finished) -> Result<Recorded, RecordError> {
        let mut races = 0;
        loop {
            match self.record_once(&call).await {
                Err(RecordError::Store(StoreError::Raced { .. })) if races < MAX_RACES => races += 1,
                outcome => return outcome,
            }
            // What this gateway knows of earlier answers must be among the rows that the tree is built of.
            self.flush().await;
        }
    }

    async fn record_once(&self, call: &Finished) -> Result<Recorded, RecordError> {
        let key = &call.key;
        let mut guard = self.open(key).await?;
        if self.others.is_some() && loaded(&mut guard)?.asked.contains_key(&call.digest) {
            drop(guard);
            guard = self.open_fresh(key, &call.digest).await?;
        }
        let attempt = loaded(&mut guard)?;
        let (record, answered) = attempt.add(call).map_err(|source| RecordError::of_tree(key, source))?;
        let seqs = record.rows.iter().map(|row| row.seq).collect();
        let continuation = |row: &CallRow| attempt.tree.continuation(row.seq).map(|how| (row.outcome, how));
        let answers = record.rows.iter().map(continuation).collect::<Result<_, _>>();
        let answers = answers.map_err(|source| RecordError::of_tree(key, source))?;
        // Also where this is dropped here.
        attempt.stale = true;
        self.store.record_call(record).await?;
        let attempt = loaded(&mut guard)?;
        attempt.stale = false;
        let delivered = call.client_present;
        let recorded = Recorded { call_id: call.call_id.clone(), seqs, answered, delivered, claimed: false, answers };
        attempt.recorded(call.digest, recorded.clone());
        Ok(recorded)
    }

    /// The answer that a harness gets which asks again: one that did not reach it, or where it says that it is a retry the newest,
    /// unless the newest is a failure. Nobody else gets it meanwhile.
    pub(crate) async fn claim(
        &self,
        key: &AttemptKey,
        digest: &[u8; 32],
        is_retry: bool,
    ) -> Result<Option<Recorded>, RecordError> {
        if !loaded(&mut self.open_fresh(key, digest).await?)?.asked.contains_key(digest) {
            return Ok(None);
        }
        // Who hung up a moment ago is known then.
        self.flush().await;
        let mut guard = self.open(key).await?;
        let calls = loaded(&mut guard)?.asked.get_mut(digest).map_or(&mut [][..], Vec::as_mut_slice);
        let newest = calls.len().checked_sub(1);
        let lost = calls.iter().rposition(|call| call.answered && !call.delivered && !call.claimed);
        let index = lost.or(newest.filter(|&newest| is_retry && calls[newest].answered));
        Ok(index.map(|index| {
            calls[index].claimed = true;
            calls[index].clone()
        }))
    }

    /// The training sequences of an attempt. An answer whose harness has hung up is not among them, however shortly before.
    pub(crate) async fn sequences(&self, key: &AttemptKey, level: Level) -> Result<Assembly, RecordError> {
        self.flush().await;
        let mut guard = match self.others {
            Some(_) => self.open_settled(key, NEWS_PATIENCE, AttemptTree::awaits_any).await?,
            None => self.open(key).await?,
        };
        // May be many thousand tokens: not on a thread that others wait for.
        let assemble =
            tokio::task::spawn_blocking(move || loaded(&mut guard).map(|attempt| attempt.tree.sequences(level)));
        assemble.await.map_err(|_| RecordError::Lost)?
    }

    /// Forgets the trees of a rollout that was deleted.
    pub(crate) fn forget(&self, rollout_id: &str) {
        self.trees().retain(|key, _| key.rollout_id != rollout_id);
    }

    fn trees(&self) -> MutexGuard<'_, LinkedHashMap<AttemptKey, Tree>> {
        // A map of handles: whole after every statement.
        self.trees.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The attempt's tree, loaded and locked. It may lack what other gateways have recorded since it was used last.
    pub(super) async fn open(&self, key: &AttemptKey) -> Result<OpenTree, RecordError> {
        let mut guard = self.handle(key).lock_owned().await;
        if guard.as_ref().is_none_or(|attempt| attempt.stale) {
            let rows = self.store.calls(&key.rollout_id, &key.attempt_id, 0).await?;
            let before = guard.take();
            let weight = Weight::among(&self.cached_tokens);
            let rebuild = move || {
                let mut rebuilt = AttemptTree::rebuild(rows, weight)?;
                if let Some(before) = &before {
                    rebuilt.inherit(before);
                }
                Ok(rebuilt)
            };
            let rebuilt = tokio::task::spawn_blocking(rebuild).await.map_err(|_| RecordError::Lost)?;
            *guard = Some(rebuilt.map_err(|source| RecordError::of_tree(key, source))?);
        }
        Ok(guard)
    }

    /// The same with what other gateways have recorded, and where they were asked this question, with what became of their
    /// answers.
    async fn open_fresh(&self, key: &AttemptKey, digest: &[u8; 32]) -> Result<OpenTree, RecordError> {
        let mut guard = self.open(key).await?;
        let Some(lease) = self.others else { return Ok(guard) };
        let from = loaded(&mut guard)?.next_seq();
        guard = self.take_in(key, guard, from).await?;
        if !loaded(&mut guard)?.asked.contains_key(digest) {
            return Ok(guard);
        }
        drop(guard);
        // A gateway that was killed is known to be gone by then.
        self.open_settled(key, lease + NEWS_PATIENCE, |attempt| attempt.awaits(digest)).await
    }

    /// The same with the deliveries that other gateways have written. Waits, no longer than `patience`, for those that another
    /// gateway will tell of in a moment.
    async fn open_settled(
        &self,
        key: &AttemptKey,
        patience: Duration,
        awaits: impl Fn(&AttemptTree) -> bool,
    ) -> Result<OpenTree, RecordError> {
        let deadline = Instant::now() + patience;
        loop {
            let guard = self.open(key).await?;
            let mut guard = self.take_in(key, guard, 0).await?;
            if !awaits(loaded(&mut guard)?) || Instant::now() >= deadline {
                return Ok(guard);
            }
            drop(guard);
            tokio::time::sleep(SETTLE_EVERY).await;
        }
    }

    /// Brings the tree up to what is stored from row `from` on.
    async fn take_in(&self, key: &AttemptKey, mut guard: OpenTree, from: u64) -> Result<OpenTree, RecordError> {
        let rows = self.store.calls(&key.rollout_id, &key.attempt_id, from).await?;
        if rows.is_empty() && from > 0 {
            return Ok(guard);
        }
        let take = move || {
            let attempt = loaded(&mut guard)?;
            // A tree that the rows contradict was built before its rollout was deleted and made anew.
            attempt.stale = !attempt.take_in(rows, from).unwrap_or(false);
            Ok::<_, RecordError>((attempt.stale, guard))
        };
        let (stale, guard) = tokio::task::spawn_blocking(take).await.map_err(|_| RecordError::Lost)??;
        if !stale {
            return Ok(guard);
        }
        drop(guard);
        self.open(key).await
    }

    fn handle(&self, key: &AttemptKey) -> Tree {
        if let Some(tree) = self.trees().to_back(key) {
            return Arc::clone(tree);
        }
        let tree = Arc::clone(self.trees().entry(key.clone()).or_insert_with(Tree::default));
        // Each is dropped while nobody has to wait for it.
        while let Some(oldest) = self.superfluous() {
            drop(oldest);
        }
        tree
    }

    /// Where the cache is too full, takes out the tree that was not used for longest and that nobody uses now.
    fn superfluous(&self) -> Option<Tree> {
        let mut trees = self.trees();
        if trees.len() <= MAX_CACHED_TREES && self.cached_tokens.load(Ordering::Relaxed) <= MAX_CACHED_TOKENS {
            return None;
        }
        let idle = trees.iter().find(|(_, tree)| Arc::strong_count(tree) == 1).map(|(key, _)| key.clone())?;
        trees.remove(&idle)
    }
}

impl RecordError {
    fn of_tree(key: &AttemptKey, source: TreeError) -> Self {
        let AttemptKey { rollout_id, attempt_id } = key.clone();
        Self::Tree { rollout_id, attempt_id, source }
    }
}

/// An attempt's tree, locked.
pub(super) type OpenTree = OwnedMutexGuard<Option<AttemptTree>>;

pub(super) fn loaded(guard: &mut OpenTree) -> Result<&mut AttemptTree, RecordError> {
    guard.as_mut().ok_or(RecordError::Lost)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use serde_json::Map;

    use super::super::answer::Choice;
    use super::super::attempt_tree::CallResult;
    use super::*;

    const QUESTION: [u8; 32] = [0; 32];

    fn key() -> AttemptKey {
        AttemptKey { rollout_id: "r".to_owned(), attempt_id: "0".to_owned() }
    }

    async fn recorder() -> Arc<Recorder> {
        let store = agl_store::open("memory").await.unwrap();
        let create = serde_json::from_value(serde_json::json!({"input": 1})).unwrap();
        store.create_rollouts(vec![agl_core::rollout::Rollout::new(create, "r".to_owned(), 1.0)]).await.unwrap();
        Recorder::start(store)
    }

    fn call(id: &str, sampled: u32) -> Finished {
        let versions = vec![agl_core::trajectory::VersionRun { version: 3, count: 1 }];
        let choice = Choice { ids: Some((vec![1, 2], vec![sampled])), versions, ..Choice::default() };
        Finished {
            key: key(),
            call_id: id.to_owned(),
            timestamp: 1.0,
            data: Map::new(),
            request: Bytes::from_static(b"{}"),
            response: Bytes::from_static(b"{}"),
            result: CallResult::Answered(vec![choice]),
            digest: QUESTION,
            http_status: 200,
            trainable: true,
            client_present: true,
        }
    }

    #[tokio::test]
    async fn the_tree_that_was_not_used_for_longest_goes_first_and_is_built_anew() {
        let recorder = recorder().await;
        recorder.record(call("call-1", 7)).await.unwrap();
        assert_eq!(
            recorder.cached_tokens.load(Ordering::Relaxed),
            4,
            "two of the prompt, one sampled with its log-prob"
        );
        for number in 1..=MAX_CACHED_TREES {
            let (rollout_id, attempt_id) = ("r".to_owned(), number.to_string());
            drop(recorder.open(&AttemptKey { rollout_id, attempt_id }).await.unwrap());
        }
        assert_eq!(recorder.trees().len(), MAX_CACHED_TREES);
        assert!(!recorder.trees().contains_key(&key()));
        assert_eq!(recorder.cached_tokens.load(Ordering::Relaxed), 0);
        assert_eq!(recorder.begin_call(&key()).await.unwrap(), 1, "it knows of the call before");
    }

    #[tokio::test]
    async fn an_answer_that_was_just_dropped_is_not_handed_out_as_live() {
        let recorder = recorder().await;
        let recorded = recorder.record(call("call-1", 7)).await.unwrap();
        let handover = recorder.hand_over(&key(), QUESTION, recorded);
        assert!(handover.is_some());
        drop(handover);
        let counts = recorder.sequences(&key(), Level::Trajectory).await.unwrap().counts;
        assert_eq!((counts.live, counts.undelivered), (0, 1));
    }

    #[tokio::test]
    async fn a_second_answer_to_one_that_did_not_arrive_supersedes_it() {
        let recorder = recorder().await;
        let first = recorder.record(call("call-1", 7)).await.unwrap();
        drop(recorder.hand_over(&key(), QUESTION, first));
        recorder.flush().await;
        recorder.record(call("call-2", 8)).await.unwrap();
        let counts = recorder.sequences(&key(), Level::Trajectory).await.unwrap().counts;
        assert_eq!((counts.live, counts.superseded, counts.undelivered), (1, 1, 0));
    }

    #[tokio::test]
    async fn an_answer_that_a_retry_is_being_given_is_not_superseded_meanwhile() {
        let recorder = recorder().await;
        let first = recorder.record(call("call-1", 7)).await.unwrap();
        drop(recorder.hand_over(&key(), QUESTION, first));
        let claimed = recorder.claim(&key(), &QUESTION, false).await.unwrap().unwrap();
        assert!(recorder.claim(&key(), &QUESTION, false).await.unwrap().is_none(), "nobody else gets it meanwhile");
        recorder.record(call("call-2", 8)).await.unwrap();
        recorder.hand_over(&key(), QUESTION, claimed).unwrap().delivered();
        let counts = recorder.sequences(&key(), Level::Trajectory).await.unwrap().counts;
        assert_eq!((counts.live, counts.superseded, counts.undelivered), (2, 0, 0));
    }
}
