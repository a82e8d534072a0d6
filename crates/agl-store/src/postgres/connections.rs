//! The connections to the server.
//!
//! Not sqlx's pool: that asks the server after every use whether the connection still lives, which would double the round trips
//! of a call, and it keeps a connection whose user was cancelled in the middle. Here a connection is kept only if its use has
//! ended well.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, PgConnection};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Fault;
use crate::StoreError;

/// A gateway waits for the server's disk on more than a few at a time, so that commits share its flushes; a server of the usual
/// settings has room for four gateways.
const CONNECTIONS: usize = 20;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Connections {
    options: PgConnectOptions,
    idle: Arc<Mutex<Vec<PgConnection>>>,
    permits: Arc<Semaphore>,
    closed: AtomicBool,
}

/// A connection in use. Dropping it closes it.
#[derive(Debug)]
pub(super) struct Used {
    connection: PgConnection,
    idle: Arc<Mutex<Vec<PgConnection>>>,
    _permit: OwnedSemaphorePermit,
}

impl Connections {
    pub(super) fn new(options: PgConnectOptions) -> Self {
        let permits = Arc::new(Semaphore::new(CONNECTIONS));
        Self { options, idle: Arc::default(), permits, closed: AtomicBool::new(false) }
    }

    /// One that is idle, the one used last first, or a new one.
    pub(super) async fn take(&self) -> Result<Used, Fault> {
        let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(|_| StoreError::Closed)?;
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let connection = match idle {
            Some(connection) => connection,
            None => self.options.connect().await?,
        };
        Ok(Used { connection, idle: Arc::clone(&self.idle), _permit: permit })
    }

    /// Drops what is idle: the server was lost, and all its connections with it.
    pub(super) fn forget_idle(&self) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Waits for those in use, and gives none any more.
    pub(super) async fn close(&self) {
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        // Everything accepted so far ends first.
        let _all = self.permits.acquire_many(u32::try_from(CONNECTIONS).unwrap_or(u32::MAX)).await;
        self.permits.close();
        self.forget_idle();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }
}

impl Used {
    pub(super) fn sql(&mut self) -> &mut PgConnection {
        &mut self.connection
    }

    /// Its use has ended well: the next may have it.
    pub(super) fn give_back(self) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(self.connection);
    }
}
