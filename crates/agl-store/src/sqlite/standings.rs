//! Rollouts and attempts at hand: every call asks for its own. A cache that is true because this process alone writes the file.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use agl_core::attempt::Attempt;
use agl_core::rollout::Rollout;

use super::{Sql, attempts, from_json};
use crate::StoreError;
use crate::record::Standing;

/// Of rollouts as they are stored, together.
const MAX_BYTES: usize = 32 << 20;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Standings(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    rollouts: HashMap<String, Known>,
    /// In the order in which they were read; one that was forgotten may still stand here.
    oldest: VecDeque<String>,
    bytes: usize,
    /// Counts the changes: what was read before one of them is not kept.
    changes: u64,
}

#[derive(Debug)]
struct Known {
    rollout: Arc<Rollout>,
    attempts: HashMap<String, Option<Arc<Attempt>>>,
    bytes: usize,
}

/// What was read, with the size of the rollout.
pub(super) struct Found {
    pub(super) standing: Standing,
    pub(super) bytes: usize,
}

/// From the file.
pub(super) fn read(sql: &Sql<'_>, rollout_id: &str, attempt_id: &str) -> Result<Option<Found>, StoreError> {
    let body =
        sql.first("SELECT body FROM rollouts WHERE rollout_id = ?1", [rollout_id], |row| row.get::<_, String>(0))?;
    let Some(body) = body else { return Ok(None) };
    let rollout: Rollout = from_json(&body, rollout_id)?;
    let attempt = attempts::get(sql, rollout_id, attempt_id)?;
    Ok(Some(Found {
        standing: Standing { rollout: Arc::new(rollout), attempt: attempt.map(Arc::new) },
        bytes: body.len(),
    }))
}

impl Standings {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        // A cache: whatever a panic left of it is still true.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is at hand, or the moment from which on it is read.
    pub(super) fn get(&self, rollout_id: &str, attempt_id: &str) -> Result<Standing, u64> {
        let inner = self.inner();
        let known = inner.rollouts.get(rollout_id).ok_or(inner.changes)?;
        let attempt = known.attempts.get(attempt_id).ok_or(inner.changes)?;
        Ok(Standing { rollout: Arc::clone(&known.rollout), attempt: attempt.clone() })
    }

    /// Keeps what was read from `moment` on, unless something has changed since.
    pub(super) fn keep(&self, found: &Found, attempt_id: &str, moment: u64) {
        let mut inner = self.inner();
        if inner.changes != moment {
            return;
        }
        let Standing { rollout, attempt } = &found.standing;
        let attempts = match inner.rollouts.get_mut(&rollout.rollout_id) {
            Some(known) => &mut known.attempts,
            None => {
                inner.bytes += found.bytes;
                inner.oldest.push_back(rollout.rollout_id.clone());
                let known = Known { rollout: Arc::clone(rollout), attempts: HashMap::new(), bytes: found.bytes };
                &mut inner.rollouts.entry(rollout.rollout_id.clone()).or_insert(known).attempts
            }
        };
        attempts.insert(attempt_id.to_owned(), attempt.clone());
        while inner.bytes > MAX_BYTES || inner.oldest.len() > 2 * inner.rollouts.len() + 64 {
            let Some(oldest) = inner.oldest.pop_front() else { break };
            inner.forget(&oldest);
        }
    }

    /// To be told of every change of a rollout or its attempts, after it is durable and before it is acknowledged.
    pub(super) fn changed(&self, rollout_id: &str) {
        let mut inner = self.inner();
        inner.changes += 1;
        inner.forget(rollout_id);
    }
}

impl Inner {
    fn forget(&mut self, rollout_id: &str) {
        self.bytes -= self.rollouts.remove(rollout_id).map_or(0, |known| known.bytes);
    }
}
