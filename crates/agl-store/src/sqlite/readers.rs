//! Connections for reading, used on blocking threads.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};
use tokio::sync::Semaphore;

use super::{Sql, failure};
use crate::StoreError;

/// More than this would only wait for the same disk.
const CONNECTIONS: usize = 4;

/// A small pool. A connection is opened when it is first needed and kept.
#[derive(Debug)]
pub(super) struct Readers {
    shared: Arc<Shared>,
    permits: Arc<Semaphore>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    idle: Mutex<Vec<Connection>>,
    closed: AtomicBool,
}

impl Readers {
    pub(super) fn new(path: PathBuf) -> Self {
        let shared = Shared { path, idle: Mutex::new(Vec::new()), closed: AtomicBool::new(false) };
        Self { shared: Arc::new(shared), permits: Arc::new(Semaphore::new(CONNECTIONS)) }
    }

    /// Runs the query on a blocking thread, on a connection that sees every write acknowledged before the call.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Sql<'_>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(|_| StoreError::Closed)?;
        let shared = Arc::clone(&self.shared);
        let ran = tokio::task::spawn_blocking(move || {
            let connection = shared.take()?;
            let result = query(&Sql { connection: &connection, path: &shared.path });
            shared.give_back(connection);
            drop(permit);
            result
        });
        ran.await.unwrap_or(Err(StoreError::Closed))
    }

    pub(super) fn close(&self) {
        self.permits.close();
        self.shared.closed.store(true, Ordering::SeqCst);
        self.shared.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl Shared {
    fn take(&self) -> Result<Connection, StoreError> {
        if let Some(connection) = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            return Ok(connection);
        }
        let failed = |error| failure(&self.path, error);
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&self.path, flags).map_err(failed)?;
        connection.busy_timeout(Duration::from_secs(10)).map_err(failed)?;
        connection.set_prepared_statement_cache_capacity(32);
        Ok(connection)
    }

    fn give_back(&self, connection: Connection) {
        if !self.closed.load(Ordering::SeqCst) {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        }
    }
}
