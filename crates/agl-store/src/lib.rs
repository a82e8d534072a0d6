//! Where the gateway keeps rollouts, attempts, events, model calls, models and the pause.
//!
//! * [`Store`] — what a store can do. Every write is durable when its future resolves.
//! * [`memory`] — for tests and throw-away runs: nothing survives the process.
//! * [`sqlite`] — the default: one file, one writer thread with group commit.
//! * [`postgres`] — a database that several gateways share; [`peers`] is how they keep in touch.
//! * [`record`] — what goes in and comes out, beside the types of `agl-core`.
//! * [`body`] — compressed request and response bodies, each behind the one that it continues.

use std::sync::Arc;

use agl_core::attempt::{Attempt, AttemptPatch};
use agl_core::event::{Event, EventCreate};
use agl_core::rollout::{Rollout, StatusPatch};
use async_trait::async_trait;
use tokio::sync::watch;

mod aside;
mod bases;
pub mod body;
mod codec;
mod delta;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzz;
pub mod memory;
pub mod peers;
pub mod postgres;
mod python;
pub mod record;
mod rows;
pub mod sqlite;
mod terse;

pub use aside::aside;
pub use body::Body;
pub use error::StoreError;
pub use memory::MemoryStore;
pub use peers::{Agreement, Peer, Peers, Presence};
pub use postgres::PostgresStore;
pub use record::{
    AttemptDetail, CallRecord, Change, ChangeKind, LastCall, Pause, RegisteredModel, RolloutQuery, Settlement,
    Standing, StoredCall, StoredEvent, TerminalItem, TerminalPage, Writer,
};
pub use sqlite::SqliteStore;

/// What every store can do. Futures of writes resolve once the write is durable; `now` is in seconds since the epoch.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Enqueues; a known id gives the existing rollout untouched. One answer per item, in order.
    async fn create_rollouts(&self, rollouts: Vec<Rollout>) -> Result<Vec<Rollout>, StoreError>;
    /// The rollout of that id.
    async fn rollout(&self, rollout_id: &str) -> Result<Option<Rollout>, StoreError>;
    /// Rollouts by state, oldest first. [`StoreError::RolloutNotFound`] if the one to start after has been deleted.
    async fn list_rollouts(&self, query: RolloutQuery) -> Result<Vec<Rollout>, StoreError>;
    /// Changes the status; entering a terminal state appends to the terminal order.
    async fn patch_rollout(&self, rollout_id: &str, patch: StatusPatch, now: f64) -> Result<Rollout, StoreError>;
    /// Deletes a rollout with its attempts, events and calls. A missing one is no error.
    async fn delete_rollout(&self, rollout_id: &str) -> Result<(), StoreError>;
    /// Rollouts in the order in which they ended.
    async fn terminal(&self, after: u64, limit: usize) -> Result<TerminalPage, StoreError>;
    /// Marks rollouts as trained on by a checkpoint that is on disk. Ids that do not exist are left out of the answer,
    /// which counts the marked ones.
    async fn mark_consumed(&self, run_id: &str, step: u64, rollout_ids: Vec<String>) -> Result<u64, StoreError>;

    /// Makes an attempt, `attempt_id` or the next free number; a known id gives the existing one. True if it is new.
    async fn create_attempt(
        &self,
        rollout_id: &str,
        attempt_id: Option<String>,
        now: f64,
    ) -> Result<(AttemptDetail, bool), StoreError>;
    /// The attempt of that id, without counting its calls.
    async fn attempt(&self, rollout_id: &str, attempt_id: &str) -> Result<Option<Attempt>, StoreError>;
    /// The rollout and the attempt, as every call needs them; `None` where there is no such rollout.
    async fn standing(&self, rollout_id: &str, attempt_id: &str) -> Result<Option<Standing>, StoreError> {
        let Some(rollout) = self.rollout(rollout_id).await? else { return Ok(None) };
        let attempt = self.attempt(rollout_id, attempt_id).await?;
        Ok(Some(Standing { rollout: Arc::new(rollout), attempt: attempt.map(Arc::new) }))
    }
    /// All attempts of a rollout, oldest first.
    async fn attempts(&self, rollout_id: &str) -> Result<Vec<AttemptDetail>, StoreError>;
    /// Changes an attempt.
    async fn patch_attempt(
        &self,
        rollout_id: &str,
        attempt_id: &str,
        patch: AttemptPatch,
        now: f64,
    ) -> Result<AttemptDetail, StoreError>;

    /// Appends an event of a user.
    async fn append_event(
        &self,
        rollout_id: &str,
        attempt_id: &str,
        event: EventCreate,
        now: f64,
    ) -> Result<Event, StoreError>;
    /// The events of an attempt in the order of their appending, all or of one type.
    async fn events(
        &self,
        rollout_id: &str,
        attempt_id: &str,
        event_type: Option<&str>,
    ) -> Result<Vec<StoredEvent>, StoreError>;
    /// How many events a rollout has, over all its attempts; none where there is no such rollout.
    async fn count_events(&self, rollout_id: &str) -> Result<u64, StoreError>;
    /// The ids of the attempts that have events, in the order of their first event.
    async fn attempts_with_events(&self, rollout_id: &str) -> Result<Vec<String>, StoreError>;

    /// Writes a model call: event, rows, bodies and superseded rows, in one transaction. [`StoreError::Raced`] where another
    /// gateway was faster with one of its rows; a superseded row that another gateway has settled as delivered stays so.
    async fn record_call(&self, call: CallRecord) -> Result<(), StoreError>;
    /// The rows of an attempt from number `from` on, in `seq` order.
    async fn calls(&self, rollout_id: &str, attempt_id: &str, from: u64) -> Result<Vec<StoredCall>, StoreError>;
    /// Records which answers left. Rows of deleted rollouts are passed over.
    async fn settle(&self, settlements: Vec<Settlement>) -> Result<(), StoreError>;

    /// Registers endpoints, replacing those of equal model and endpoint.
    async fn put_models(&self, models: Vec<RegisteredModel>) -> Result<(), StoreError>;
    /// Removes a model's endpoints, or only one of them.
    async fn delete_models(&self, model: &str, endpoint: Option<&str>) -> Result<(), StoreError>;
    /// All endpoints, by model and endpoint.
    async fn models(&self) -> Result<Vec<RegisteredModel>, StoreError>;

    /// Keeps the pause, or forgets it, if what is kept is still `before`. False where it is not: somebody was faster.
    async fn put_pause(&self, before: Option<Pause>, after: Option<Pause>) -> Result<bool, StoreError>;
    /// The pause that was kept, lapsed or not.
    async fn pause(&self) -> Result<Option<Pause>, StoreError>;
    /// The secret of that name; `fresh` is kept and returned if there is none yet.
    async fn secret(&self, name: &'static str, fresh: [u8; 32]) -> Result<[u8; 32], StoreError>;

    /// How many bytes the content takes. Room that deletions have freed and that will be used again does not count: the figure
    /// falls when rollouts are deleted, and retention's `max_bytes` relies on that. Only a Postgres database shrinks when its server
    /// sees fit: the setting is refused there.
    async fn stored_bytes(&self) -> Result<u64, StoreError>;

    /// Entries of the change log after `after`, at most `limit`. Of a deleted rollout only its deletion may be left.
    async fn changes(&self, after: u64, limit: usize) -> Result<Vec<Change>, StoreError>;
    /// The cursor of the newest change; is told of every change once it can be read.
    fn newest_change(&self) -> watch::Receiver<u64>;

    /// Where several gateways can be on this store: how they keep in touch.
    fn peers(&self) -> Option<&dyn Peers> {
        None
    }

    /// Ends the store after everything accepted so far is durable. Later calls fail with [`StoreError::Closed`].
    async fn close(&self);
}

/// A store that several parts of the gateway share.
pub type SharedStore = Arc<dyn Store>;

/// Opens the store that a configuration names: `memory`, `sqlite:PATH`, a path to a SQLite file, or the URL of a Postgres
/// database.
///
/// # Errors
/// Whatever keeps the database from being opened: see [`StoreError`].
pub async fn open(name: &str) -> Result<SharedStore, StoreError> {
    if name == "memory" {
        return Ok(Arc::new(MemoryStore::new()));
    }
    if is_postgres(name) {
        return Ok(Arc::new(PostgresStore::open(name).await?));
    }
    let path = name.strip_prefix("sqlite:").unwrap_or(name);
    Ok(Arc::new(SqliteStore::open(path).await?))
}

fn is_postgres(name: &str) -> bool {
    name.starts_with("postgres://") || name.starts_with("postgresql://")
}

/// The name of a store as it may be shown: a URL without its password.
#[must_use]
pub fn shown(name: &str) -> String {
    if is_postgres(name) { postgres::shown(name) } else { name.to_owned() }
}
