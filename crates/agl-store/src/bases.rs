//! The newest bodies of the attempts under way, raw: what the next call of an attempt will mostly repeat.
//!
//! A cache: an attempt that is not here begins anew with bodies that stand alone.

use std::collections::{HashMap, VecDeque};
use std::num::NonZero;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Semaphore;

use crate::delta::shared_prefix;
use crate::record::CallRecord;
use crate::{Body, StoreError};

/// Of raw bodies together.
const MAX_BYTES: usize = 256 << 20;
/// Conversations of one attempt: a main agent and its sub-agents take turns.
const PER_ATTEMPT: usize = 4;

/// See the [module](self). `P` is where the store keeps a body.
#[derive(Debug)]
pub(crate) struct Bases<P>(Mutex<Inner<P>>);

#[derive(Debug)]
struct Inner<P> {
    attempts: HashMap<(String, String), VecDeque<Arc<Said<P>>>>,
    /// Attempts in the order in which they spoke last; an attempt may stand here more than once.
    oldest: VecDeque<(String, String)>,
    bytes: usize,
}

/// A call that has been stored.
#[derive(Debug)]
pub(crate) struct Said<P> {
    pub(crate) request: Kept<P>,
    pub(crate) response: Option<Kept<P>>,
}

/// A body, raw and as it is stored.
#[derive(Debug)]
pub(crate) struct Kept<P> {
    pub(crate) raw: Bytes,
    pub(crate) body: Arc<Body>,
    pub(crate) place: P,
}

/// A call's bodies, compressed.
pub(crate) struct Packed {
    pub(crate) request: Body,
    pub(crate) response: Option<Body>,
}

impl<P> Default for Bases<P> {
    fn default() -> Self {
        Self(Mutex::new(Inner { attempts: HashMap::new(), oldest: VecDeque::new(), bytes: 0 }))
    }
}

impl<P: Send + Sync + 'static> Bases<P> {
    fn inner(&self) -> MutexGuard<'_, Inner<P>> {
        // A cache: whatever a panic left of it is still true.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The call of the attempt whose request begins most like this one.
    pub(crate) fn nearest(&self, call: &CallRecord) -> Option<Arc<Said<P>>> {
        let inner = self.inner();
        let calls = inner.attempts.get(&(call.rollout_id.clone(), call.attempt_id.clone()))?;
        calls.iter().max_by_key(|said| shared_prefix(&said.request.raw, &call.request)).map(Arc::clone)
    }

    /// Keeps a call in mind that has been stored.
    pub(crate) fn keep(&self, rollout_id: &str, attempt_id: &str, said: Said<P>) {
        let key = (rollout_id.to_owned(), attempt_id.to_owned());
        let mut inner = self.inner();
        inner.bytes += said.size();
        let calls = inner.attempts.entry(key.clone()).or_default();
        // The one that it continues has nothing left to give.
        let continued = calls
            .iter()
            .position(|before| shared_prefix(&before.request.raw, &said.request.raw) * 2 > before.request.raw.len());
        let full = (calls.len() >= PER_ATTEMPT).then_some(0);
        let gone = continued.or(full).and_then(|index| calls.remove(index)).map_or(0, |before| before.size());
        calls.push_back(Arc::new(said));
        inner.bytes -= gone;
        inner.oldest.push_back(key);
        while inner.bytes > MAX_BYTES {
            let Some(key) = inner.oldest.pop_front() else { break };
            // It has spoken since.
            if !inner.oldest.contains(&key) {
                inner.drop_attempt(&key);
            }
        }
        if inner.oldest.len() > 4 * inner.attempts.len() + 64 {
            inner.tidy();
        }
    }

    /// Forgets a rollout that was deleted, and its bodies with it.
    pub(crate) fn forget(&self, rollout_id: &str) {
        let mut inner = self.inner();
        let keys: Vec<_> = inner.attempts.keys().filter(|(rollout, _)| rollout == rollout_id).cloned().collect();
        keys.iter().for_each(|key| inner.drop_attempt(key));
    }
}

impl<P> Inner<P> {
    fn drop_attempt(&mut self, key: &(String, String)) {
        let calls = self.attempts.remove(key).unwrap_or_default();
        self.bytes -= calls.iter().map(|said| said.size()).sum::<usize>();
    }

    /// Leaves each attempt that is still there once, where it spoke last.
    fn tidy(&mut self) {
        let mut seen = std::collections::HashSet::new();
        let newest_first: Vec<_> = std::mem::take(&mut self.oldest).into_iter().rev().collect();
        self.oldest = newest_first
            .into_iter()
            .filter(|key| self.attempts.contains_key(key) && seen.insert(key.clone()))
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect();
    }
}

impl<P> Said<P> {
    fn size(&self) -> usize {
        self.request.raw.len() + self.response.as_ref().map_or(0, |response| response.raw.len())
    }
}

/// Bodies larger than this are compressed on a blocking thread.
const LARGE_BODY_BYTES: usize = 64 * 1024;

/// More at once than there are processors would only use more memory: every thread keeps what it has freed.
static COMPRESSING: LazyLock<Semaphore> =
    LazyLock::new(|| Semaphore::new(std::thread::available_parallelism().map_or(2, NonZero::get)));

/// Compresses a call's bodies, behind those of `base` if there is one.
pub(crate) async fn pack<P: Send + Sync + 'static>(
    call: &CallRecord,
    base: Option<Arc<Said<P>>>,
) -> Result<Packed, StoreError> {
    let (request, response) = (call.request.clone(), call.response.clone());
    let is_large = request.len() + response.len() > LARGE_BODY_BYTES;
    let compress = move || {
        let behind = |raw: &Bytes, kept: Option<&Kept<P>>| match kept {
            Some(kept) => Body::compress_behind(raw, &kept.raw, Arc::clone(&kept.body)),
            None => Body::compress(raw),
        };
        let base = base.as_deref();
        let packed = behind(&request, base.map(|said| &said.request))?;
        let answer = (!response.is_empty()).then(|| behind(&response, base.and_then(|said| said.response.as_ref())));
        Ok(Packed { request: packed, response: answer.transpose()? })
    };
    if !is_large {
        return compress();
    }
    let turn = COMPRESSING.acquire().await;
    let packed = tokio::task::spawn_blocking(compress).await.unwrap_or(Err(StoreError::Closed));
    drop(turn);
    packed
}
