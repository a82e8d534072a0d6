//! Where a rollout's time went.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::door::Knock;

/// In seconds; together they are the whole, but for the evaluator.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Times {
    /// From the start of the rollout to the first call.
    pub before_first_call: f64,
    /// Waiting for answers to model calls, calls side by side counted once.
    pub waiting_for_model: f64,
    /// Between calls: the harness and its tools.
    pub between_calls: f64,
    /// From the last answer to the end of the rollout, the evaluator included.
    pub after_last_call: f64,
}

impl Times {
    /// From the requests of a rollout that ran from `started` to `ended`.
    pub fn of(knocks: &[Knock], started: Instant, ended: Instant) -> Self {
        let mut calls: Vec<&Knock> = knocks.iter().filter(|knock| knock.is_call()).collect();
        calls.sort_by_key(|call| call.came);
        let (Some(first), Some(last)) = (calls.first(), calls.iter().map(|call| call.answered).max()) else {
            let before_first_call = (ended - started).as_secs_f64();
            return Self { before_first_call, waiting_for_model: 0.0, between_calls: 0.0, after_last_call: 0.0 };
        };
        let mut waited = Duration::ZERO;
        let mut until = first.came;
        for call in &calls {
            waited += call.answered.saturating_duration_since(call.came.max(until));
            until = until.max(call.answered);
        }
        let seconds = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64();
        Self {
            before_first_call: seconds(started, first.came),
            waiting_for_model: waited.as_secs_f64(),
            between_calls: seconds(first.came, last) - waited.as_secs_f64(),
            after_last_call: seconds(last, ended),
        }
    }
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.1} s before the first call, {:.1} s waiting for the model, {:.1} s between calls, {:.1} s after the last",
            self.before_first_call, self.waiting_for_model, self.between_calls, self.after_last_call
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_side_by_side_are_waited_for_once() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let knock = |path: &str, came, answered| Knock {
            method: "POST".into(),
            path: path.into(),
            status: Some(200),
            came: at(came),
            answered: at(answered),
        };
        let knocks = [
            knock("/openai/v1/chat/completions", 4, 6),
            knock("/openai/v1/chat/completions", 2, 5),
            knock("/events", 7, 9),
            knock("/openai/v1/chat/completions", 9, 10),
        ];
        let times = Times::of(&knocks, at(0), at(13));
        let expected =
            Times { before_first_call: 2.0, waiting_for_model: 5.0, between_calls: 3.0, after_last_call: 3.0 };
        assert_eq!(times, expected);
        assert_eq!(Times::of(&knocks[2..3], at(0), at(13)).before_first_call, 13.0);
    }
}
