//! The one thread that writes. Jobs that are waiting are committed together, so that the price of `fsync` is shared; each
//! caller hears of its job only after the commit.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender};

use rusqlite::{Connection, TransactionBehavior};
use tokio::sync::{oneshot, watch};

use super::checkpoints::Checkpoints;
use super::failure;
use crate::StoreError;

/// How many jobs one transaction takes at most.
const GROUP: usize = 256;

/// Sends jobs; the thread ends once every sender is gone and what was sent is done.
pub(super) type JobSender = Sender<Box<dyn Job>>;

/// A change to make inside the current transaction, and somebody who waits for it.
pub(super) trait Job: Send {
    /// Makes the change. An error after something was written takes back the whole transaction.
    fn run(&mut self, connection: &Connection) -> Result<(), StoreError>;
    /// Tells the caller, once the fate of the transaction is known.
    fn tell(self: Box<Self>, committed: Result<(), StoreError>);
}

struct Waiting<T, F, D> {
    change: Option<F>,
    then: D,
    result: Result<T, StoreError>,
    answer: oneshot::Sender<Result<T, StoreError>>,
}

/// A job and where its outcome arrives. `then` is done before that, once the fate of the change is known.
pub(super) fn job<T: Send + 'static>(
    change: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    then: impl FnOnce() + Send + 'static,
) -> (Box<dyn Job>, oneshot::Receiver<Result<T, StoreError>>) {
    let (answer, outcome) = oneshot::channel();
    (Box::new(Waiting { change: Some(change), then, result: Err(StoreError::Closed), answer }), outcome)
}

impl<T, F, D> Job for Waiting<T, F, D>
where
    T: Send,
    F: FnOnce(&Connection) -> Result<T, StoreError> + Send,
    D: FnOnce() + Send,
{
    fn run(&mut self, connection: &Connection) -> Result<(), StoreError> {
        if let Some(change) = self.change.take() {
            self.result = change(connection);
        }
        self.result.as_ref().map(|_| ()).map_err(Clone::clone)
    }

    fn tell(self: Box<Self>, committed: Result<(), StoreError>) {
        (self.then)();
        // The caller may be gone: what it asked for is done all the same.
        let _gone = self.answer.send(committed.and(self.result));
    }
}

/// Runs until all senders are gone. Owns the connection, so that it is closed when the last job is done.
pub(super) fn run(
    mut connection: Connection,
    path: &Path,
    jobs: &Receiver<Box<dyn Job>>,
    newest_change: &watch::Sender<u64>,
    checkpoints: Checkpoints,
) {
    while let Ok(first) = jobs.recv() {
        let mut group: Vec<_> = std::iter::once(first).chain(jobs.try_iter().take(GROUP - 1)).collect();
        let committed = commit_together(&mut connection, path, &mut group);
        if let Ok(Some(newest)) = committed {
            newest_change.send_if_modified(|cursor| std::mem::replace(cursor, newest) != newest);
        }
        let committed = committed.map(|_| ());
        for job in group {
            job.tell(committed.clone());
        }
        checkpoints.committed(&connection, path);
    }
    // Whoever closes last tidies the log away: that is to be this connection.
    drop(checkpoints);
    if let Err((_, error)) = connection.close() {
        tracing::warn!(path = %path.display(), %error, "the database did not close cleanly");
    }
}

/// Runs the jobs in one transaction and gives the newest entry of the change log. An error means that none of them was made.
///
/// A job looks before it writes: one that is refused has written nothing, and concerns its caller alone. One that fails after it has
/// written has met a full disk or a damaged file, and nothing of its group is kept. (A savepoint for each job would part them in that
/// case too, and costs SQLite a copy of every page that a job touches.)
fn commit_together(
    connection: &mut Connection,
    path: &Path,
    group: &mut [Box<dyn Job>],
) -> Result<Option<u64>, StoreError> {
    let failed = |error| failure(path, error);
    // Immediate: one that begins by reading is not waited for when it wants to write while another process holds the lock.
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    for job in group {
        let before = transaction.total_changes();
        let outcome = job.run(&transaction);
        // A full disk or an I/O error may make SQLite take back the whole transaction by itself.
        if transaction.is_autocommit() {
            return outcome.and(Err(StoreError::DiskFull { database: path.display().to_string() }));
        }
        if outcome.is_err() && transaction.total_changes() != before {
            return outcome.map(|()| None);
        }
    }
    // Here it costs no locks of its own.
    let newest = newest_change(&transaction);
    transaction.commit().map_err(failed)?;
    Ok(newest)
}

fn newest_change(connection: &Connection) -> Option<u64> {
    let mut statement = connection.prepare_cached("SELECT coalesce(max(cursor), 0) FROM changes").ok()?;
    statement.query_row([], |row| row.get::<_, i64>(0)).ok().map(i64::cast_unsigned)
}
