//! How fast attempts may begin. Nothing here looks at a clock: the time comes in.

use std::time::Duration;

use tokio::time::Instant;

/// A bucket of starts: it fills at a steady rate up to its burst, and each start takes one.
#[derive(Debug)]
pub struct Pace {
    /// Between two starts when the bucket is empty.
    interval: Duration,
    /// How much earlier than the steady rate allows starts may come.
    slack: Duration,
    /// When the next start is due at the steady rate.
    next: Option<Instant>,
    /// Nothing begins before, whatever the bucket holds: somebody is overloaded.
    held_until: Option<Instant>,
}

impl Pace {
    /// `per_minute` starts on average, `burst` of them at once after a pause.
    #[must_use]
    pub fn new(per_minute: u32, burst: u32) -> Self {
        let interval = Duration::from_secs(60) / per_minute.max(1);
        Self { interval, slack: interval * burst.max(1).saturating_sub(1), next: None, held_until: None }
    }

    /// Takes a start, or says when to ask again.
    ///
    /// # Errors
    /// The instant at which there will be one.
    pub fn take(&mut self, now: Instant) -> Result<(), Instant> {
        if let Some(until) = self.held_until.filter(|until| *until > now) {
            return Err(until);
        }
        // At most `slack` behind: the bucket is never fuller than its burst.
        let earliest = now.checked_sub(self.slack).unwrap_or(now);
        let next = self.next.map_or(earliest, |next| next.max(earliest));
        if next > now {
            return Err(next);
        }
        self.next = Some(next + self.interval);
        Ok(())
    }

    /// Nothing begins before `until`.
    pub fn hold(&mut self, until: Instant) {
        self.held_until = self.held_until.max(Some(until));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many starts a minute's worth of asking every millisecond gets, and when the first and last came.
    fn starts(pace: &mut Pace, from: Instant, milliseconds: u64) -> Vec<u64> {
        (0..milliseconds)
            .filter_map(|at| {
                let now = from + Duration::from_millis(at);
                let mut taken = Vec::new();
                while pace.take(now).is_ok() {
                    taken.push(at);
                }
                (!taken.is_empty()).then_some(taken)
            })
            .flatten()
            .collect()
    }

    #[test]
    fn starts_come_at_the_rate_after_a_burst() {
        let began = Instant::now();
        let mut pace = Pace::new(600, 5);
        let starts = starts(&mut pace, began, 10_000);
        assert_eq!(starts[..7], [0, 0, 0, 0, 0, 100, 200]);
        assert_eq!(starts.len(), 104);
    }

    #[test]
    fn an_idle_bucket_holds_no_more_than_its_burst() {
        let began = Instant::now();
        let mut pace = Pace::new(600, 3);
        assert!(pace.take(began).is_ok());
        let later = began + Duration::from_secs(3600);
        assert_eq!(starts(&mut pace, later, 50).len(), 3);
    }

    #[test]
    fn a_held_bucket_gives_nothing_and_says_until_when() {
        let began = Instant::now();
        let mut pace = Pace::new(600, 3);
        let until = began + Duration::from_secs(2);
        pace.hold(until);
        pace.hold(began + Duration::from_secs(1));
        assert_eq!(pace.take(began), Err(until));
        assert_eq!(pace.take(until), Ok(()));
    }
}
