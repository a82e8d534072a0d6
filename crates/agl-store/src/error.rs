//! What can go wrong between the gateway and its database, written for the person who must act.

use std::path::PathBuf;
use std::sync::Arc;

use agl_core::rollout::IllegalTransition;

/// Why a store could not do what it was asked. Nothing was changed, unless the variant says otherwise.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// No rollout of that id.
    #[error("Rollout not found: {0}")]
    RolloutNotFound(String),
    /// The rollout has no attempt object of that id.
    #[error("Attempt not found: {attempt_id} of rollout {rollout_id}")]
    AttemptNotFound {
        /// The rollout, which exists.
        rollout_id: String,
        /// The attempt, which does not.
        attempt_id: String,
    },
    /// The state machine of rollouts or attempts refused.
    #[error(transparent)]
    Illegal(#[from] IllegalTransition),
    /// The database was written by another version of agl.
    #[error(
        "{database} holds a database of version {found}, and this agl reads version {supported}. Use the agl that wrote it, \
         or name another one (the old one stays untouched)"
    )]
    DatabaseVersion {
        /// The file, or the URL without its password.
        database: String,
        /// What it says.
        found: i64,
        /// What this build reads.
        supported: i64,
    },
    /// The database is one of something else, or the file no database at all.
    #[error("{database} is not an agl database: {reason}. Name another one, or move this one away")]
    NotOurs {
        /// The file, or the URL without its password.
        database: String,
        /// What was found instead.
        reason: String,
    },
    /// Another process has the database open.
    #[error("{path} is open in another gateway. Stop that one first, or name another file")]
    InUse {
        /// The database file.
        path: PathBuf,
    },
    /// The file or its folder cannot be opened.
    #[error("cannot open the database {path}: {reason}. Check that its folder exists and is writable")]
    CannotOpen {
        /// The database file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// No room. What was acknowledged before is safe; this write was not made.
    #[error(
        "no room left for the database {database}. Nothing acknowledged is lost; free space on its disk and try again"
    )]
    DiskFull {
        /// The file, or the URL without its password.
        database: String,
    },
    /// Anything else that SQLite reports.
    #[error("the database {path} failed: {source}")]
    Database {
        /// The database file.
        path: PathBuf,
        /// SQLite's own error.
        source: Arc<rusqlite::Error>,
    },
    /// The URL does not name a Postgres database.
    #[error(
        "the store's URL cannot be used: {reason}. Write postgres://USER@HOST:PORT/DATABASE; the password may stand in \
         PGPASSWORD or ~/.pgpass"
    )]
    BadUrl {
        /// What is wrong with it. The URL itself may hold a password.
        reason: String,
    },
    /// The server of the database is away; nothing was written. What was acknowledged before is safe.
    #[error(
        "the database {database} cannot be reached: {reason}. Nothing acknowledged is lost. Check that the server runs and \
         that the URL names its host and port"
    )]
    Unreachable {
        /// The URL without its password.
        database: String,
        /// What the system or the server said.
        reason: String,
    },
    /// The server went away in the middle of a write. What was acknowledged before is safe.
    #[error(
        "the database {database} cannot be reached any more: {reason}. Whether this write was made is not known: look before \
         it is made again"
    )]
    OutcomeUnknown {
        /// The URL without its password.
        database: String,
        /// What the system or the server said.
        reason: String,
    },
    /// The server runs with a setting under which it may lose what it has committed.
    #[error(
        "the server of {database} runs with {setting} = off: a crash would lose what was acknowledged. Set {setting} = on"
    )]
    UnsafeServer {
        /// The URL without its password.
        database: String,
        /// The setting.
        setting: &'static str,
    },
    /// Anything else that a Postgres server reports.
    #[error("the database {database} failed: {reason}")]
    Server {
        /// The URL without its password.
        database: String,
        /// The server's own words.
        reason: String,
    },
    /// What the call builds on is not what is stored: another gateway has recorded a call of this attempt meanwhile. Read the
    /// rows anew and record it again.
    #[error(
        "another gateway has recorded a call of attempt {attempt_id} of rollout {rollout_id} meanwhile: nothing was written"
    )]
    Raced {
        /// Whose.
        rollout_id: String,
        /// Which attempt's.
        attempt_id: String,
    },
    /// A stored value cannot be read back.
    #[error("the store holds an unreadable {what}: {reason}. Restore the database from a copy, or delete this rollout")]
    Corrupt {
        /// Which value of which rollout.
        what: String,
        /// Why it cannot be read.
        reason: String,
    },
    /// The store has been closed.
    #[error("the store is closed")]
    Closed,
}
