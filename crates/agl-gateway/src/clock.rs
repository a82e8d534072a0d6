//! The wall clock.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since the epoch.
pub(crate) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}
