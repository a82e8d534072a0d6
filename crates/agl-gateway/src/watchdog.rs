//! Names what is stuck, once: a call at its server or held for long, a write that does not commit, deliveries that are not written,
//! an event loop that comes too late.
//!
//! Whatever may wait long says so with [`Watchdog::watch`] and holds what it gets for as long as it waits.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::app::App;
use crate::proxy::recorder::AttemptKey;

/// A write takes milliseconds: what takes this long is stuck, however patient the setting.
const WRITE_PATIENCE: Duration = Duration::from_secs(5);
/// An event loop that comes this late keeps every call waiting.
const LOOP_PATIENCE: Duration = Duration::from_secs(1);
/// How often it looks, at most; a short patience is looked after more often.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What a thing waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Wait {
    /// The answer of a server.
    Server,
    /// The end of a pause.
    Resume,
    /// Its turn among the calls that may be at servers.
    Turn,
    /// A server of its model.
    Model,
    /// The commit of a call or an event.
    Commit,
    /// The deliveries reported so far.
    Deliveries,
}

impl Wait {
    /// All of them.
    pub(crate) const ALL: [Self; 6] =
        [Self::Server, Self::Resume, Self::Turn, Self::Model, Self::Commit, Self::Deliveries];

    /// The name in metrics and logs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Resume => "resume",
            Self::Turn => "turn",
            Self::Model => "model",
            Self::Commit => "commit",
            Self::Deliveries => "deliveries",
        }
    }

    fn hint(self) -> &'static str {
        match self {
            Self::Server => "a call waits for its server's answer; is the server alive?",
            Self::Resume => "a call is held by a pause; does the trainer still live?",
            Self::Turn => "a call waits for its turn; `limits.max_inflight_calls` calls are at servers",
            Self::Model => "a call waits for a server of its model to be registered",
            Self::Commit => "a write has not committed; is the store's disk full, slow or locked?",
            Self::Deliveries => "the deliveries of answers are not written; is the store's disk full, slow or locked?",
        }
    }

    fn patience(self, patience: Duration) -> Duration {
        match self {
            Self::Server | Self::Resume | Self::Turn | Self::Model => patience,
            Self::Commit | Self::Deliveries => patience.min(WRITE_PATIENCE),
        }
    }
}

/// See the [module](self).
pub(crate) struct Watchdog {
    patience: Duration,
    waiting: Mutex<HashMap<u64, Waiting>>,
    next: AtomicU64,
}

struct Waiting {
    wait: Wait,
    since: Instant,
    /// Whose, and where: for the log.
    key: AttemptKey,
    at: String,
    told: bool,
}

/// Something that waits. Dropping it says that it waits no more.
pub(crate) struct Watched<'a> {
    watchdog: &'a Watchdog,
    number: u64,
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        let Some(waited) = self.watchdog.waiting().remove(&self.number) else { return };
        if waited.told {
            let seconds = waited.since.elapsed().as_secs_f64();
            let AttemptKey { rollout_id, attempt_id } = waited.key;
            tracing::info!(rollout_id, attempt_id, waits_for = waited.wait.name(), seconds, "it waits no more");
        }
    }
}

impl Watchdog {
    pub(crate) fn new(patience: Duration) -> Arc<Self> {
        Arc::new(Self { patience, waiting: Mutex::default(), next: AtomicU64::new(0) })
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<u64, Waiting>> {
        // Entries that come and go whole.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an eye on something of an attempt that waits from now on. `at` names the place: a server, a model, a store.
    pub(crate) fn watch(&self, wait: Wait, key: &AttemptKey, at: &str) -> Watched<'_> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let waiting = Waiting { wait, since: Instant::now(), key: key.clone(), at: at.to_owned(), told: false };
        self.waiting().insert(number, waiting);
        Watched { watchdog: self, number }
    }

    /// How many things wait too long now, by what they wait for.
    pub(crate) fn stuck(&self) -> [(Wait, usize); Wait::ALL.len()] {
        let waiting = self.waiting();
        Wait::ALL.map(|wait| (wait, waiting.values().filter(|one| one.wait == wait && self.is_late(one)).count()))
    }

    fn is_late(&self, waiting: &Waiting) -> bool {
        waiting.since.elapsed() >= waiting.wait.patience(self.patience)
    }

    /// Logs what has become late since it last looked, and gives what that waits for.
    fn look(&self) -> Vec<Wait> {
        let mut waiting = self.waiting();
        let late = waiting.values_mut().filter(|one| !one.told && self.is_late(one));
        late.map(|one| {
            one.told = true;
            let AttemptKey { rollout_id, attempt_id } = &one.key;
            let (seconds, waits_for) = (one.since.elapsed().as_secs_f64(), one.wait.name());
            tracing::warn!(rollout_id, attempt_id, waits_for, at = one.at, seconds, "{}", one.wait.hint());
            one.wait
        })
        .collect()
    }
}

/// Looks now and then for as long as there is a gateway.
pub(crate) async fn keep_watch(app: Weak<App>, patience: Duration) {
    let every = LOOK_EVERY.min(patience / 4);
    loop {
        let due = Instant::now() + every;
        tokio::time::sleep(every).await;
        let late = due.elapsed();
        let Some(app) = app.upgrade() else { return };
        app.metrics.event_loop(late);
        if late >= LOOP_PATIENCE.min(patience) {
            app.metrics.event_loop_late();
            let seconds = late.as_secs_f64();
            tracing::warn!(seconds, "the event loop came late: everything waited; is the machine overloaded?");
        }
        for wait in app.watchdog.look() {
            app.metrics.stuck(wait);
        }
    }
}

/// Asks the recorder now and then to write what deliveries it has: a queue that does not move is seen by who waits for it.
pub(crate) async fn keep_asking(app: Weak<App>, patience: Duration) {
    let nobody = AttemptKey { rollout_id: String::new(), attempt_id: String::new() };
    loop {
        tokio::time::sleep(LOOK_EVERY.min(patience / 4)).await;
        let Some(app) = app.upgrade() else { return };
        let _watched = app.watchdog.watch(Wait::Deliveries, &nobody, &app.shown_store);
        app.recorder.flush().await;
    }
}
