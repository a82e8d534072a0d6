//! How many calls are at servers at once. Who finds no place waits for one, in the order of coming and for a bounded time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::{GatewayConfig, duration};
use crate::error::ApiError;

/// A call's right to be at a server. Dropping it lets the next one go.
pub(crate) type Place = OwnedSemaphorePermit;

/// What a call is told to wait that found no place.
const RETRY_AFTER_SECONDS: u64 = 5;

/// See the [module](self).
pub(crate) struct Places {
    free: Arc<Semaphore>,
    all: usize,
    waiting: AtomicUsize,
    max_wait: Duration,
    max_waiting: usize,
}

struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Places {
    pub(crate) fn new(config: &GatewayConfig) -> Arc<Self> {
        let all = config.limits.max_inflight_calls.min(Semaphore::MAX_PERMITS);
        Arc::new(Self {
            free: Arc::new(Semaphore::new(all)),
            all,
            waiting: AtomicUsize::new(0),
            max_wait: duration(config.hold.max_seconds),
            max_waiting: config.hold.max_requests,
        })
    }

    /// A place, if there is one now and nobody was here before.
    pub(crate) fn take(&self) -> Option<Place> {
        Arc::clone(&self.free).try_acquire_owned().ok()
    }

    /// A place as soon as there is one.
    pub(crate) async fn wait(&self) -> Result<Place, ApiError> {
        let before = self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waiting = Waiting(&self.waiting);
        if before >= self.max_waiting {
            return Err(self.full());
        }
        match tokio::time::timeout(self.max_wait, Arc::clone(&self.free).acquire_owned()).await {
            Ok(Ok(place)) => Ok(place),
            Ok(Err(_)) => Err(ApiError::stopping()),
            Err(_) => Err(self.full()),
        }
    }

    fn full(&self) -> ApiError {
        let what = format!("{} calls are under way, as many as may be, and others wait; try again later", self.all);
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, what).retry_after(RETRY_AFTER_SECONDS)
    }

    /// How many calls wait for a place.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Refuses whoever waits, and every later one: the gateway stops.
    pub(crate) fn close(&self) {
        self.free.close();
    }
}
