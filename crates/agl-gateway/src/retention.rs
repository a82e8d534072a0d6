//! Which rollouts that have ended are deleted, oldest ended first, so that the store does not grow for ever.
//!
//! A pass walks over them in the order in which they ended, until no limit asks for more. What a trainer may still need is passed
//! over ([`protected`]). Rollouts are deleted one by one with pauses, so that model calls, which wait in the same queue of the
//! store, do not wait long.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use agl_core::rollout::Rollout;
use agl_store::{StoreError, TerminalPage};

use crate::app::App;
use crate::clock;
use crate::config::{RetentionConfig, duration};

/// A pass that is not through by then is broken off; the next goes on where it was.
const PASS_LIMIT: Duration = Duration::from_secs(60);
/// How long such a pass is waited after.
const BREATH: Duration = Duration::from_secs(1);
/// The shortest pause after a deletion; after a long one it is as long as the deletion took.
const PAUSE: Duration = Duration::from_millis(2);
/// Rollouts looked up at once.
const PAGE: usize = 500;
/// That a limit cannot be kept is said again after this long.
const WARN_AGAIN: Duration = Duration::from_secs(3600);

/// Which limit a rollout is deleted for. In the metrics and the log by these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    Age,
    Count,
    Size,
}

impl Limit {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Age => "age",
            Self::Count => "count",
            Self::Size => "size",
        }
    }
}

/// How far the store is over its limits of number and size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Excess {
    rollouts: u64,
    bytes: u64,
}

/// What becomes of a rollout that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// No limit asks for it. None will ask for one that ended later.
    Stays,
    /// A limit asks for it, but a trainer may still need it.
    Protected(Limit),
    Goes(Limit),
}

/// True where a limit must wait: the rollout has only just ended, so that its trainer may be reading it and late rewards may
/// come, or it is of a training run, and no checkpoint that trained on it is on disk yet.
fn protected(config: &RetentionConfig, rollout: &Rollout, age: f64) -> bool {
    let wanted_by_a_trainer = rollout.is_train && rollout.consumed.is_none();
    age < config.protect_seconds || (wanted_by_a_trainer && age < config.protect_unconsumed_seconds)
}

fn fate(config: &RetentionConfig, rollout: &Rollout, now: f64, excess: Excess) -> Fate {
    let age = now - rollout.status.updated_at;
    let limit = if config.max_age_seconds.is_some_and(|max| age > max) {
        Limit::Age
    } else if excess.rollouts > 0 {
        Limit::Count
    } else if excess.bytes > 0 {
        Limit::Size
    } else {
        return Fate::Stays;
    };
    if protected(config, rollout, age) { Fate::Protected(limit) } else { Fate::Goes(limit) }
}

/// Passes every `every_seconds` until the gateway stops. Ends at once where no limit is set.
pub(crate) async fn keep_within_limits(app: Weak<App>) {
    let Some((config, mut stopping)) = app.upgrade().map(|app| (app.config.retention, app.stopping.subscribe())) else {
        return;
    };
    if !config.is_on() {
        return;
    }
    let mut sweeper = Sweeper { config, gone: 0, at: None, passed_over: PassedOver::default(), warned: None };
    let mut wait = duration(config.every_seconds);
    loop {
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = stopping.wait_for(|stopping| *stopping) => return,
        }
        let Some(app) = app.upgrade() else { return };
        let ended = tokio::select! {
            ended = tokio::time::timeout(PASS_LIMIT, sweeper.pass(&app)) => ended,
            _ = stopping.wait_for(|stopping| *stopping) => return,
        };
        wait = match ended {
            Ok(Ok(())) => duration(config.every_seconds),
            Ok(Err(StoreError::Closed)) => return,
            Ok(Err(error)) => {
                tracing::warn!(%error, "retention: a pass failed; the next tries again");
                duration(config.every_seconds)
            }
            Err(_) => {
                tracing::info!(seconds = PASS_LIMIT.as_secs(), "retention: there is more to delete than a pass can");
                BREATH
            }
        };
    }
}

/// Rollouts that a limit asks for and that are protected.
#[derive(Clone, Copy, Debug, Default)]
struct PassedOver {
    rollouts: u64,
    /// How many of them are older than `max_age_seconds`.
    too_old: u64,
}

impl PassedOver {
    fn note(&mut self, limit: Limit) {
        self.rollouts += 1;
        self.too_old += u64::from(limit == Limit::Age);
    }

    fn and(self, other: Self) -> Self {
        Self { rollouts: self.rollouts + other.rollouts, too_old: self.too_old + other.too_old }
    }
}

/// What is known from one pass to the next.
struct Sweeper {
    config: RetentionConfig,
    /// The place in the order of ends before which nothing is left.
    gone: u64,
    /// Where a pass was broken off.
    at: Option<u64>,
    /// What this pass has met.
    passed_over: PassedOver,
    warned: Option<Instant>,
}

impl Sweeper {
    async fn pass(&mut self, app: &Arc<App>) -> Result<(), StoreError> {
        let mut excess = Excess { rollouts: self.count_excess(app).await?, bytes: self.byte_excess(app).await? };
        if self.at.is_none() {
            self.passed_over = PassedOver::default();
        }
        let mut place = self.at.unwrap_or(self.gone);
        'pages: loop {
            self.at = Some(place);
            let page = app.store.terminal(place, PAGE).await?;
            self.note_gone(place, &page);
            let mut passed_over = PassedOver::default();
            for item in page.items {
                let Some(rollout) = app.store.rollout(&item.rollout_id).await? else { continue };
                match fate(&self.config, &rollout, clock::now(), excess) {
                    Fate::Stays => {
                        self.passed_over = self.passed_over.and(passed_over);
                        break 'pages;
                    }
                    Fate::Protected(limit) => passed_over.note(limit),
                    Fate::Goes(limit) => {
                        delete(app, &rollout.rollout_id, limit).await?;
                        excess.rollouts = excess.rollouts.saturating_sub(1);
                        excess.bytes = self.byte_excess(app).await?;
                    }
                }
            }
            self.passed_over = self.passed_over.and(passed_over);
            if page.next_after <= place {
                break;
            }
            place = page.next_after;
        }
        self.at = None;
        app.metrics.retention_passed_over(self.passed_over.rollouts);
        self.complain(excess);
        Ok(())
    }

    /// How many rollouts that have ended there are beyond `keep_rollouts`.
    async fn count_excess(&mut self, app: &App) -> Result<u64, StoreError> {
        let Some(keep) = self.config.keep_rollouts else { return Ok(0) };
        let mut living = 0_u64;
        let mut place = self.gone;
        loop {
            let page = app.store.terminal(place, PAGE).await?;
            if page.next_after <= place {
                return Ok(living.saturating_sub(keep));
            }
            self.note_gone(place, &page);
            living += page.items.len() as u64;
            place = page.next_after;
        }
    }

    /// The first pages are empty once the oldest rollouts have been deleted: they are not looked at again.
    fn note_gone(&mut self, place: u64, page: &TerminalPage) {
        if place == self.gone && page.items.is_empty() {
            self.gone = page.next_after;
        }
    }

    async fn byte_excess(&self, app: &App) -> Result<u64, StoreError> {
        let Some(max) = self.config.max_bytes else { return Ok(0) };
        Ok(app.store.stored_bytes().await?.saturating_sub(max))
    }

    /// Says which limits this pass could not keep, and why.
    fn complain(&mut self, excess: Excess) {
        if excess == Excess::default() && self.passed_over.too_old == 0 {
            self.warned = None;
            return;
        }
        if self.warned.is_some_and(|when| when.elapsed() < WARN_AGAIN) {
            return;
        }
        self.warned = Some(Instant::now());
        let RetentionConfig { protect_seconds, protect_unconsumed_seconds, .. } = self.config;
        tracing::warn!(
            rollouts_too_many = excess.rollouts,
            bytes_too_many = excess.bytes,
            too_old = self.passed_over.too_old,
            protected = self.passed_over.rollouts,
            "retention: the limits cannot be kept. What has not ended is never deleted, what ended less than \
             {protect_seconds} s ago neither, nor a train rollout that no checkpoint has consumed for \
             {protect_unconsumed_seconds} s; raise the limit, or lower gateway.retention.protect_unconsumed_seconds if \
             its trainer does not mark what it has consumed"
        );
    }
}

async fn delete(app: &Arc<App>, rollout_id: &str, limit: Limit) -> Result<(), StoreError> {
    let began = Instant::now();
    app.delete_rollout(rollout_id).await?;
    app.metrics.retention_deleted(limit);
    tracing::info!(rollout = rollout_id, limit = limit.name(), "retention: deleted");
    tokio::time::sleep(began.elapsed().max(PAUSE)).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use agl_core::rollout::{Consumed, RolloutCreate};
    use serde_json::json;

    use super::*;

    const NOW: f64 = 1_000_000.0;

    fn limits() -> RetentionConfig {
        RetentionConfig {
            max_age_seconds: Some(5000.0),
            protect_seconds: 100.0,
            protect_unconsumed_seconds: 1000.0,
            ..RetentionConfig::default()
        }
    }

    fn ended(age: f64, is_train: bool, consumed: bool) -> Rollout {
        let create: RolloutCreate = serde_json::from_value(json!({"input": {}, "is_train": is_train})).unwrap();
        let mut rollout = Rollout::new(create, "r".to_owned(), NOW - age);
        rollout.consumed = consumed.then(|| Consumed { run_id: "run".to_owned(), step: 1 });
        rollout
    }

    fn fate_of(age: f64, is_train: bool, consumed: bool, excess: Excess) -> Fate {
        fate(&limits(), &ended(age, is_train, consumed), NOW, excess)
    }

    #[test]
    fn a_limit_takes_what_is_consumed_or_was_never_to_be() {
        let (count, size) = (Excess { rollouts: 1, bytes: 0 }, Excess { rollouts: 0, bytes: 1 });
        for (is_train, consumed) in [(true, true), (false, false)] {
            assert_eq!(fate_of(200.0, is_train, consumed, Excess::default()), Fate::Stays);
            assert_eq!(fate_of(200.0, is_train, consumed, count), Fate::Goes(Limit::Count));
            assert_eq!(fate_of(200.0, is_train, consumed, size), Fate::Goes(Limit::Size));
            assert_eq!(fate_of(5001.0, is_train, consumed, Excess::default()), Fate::Goes(Limit::Age));
        }
    }

    #[test]
    fn what_no_checkpoint_has_consumed_waits_for_its_own_protection_and_everything_for_the_short_one() {
        let over = Excess { rollouts: 1, bytes: 1 };
        assert_eq!(fate_of(999.0, true, false, over), Fate::Protected(Limit::Count));
        assert_eq!(fate_of(1001.0, true, false, over), Fate::Goes(Limit::Count));
        for (is_train, consumed) in [(true, true), (false, false)] {
            assert_eq!(fate_of(99.0, is_train, consumed, over), Fate::Protected(Limit::Count));
            assert_eq!(fate_of(101.0, is_train, consumed, over), Fate::Goes(Limit::Count));
        }
    }

    #[test]
    fn an_age_below_the_protection_does_not_lift_it() {
        let config = RetentionConfig { max_age_seconds: Some(10.0), ..limits() };
        let of = |age, consumed| fate(&config, &ended(age, true, consumed), NOW, Excess::default());
        let (waits, goes) = (Fate::Protected(Limit::Age), Fate::Goes(Limit::Age));
        assert_eq!((of(50.0, true), of(150.0, true)), (waits, goes));
        assert_eq!((of(150.0, false), of(1500.0, false)), (waits, goes));
    }
}
