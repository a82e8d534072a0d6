//! Moves what is committed from the write-ahead log into the file, beside the writer: done by the writer itself, which is SQLite's way,
//! it would hold up whoever waits for a commit for tens of milliseconds, several times a second under load.
//!
//! The log can begin anew only when all of it has been moved and nothing is added meanwhile. That last step is the writer's, and short,
//! because most of it has been done a moment before.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use super::failure;
use crate::StoreError;

/// How often it is looked whether there is something to move.
const EVERY: Duration = Duration::from_millis(100);
/// The log begins anew once it is as long as this, in pages.
const LONG_LOG: i64 = 2000;

/// See the [module](self). Held by the writer; its thread ends with it.
#[derive(Debug)]
pub(super) struct Checkpoints {
    shared: Arc<Shared>,
    end: Option<Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Something was committed.
    committed: AtomicBool,
    /// The log is long, and all but the newest of it has just been moved.
    almost_done: AtomicBool,
}

impl Checkpoints {
    pub(super) fn start(path: &Path) -> Result<Self, StoreError> {
        let failed = |error| failure(path, error);
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags).map_err(failed)?;
        connection.pragma_update(None, "synchronous", "FULL").map_err(failed)?;
        let shared = Arc::new(Shared::default());
        let (end, ended) = std::sync::mpsc::channel();
        let (work, file) = (Arc::clone(&shared), path.to_owned());
        let thread = std::thread::Builder::new()
            .name("agl-sqlite-checkpoints".to_owned())
            .spawn(move || run(&connection, &file, &work, &ended))
            .map_err(|error| StoreError::CannotOpen { path: path.to_owned(), reason: error.to_string() })?;
        Ok(Self { shared, end: Some(end), thread: Some(thread) })
    }

    /// To be called by the writer after each commit.
    pub(super) fn committed(&self, writer: &Connection, path: &Path) {
        self.shared.committed.store(true, Ordering::Relaxed);
        if self.shared.almost_done.swap(false, Ordering::Relaxed) {
            let _length = pages_in_log(writer, path);
        }
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // One that panicked has closed its connection already.
            let _ended = thread.join();
        }
    }
}

fn run(connection: &Connection, path: &Path, shared: &Shared, ended: &Receiver<()>) {
    while ended.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
        if shared.committed.swap(false, Ordering::Relaxed)
            && let Some(pages) = pages_in_log(connection, path)
        {
            shared.almost_done.store(pages > LONG_LOG, Ordering::Relaxed);
        }
    }
}

/// Moves what can be moved without waiting for anybody, and says how long the log is.
fn pages_in_log(connection: &Connection, path: &Path) -> Option<i64> {
    let moved = connection
        .prepare_cached("PRAGMA wal_checkpoint(PASSIVE)")
        .and_then(|mut statement| statement.query_row([], |row| row.get(1)));
    // Nothing is lost by it, and the next pass comes soon: a full disk is told by the writer.
    moved
        .inspect_err(
            |error| tracing::warn!(path = %path.display(), %error, "the write-ahead log stays as long as it is"),
        )
        .ok()
}
