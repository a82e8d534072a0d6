//! The default store: one SQLite file.
//!
//! * [`writer`] — one thread writes, with group commit; WAL and `synchronous=FULL`, so a resolved write is on disk.
//! * [`readers`] — a few connections on blocking threads; WAL lets them read while the writer writes.
//! * [`schema`] — the tables and the version check.
//! * [`checkpoints`] — moves the write-ahead log into the file, beside the writer.
//! * [`standings`] — what every call asks for, at hand.
//! * [`rollouts`], [`attempts`], [`events`], [`calls`], [`settings`] — the statements, each a function over a connection.
//! * [`space`] — how large the content is, and the file's room given back.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use agl_core::attempt::{Attempt, AttemptPatch};
use agl_core::event::{Event, EventCreate};
use agl_core::rollout::{Rollout, StatusPatch};
use async_trait::async_trait;
use bytes::Bytes;
use rusqlite::{Connection, ErrorCode, OpenFlags};
use tokio::sync::watch;

use crate::bases::{Bases, pack};
use crate::record::{
    AttemptDetail, CallRecord, Change, Pause, RegisteredModel, RolloutQuery, Settlement, Standing, StoredCall,
    StoredEvent, TerminalPage,
};
use crate::{Store, StoreError, rows};

mod attempts;
mod calls;
mod checkpoints;
mod events;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
mod readers;
mod rollouts;
mod schema;
mod settings;
mod space;
mod standings;
mod writer;

const PAGE_BYTES: i64 = 16 * 1024;
/// The writer's page cache.
const CACHE_KIB: i64 = 16 * 1024;

/// A store in one SQLite file. Dropping it lets the writer thread finish what it was given.
#[derive(Debug)]
pub struct SqliteStore {
    path: PathBuf,
    /// `None` once closed.
    writer: Mutex<Option<Writer>>,
    readers: readers::Readers,
    bases: Bases<i64>,
    standings: Arc<standings::Standings>,
    newest_change: watch::Receiver<u64>,
}

#[derive(Debug)]
struct Writer {
    jobs: writer::JobSender,
    thread: std::thread::JoinHandle<()>,
}

impl SqliteStore {
    /// Opens the file, making it if it does not exist, and starts the writer thread.
    ///
    /// # Errors
    /// [`StoreError::CannotOpen`], [`StoreError::InUse`], [`StoreError::DatabaseVersion`] or [`StoreError::NotOurs`].
    pub async fn open(path: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let path = path.into();
        let open = move || {
            let lock = lock_beside(&path)?;
            let connection = open_writer(&path)?;
            Self::start(path, lock, connection)
        };
        tokio::task::spawn_blocking(open).await.unwrap_or(Err(StoreError::Closed))
    }

    fn start(path: PathBuf, lock: File, connection: Connection) -> Result<Self, StoreError> {
        let newest: i64 = connection
            .query_row("SELECT coalesce(max(cursor), 0) FROM changes", [], |row| row.get(0))
            .map_err(|error| failure(&path, error))?;
        let (announce, newest_change) = watch::channel(newest.cast_unsigned());
        let (jobs, queue) = std::sync::mpsc::channel();
        let readers = readers::Readers::new(path.clone());
        let checkpoints = checkpoints::Checkpoints::start(&path)?;
        let file = path.clone();
        let thread = std::thread::Builder::new()
            .name("agl-sqlite-writer".to_owned())
            .spawn(move || {
                writer::run(connection, &file, &queue, &announce, checkpoints);
                drop(lock);
            })
            .map_err(|error| StoreError::CannotOpen { path: path.clone(), reason: error.to_string() })?;
        Ok(Self {
            path,
            writer: Mutex::new(Some(Writer { jobs, thread })),
            readers,
            bases: Bases::default(),
            standings: Arc::default(),
            newest_change,
        })
    }

    /// The database file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    async fn write<T: Send + 'static>(
        &self,
        change: impl FnOnce(&Sql<'_>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.write_then(change, || ()).await
    }

    /// A write that changes a rollout or its attempts.
    async fn change<T: Send + 'static>(
        &self,
        rollout_id: &str,
        change: impl FnOnce(&Sql<'_>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (standings, rollout_id) = (Arc::clone(&self.standings), rollout_id.to_owned());
        self.write_then(change, move || standings.changed(&rollout_id)).await
    }

    /// `then` is done once the fate of the change is known, before the caller hears of it, and also where the caller has gone away.
    async fn write_then<T: Send + 'static>(
        &self,
        change: impl FnOnce(&Sql<'_>) -> Result<T, StoreError> + Send + 'static,
        then: impl FnOnce() + Send + 'static,
    ) -> Result<T, StoreError> {
        let path = self.path.clone();
        let (job, outcome) = writer::job(move |connection| change(&Sql { connection, path: &path }), then);
        {
            let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
            let jobs = &writer.as_ref().ok_or(StoreError::Closed)?.jobs;
            jobs.send(job).map_err(|_| StoreError::Closed)?;
        }
        outcome.await.unwrap_or(Err(StoreError::Closed))
    }

    async fn read<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Sql<'_>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.readers.read(query).await
    }
}

/// A connection and the file it is open on, which error messages name.
struct Sql<'a> {
    connection: &'a Connection,
    path: &'a Path,
}

impl Sql<'_> {
    fn run(&self, sql: &'static str, parameters: impl rusqlite::Params) -> Result<usize, StoreError> {
        let mut statement = self.connection.prepare_cached(sql).map_err(|error| failure(self.path, error))?;
        statement.execute(parameters).map_err(|error| failure(self.path, error))
    }

    /// Runs an INSERT and gives the number of the new row.
    fn insert(&self, sql: &'static str, parameters: impl rusqlite::Params) -> Result<i64, StoreError> {
        let mut statement = self.connection.prepare_cached(sql).map_err(|error| failure(self.path, error))?;
        statement.insert(parameters).map_err(|error| failure(self.path, error))
    }

    fn first<T>(
        &self,
        sql: &'static str,
        parameters: impl rusqlite::Params,
        read: impl FnOnce(&rusqlite::Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Option<T>, StoreError> {
        let mut statement = self.connection.prepare_cached(sql).map_err(|error| failure(self.path, error))?;
        match statement.query_row(parameters, read) {
            Ok(value) => Ok(Some(value)),
            Err(rusqlite::Error::QueryReturnedNoRows) => Ok(None),
            Err(error) => Err(failure(self.path, error)),
        }
    }

    fn all<T>(
        &self,
        sql: &'static str,
        parameters: impl rusqlite::Params,
        read: impl FnMut(&rusqlite::Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, StoreError> {
        let mut statement = self.connection.prepare_cached(sql).map_err(|error| failure(self.path, error))?;
        let rows = statement.query_map(parameters, read).map_err(|error| failure(self.path, error))?;
        rows.collect::<rusqlite::Result<_>>().map_err(|error| failure(self.path, error))
    }
}

/// SQLite's integers are signed; ours never reach the sign bit.
fn signed(number: u64) -> i64 {
    number.min(i64::MAX.cast_unsigned()).cast_signed()
}

fn to_json(value: &impl serde::Serialize, what: &str) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|error| corrupt(what, error))
}

fn from_json<T: serde::de::DeserializeOwned>(text: &str, what: &str) -> Result<T, StoreError> {
    serde_json::from_str(text).map_err(|error| corrupt(what, error))
}

fn corrupt(what: &str, reason: impl std::fmt::Display) -> StoreError {
    StoreError::Corrupt { what: what.to_owned(), reason: reason.to_string() }
}

/// Names what SQLite reports in our words.
fn failure(path: &Path, error: rusqlite::Error) -> StoreError {
    let path = path.to_owned();
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => StoreError::DiskFull { database: path.display().to_string() },
        Some(ErrorCode::NotADatabase) => {
            StoreError::NotOurs { database: path.display().to_string(), reason: "it is no SQLite file".to_owned() }
        }
        Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => {
            StoreError::CannotOpen { path, reason: error.to_string() }
        }
        _ => StoreError::Database { path, source: Arc::new(error) },
    }
}

/// Two gateways on one file would give out the same numbers: the second is refused. The system frees the lock when the
/// process ends, however it ends.
fn lock_beside(path: &Path) -> Result<File, StoreError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let cannot_open =
        |error: std::io::Error| StoreError::CannotOpen { path: path.to_owned(), reason: error.to_string() };
    let file =
        File::options().create(true).truncate(false).write(true).open(PathBuf::from(name)).map_err(cannot_open)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(StoreError::InUse { path: path.to_owned() }),
        Err(TryLockError::Error(error)) => Err(cannot_open(error)),
    }
}

fn open_writer(path: &Path) -> Result<Connection, StoreError> {
    let failed = |error| failure(path, error);
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags).map_err(failed)?;
    connection.busy_timeout(Duration::from_secs(10)).map_err(failed)?;
    // Of a new file. Rows of calls have two to eight kilobytes: of the usual pages of four a third would stay empty.
    connection.pragma_update(None, "page_size", PAGE_BYTES).map_err(failed)?;
    schema::prepare(&mut connection, path)?;
    connection.pragma_update(None, "journal_mode", "WAL").map_err(failed)?;
    // FULL: a commit returns after fsync. NORMAL would lose acknowledged events with the power.
    connection.pragma_update(None, "synchronous", "FULL").map_err(failed)?;
    // A group's pages stay in memory until its commit.
    connection.pragma_update(None, "cache_size", -CACHE_KIB).map_err(failed)?;
    connection.pragma_update(None, "temp_store", "MEMORY").map_err(failed)?;
    // See `checkpoints`.
    connection.pragma_update(None, "wal_autocheckpoint", 0).map_err(failed)?;
    connection.set_prepared_statement_cache_capacity(64);
    Ok(connection)
}

#[async_trait]
impl Store for SqliteStore {
    async fn create_rollouts(&self, new: Vec<Rollout>) -> Result<Vec<Rollout>, StoreError> {
        self.write(move |sql| rollouts::create(sql, new)).await
    }

    async fn rollout(&self, rollout_id: &str) -> Result<Option<Rollout>, StoreError> {
        let id = rollout_id.to_owned();
        self.read(move |sql| rollouts::get(sql, &id)).await
    }

    async fn list_rollouts(&self, query: RolloutQuery) -> Result<Vec<Rollout>, StoreError> {
        self.read(move |sql| rollouts::list(sql, &query)).await
    }

    async fn patch_rollout(&self, rollout_id: &str, patch: StatusPatch, now: f64) -> Result<Rollout, StoreError> {
        let id = rollout_id.to_owned();
        self.change(rollout_id, move |sql| rollouts::patch(sql, &id, &patch, now)).await
    }

    async fn delete_rollout(&self, rollout_id: &str) -> Result<(), StoreError> {
        let id = rollout_id.to_owned();
        self.change(rollout_id, move |sql| rollouts::delete(sql, &id).and_then(|()| space::give_back(sql))).await?;
        self.bases.forget(rollout_id);
        Ok(())
    }

    async fn terminal(&self, after: u64, limit: usize) -> Result<TerminalPage, StoreError> {
        self.read(move |sql| rollouts::terminal(sql, after, limit)).await
    }

    async fn mark_consumed(&self, run_id: &str, step: u64, rollout_ids: Vec<String>) -> Result<u64, StoreError> {
        let mark = agl_core::rollout::Consumed { run_id: run_id.to_owned(), step };
        let (standings, marked) = (Arc::clone(&self.standings), rollout_ids.clone());
        let then = move || marked.iter().for_each(|rollout_id| standings.changed(rollout_id));
        self.write_then(move |sql| rollouts::mark_consumed(sql, &mark, &rollout_ids), then).await
    }

    async fn create_attempt(
        &self,
        rollout_id: &str,
        attempt_id: Option<String>,
        now: f64,
    ) -> Result<(AttemptDetail, bool), StoreError> {
        let id = rollout_id.to_owned();
        self.change(rollout_id, move |sql| attempts::create(sql, &id, attempt_id, now)).await
    }

    async fn attempt(&self, rollout_id: &str, attempt_id: &str) -> Result<Option<Attempt>, StoreError> {
        let (id, attempt_id) = (rollout_id.to_owned(), attempt_id.to_owned());
        self.read(move |sql| attempts::get(sql, &id, &attempt_id)).await
    }

    async fn standing(&self, rollout_id: &str, attempt_id: &str) -> Result<Option<Standing>, StoreError> {
        let moment = match self.standings.get(rollout_id, attempt_id) {
            Ok(standing) => return Ok(Some(standing)),
            Err(moment) => moment,
        };
        let (id, attempt) = (rollout_id.to_owned(), attempt_id.to_owned());
        let found = self.read(move |sql| standings::read(sql, &id, &attempt)).await?;
        Ok(found.map(|found| {
            self.standings.keep(&found, attempt_id, moment);
            found.standing
        }))
    }

    async fn attempts(&self, rollout_id: &str) -> Result<Vec<AttemptDetail>, StoreError> {
        let id = rollout_id.to_owned();
        self.read(move |sql| attempts::list(sql, &id)).await
    }

    async fn patch_attempt(
        &self,
        rollout_id: &str,
        attempt_id: &str,
        patch: AttemptPatch,
        now: f64,
    ) -> Result<AttemptDetail, StoreError> {
        let (id, attempt_id) = (rollout_id.to_owned(), attempt_id.to_owned());
        self.change(rollout_id, move |sql| attempts::patch(sql, &id, &attempt_id, &patch, now)).await
    }

    async fn append_event(
        &self,
        rollout_id: &str,
        attempt_id: &str,
        event: EventCreate,
        now: f64,
    ) -> Result<Event, StoreError> {
        let event = Event {
            event_type: event.event_type,
            rollout_id: rollout_id.to_owned(),
            attempt_id: attempt_id.to_owned(),
            timestamp: now,
            data: event.data,
        };
        self.write(move |sql| events::append(sql, event)).await
    }

    async fn events(
        &self,
        rollout_id: &str,
        attempt_id: &str,
        event_type: Option<&str>,
    ) -> Result<Vec<StoredEvent>, StoreError> {
        let (id, attempt_id, event_type) =
            (rollout_id.to_owned(), attempt_id.to_owned(), event_type.map(str::to_owned));
        self.read(move |sql| events::list(sql, &id, &attempt_id, event_type.as_deref())).await
    }

    async fn count_events(&self, rollout_id: &str) -> Result<u64, StoreError> {
        let id = rollout_id.to_owned();
        self.read(move |sql| events::count(sql, &id)).await
    }

    async fn attempts_with_events(&self, rollout_id: &str) -> Result<Vec<String>, StoreError> {
        let id = rollout_id.to_owned();
        self.read(move |sql| events::attempts(sql, &id)).await
    }

    async fn record_call(&self, call: CallRecord) -> Result<(), StoreError> {
        let rows = Bytes::from(rows::to_blob(&call.rows));
        let (packed, base) = pack(&call, self.bases.candidates(&call), rows.clone()).await?;
        let ready = calls::Ready::new(call, rows, packed, base)?;
        let (call, said) = self.write(move |sql| calls::record(sql, ready)).await?;
        self.bases.keep(&call.rollout_id, &call.attempt_id, said);
        Ok(())
    }

    async fn calls(&self, rollout_id: &str, attempt_id: &str, from: u64) -> Result<Vec<StoredCall>, StoreError> {
        let (id, attempt_id) = (rollout_id.to_owned(), attempt_id.to_owned());
        self.read(move |sql| calls::list(sql, &id, &attempt_id, from)).await
    }

    async fn settle(&self, settlements: Vec<Settlement>) -> Result<(), StoreError> {
        self.write(move |sql| settlements.iter().try_for_each(|settlement| calls::settle(sql, settlement))).await
    }

    async fn put_models(&self, models: Vec<RegisteredModel>) -> Result<(), StoreError> {
        self.write(move |sql| models.iter().try_for_each(|model| settings::put_model(sql, model))).await
    }

    async fn delete_models(&self, model: &str, endpoint: Option<&str>) -> Result<(), StoreError> {
        let (model, endpoint) = (model.to_owned(), endpoint.map(str::to_owned));
        self.write(move |sql| settings::delete_models(sql, &model, endpoint.as_deref())).await
    }

    async fn models(&self) -> Result<Vec<RegisteredModel>, StoreError> {
        self.read(settings::models).await
    }

    async fn put_pause(&self, before: Option<Pause>, after: Option<Pause>) -> Result<bool, StoreError> {
        self.write(move |sql| settings::put_pause(sql, before.as_ref(), after.as_ref())).await
    }

    async fn pause(&self) -> Result<Option<Pause>, StoreError> {
        self.read(settings::pause).await
    }

    async fn secret(&self, name: &'static str, fresh: [u8; 32]) -> Result<[u8; 32], StoreError> {
        self.write(move |sql| settings::secret(sql, name, fresh)).await
    }

    async fn stored_bytes(&self) -> Result<u64, StoreError> {
        self.read(space::in_use).await
    }

    async fn changes(&self, after: u64, limit: usize) -> Result<Vec<Change>, StoreError> {
        self.read(move |sql| rollouts::changes(sql, after, limit)).await
    }

    fn newest_change(&self) -> watch::Receiver<u64> {
        self.newest_change.clone()
    }

    async fn close(&self) {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.readers.close();
        let Some(Writer { jobs, thread }) = writer else { return };
        drop(jobs);
        // A writer that panicked has closed its connection already; its callers were told.
        let _ended = tokio::task::spawn_blocking(move || thread.join()).await;
    }
}

#[cfg(test)]
mod tests {
    use agl_core::rollout::RolloutCreate;
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn a_full_disk_is_an_error_and_loses_nothing_acknowledged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agl.db");
        let (lock, connection) = (lock_beside(&path).unwrap(), open_writer(&path).unwrap());
        // SQLite reports this limit exactly as it reports a file system without room.
        connection.pragma_update(None, "max_page_count", 120).unwrap();
        let store = SqliteStore::start(path.clone(), lock, connection).unwrap();
        let create: RolloutCreate = serde_json::from_value(json!({"input": {}})).unwrap();
        store.create_rollouts(vec![Rollout::new(create, "r".to_owned(), 1.0)]).await.unwrap();
        let mut acknowledged = 0;
        let refused = loop {
            let data = json!({"text": "x".repeat(20_000)}).as_object().cloned().unwrap();
            let event = EventCreate { event_type: "note".to_owned(), data };
            match store.append_event("r", "0", event, 2.0).await {
                Ok(_) => acknowledged += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(refused, StoreError::DiskFull { .. }), "{refused}");
        assert!(refused.to_string().contains("agl.db"));
        assert!(acknowledged > 3);
        assert_eq!(store.events("r", "0", None).await.unwrap().len(), acknowledged);
        store.close().await;
        let store = SqliteStore::open(&path).await.unwrap();
        assert_eq!(store.events("r", "0", None).await.unwrap().len(), acknowledged);
    }
}
