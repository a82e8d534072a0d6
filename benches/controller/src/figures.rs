//! Many durations as three numbers.

use std::fmt;
use std::time::Duration;

/// Sorted milliseconds.
pub struct Figures(Vec<f64>);

impl Figures {
    /// Of these durations.
    pub fn of(durations: impl IntoIterator<Item = Duration>) -> Self {
        Self::sorted(durations.into_iter().map(|duration| duration.as_secs_f64() * 1e3).collect())
    }

    fn sorted(mut milliseconds: Vec<f64>) -> Self {
        milliseconds.sort_by(f64::total_cmp);
        Self(milliseconds)
    }

    /// What each is beyond `own` milliseconds.
    pub fn beyond(&self, own: f64) -> Self {
        Self(self.0.iter().map(|milliseconds| milliseconds - own).collect())
    }

    /// The smallest that is not below this share of them.
    pub fn quantile(&self, share: f64) -> f64 {
        let rank = (share * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.clamp(1, self.0.len().max(1)) - 1).copied().unwrap_or(f64::NAN)
    }

    /// Half of them are not above it.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|share| self.quantile(share));
        write!(f, "{p50:>9.1} {p90:>9.1} {p99:>9.1}")
    }
}
