//! The newest bodies of the attempts under way, whole: what the next call of an attempt will mostly repeat.
//!
//! A cache: an attempt that is not here begins anew with bodies that stand alone.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use hashlink::LinkedHashMap;

use crate::aside::aside;
use crate::delta::shared_prefix;
use crate::record::CallRecord;
use crate::terse::{Terse, shorten};
use crate::{Body, StoreError};

/// Of whole bodies together.
const MAX_BYTES: usize = 256 << 20;
/// Conversations of one attempt: a main agent and its sub-agents take turns.
const PER_ATTEMPT: usize = 4;

/// See the [module](self). `P` is where the store keeps a body.
#[derive(Debug)]
pub(crate) struct Bases<P>(Mutex<Inner<P>>);

#[derive(Debug)]
struct Inner<P> {
    /// Those that have not spoken for longest first.
    attempts: LinkedHashMap<(String, String), VecDeque<Arc<Said<P>>>>,
    bytes: usize,
}

/// A call that has been stored.
#[derive(Debug)]
pub(crate) struct Said<P> {
    pub(crate) request: Kept<P>,
    pub(crate) response: Option<Kept<P>>,
}

/// A body, whole and as it is stored.
#[derive(Debug)]
pub(crate) struct Kept<P> {
    pub(crate) said: Terse,
    pub(crate) body: Arc<Body>,
    pub(crate) place: P,
}

/// A call's bodies, compressed.
pub(crate) struct Packed {
    pub(crate) request: Sealed,
    pub(crate) response: Option<Sealed>,
}

/// A body, and what the next one will repeat of it.
pub(crate) struct Sealed {
    pub(crate) body: Body,
    said: Terse,
}

impl Packed {
    /// True where either can only be read with the one that it was compressed behind.
    pub(crate) fn stand_behind(&self) -> bool {
        self.request.body.has_base() || self.response.as_ref().is_some_and(|response| response.body.has_base())
    }

    /// Compresses the bodies without a base.
    pub(crate) fn alone(request: &[u8], response: &[u8], beside: &Bytes) -> Result<Self, StoreError> {
        Self::of::<()>(Terse::plain(request), response, beside, None)
    }

    fn of<P>(request: Terse, response: &[u8], beside: &Bytes, base: Option<&Said<P>>) -> Result<Self, StoreError> {
        let answered = base.and_then(|said| said.response.as_ref());
        let response = (!response.is_empty()).then(|| Sealed::of(shorten(response), beside, answered));
        let request = Sealed::of(request, &Bytes::new(), base.map(|said| &said.request))?;
        Ok(Self { request, response: response.transpose()? })
    }

    /// What the next call may stand behind: `keep` says what the store needs of a body for that.
    pub(crate) fn into_said<P: Copy>(self, keep: impl Fn(Body) -> Body, request: P, response: P) -> Said<P> {
        let kept = |Sealed { body, said }: Sealed, place| Kept { said, body: Arc::new(keep(body)), place };
        Said { request: kept(self.request, request), response: self.response.map(|sealed| kept(sealed, response)) }
    }
}

impl<P> Default for Bases<P> {
    fn default() -> Self {
        Self(Mutex::new(Inner { attempts: LinkedHashMap::new(), bytes: 0 }))
    }
}

impl<P: Send + Sync + 'static> Bases<P> {
    fn inner(&self) -> MutexGuard<'_, Inner<P>> {
        // A cache: whatever a panic left of it is still true.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The calls of the attempt that this one may continue.
    pub(crate) fn candidates(&self, call: &CallRecord) -> Candidates<P> {
        let key = (call.rollout_id.clone(), call.attempt_id.clone());
        Candidates(
            self.inner().attempts.get(&key).map(|calls| calls.iter().map(Arc::clone).collect()).unwrap_or_default(),
        )
    }

    /// Keeps a call in mind that has been stored.
    pub(crate) fn keep(&self, rollout_id: &str, attempt_id: &str, said: Said<P>) {
        let key = (rollout_id.to_owned(), attempt_id.to_owned());
        // Dropped when nobody waits for this any more.
        let mut gone = Vec::new();
        let mut inner = self.inner();
        let Inner { attempts, bytes } = &mut *inner;
        attempts.to_back(&key);
        let calls = attempts.entry(key).or_insert_with(VecDeque::new);
        // The one that it continues has nothing left to give.
        let continued =
            calls.iter().position(|before| shared_prefix(before.text(), said.text()) * 2 > before.text().len());
        let full = (calls.len() >= PER_ATTEMPT).then_some(0);
        gone.extend(continued.or(full).and_then(|index| calls.remove(index)));
        *bytes += said.size();
        calls.push_back(Arc::new(said));
        *bytes -= gone.iter().map(|before| before.size()).sum::<usize>();
        while *bytes > MAX_BYTES
            && let Some((_, calls)) = attempts.pop_front()
        {
            *bytes -= size(&calls);
            gone.extend(calls);
        }
        drop(inner);
    }

    /// Forgets a rollout that was deleted, and its bodies with it.
    pub(crate) fn forget(&self, rollout_id: &str) {
        let mut inner = self.inner();
        let Inner { attempts, bytes } = &mut *inner;
        attempts.retain(|(rollout, _), calls| {
            let stays = rollout != rollout_id;
            *bytes -= if stays { 0 } else { size(calls) };
            stays
        });
    }
}

fn size<P>(calls: &VecDeque<Arc<Said<P>>>) -> usize {
    calls.iter().map(|said| said.size()).sum()
}

impl<P> Said<P> {
    fn size(&self) -> usize {
        let response = self.response.as_ref().map_or(0, |response| response.said.size());
        self.request.said.size() + response
    }

    fn text(&self) -> &[u8] {
        &self.request.said.text
    }
}

/// See [`Bases::candidates`].
pub(crate) struct Candidates<P>(Vec<Arc<Said<P>>>);

impl<P> Default for Candidates<P> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<P> Candidates<P> {
    /// The one whose request begins most like this one.
    fn nearest(self, request: &Terse) -> Option<Arc<Said<P>>> {
        self.0.into_iter().max_by_key(|said| shared_prefix(said.text(), &request.text))
    }
}

/// Bodies larger than this are compressed [`aside`].
const LARGE_BODY_BYTES: usize = 64 * 1024;

/// Compresses a call's bodies, behind those of the nearest of `candidates` if there is one, and says which that is. `beside` is what the
/// store has at hand when it reads the answer.
pub(crate) async fn pack<P: Send + Sync + 'static>(
    call: &CallRecord,
    candidates: Candidates<P>,
    beside: Bytes,
) -> Result<(Packed, Option<Arc<Said<P>>>), StoreError> {
    let (request, response) = (call.request.clone(), call.response.clone());
    let is_large = request.len() + response.len() > LARGE_BODY_BYTES;
    let compress = move || {
        let request = Terse::plain(&request);
        let base = candidates.nearest(&request);
        Ok((Packed::of(request, &response, &beside, base.as_deref())?, base))
    };
    if !is_large {
        return compress();
    }
    aside(compress).await.unwrap_or(Err(StoreError::Closed))
}

impl Sealed {
    fn of<P>(mut said: Terse, beside: &Bytes, base: Option<&Kept<P>>) -> Result<Self, StoreError> {
        let body = Body::of(&said, beside, base.map(|base| (&base.said, Arc::clone(&base.body))))?;
        // No other body has the same log-probs.
        said.floats = Vec::new();
        said.text.shrink_to_fit();
        said.integers.shrink_to_fit();
        Ok(Self { body, said })
    }
}
