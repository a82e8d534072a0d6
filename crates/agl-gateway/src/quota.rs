//! How many events each rollout has, so that an agent that has lost its way does not fill the disk.
//!
//! A cache of what the store counts, kept up to date by what this gateway writes.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use agl_store::{SharedStore, StoreError};

use crate::error::ApiError;

/// With more rollouts than this in mind, all are forgotten and counted anew.
const MAX_ROLLOUTS: usize = 65_536;

/// See the [module](self).
pub(crate) struct Quota {
    limit: u64,
    store: SharedStore,
    counts: Mutex<HashMap<String, u64>>,
}

impl Quota {
    pub(crate) fn new(limit: u64, store: SharedStore) -> Self {
        Self { limit, store, counts: Mutex::default() }
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<String, u64>> {
        // Numbers by name: whole after every statement.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses where the rollout has as many events as it may have.
    pub(crate) async fn check(&self, rollout_id: &str) -> Result<(), ApiError> {
        let known = self.counts().get(rollout_id).copied();
        let count = match known {
            Some(count) => count,
            None => self.count(rollout_id).await?,
        };
        if count < self.limit {
            return Ok(());
        }
        Err(ApiError::forbidden(format!(
            "Rollout {rollout_id} has {count} events and may have {}: has its agent lost its way? Otherwise raise \
             `limits.max_events_per_rollout` of the gateway",
            self.limit
        )))
    }

    async fn count(&self, rollout_id: &str) -> Result<u64, StoreError> {
        let stored = self.store.count_events(rollout_id).await?;
        let mut counts = self.counts();
        if counts.len() >= MAX_ROLLOUTS {
            counts.clear();
        }
        Ok(*counts.entry(rollout_id.to_owned()).or_insert(stored))
    }

    /// An event has been written. One of a rollout that is not in mind is counted with the others when it is.
    pub(crate) fn note(&self, rollout_id: &str) {
        if let Some(count) = self.counts().get_mut(rollout_id) {
            *count += 1;
        }
    }

    /// Forgets a rollout that was deleted.
    pub(crate) fn forget(&self, rollout_id: &str) {
        self.counts().remove(rollout_id);
    }
}
