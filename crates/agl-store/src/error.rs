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
    /// The file was written by another version of agl.
    #[error(
        "{path} holds a database of version {found}, and this agl reads version {supported}. Use the agl that wrote it, or \
         name another file (the old one stays untouched)"
    )]
    DatabaseVersion {
        /// The database file.
        path: PathBuf,
        /// What the file says.
        found: i64,
        /// What this build reads.
        supported: i64,
    },
    /// The file is a SQLite database of something else, or no SQLite database at all.
    #[error("{path} is not an agl database: {reason}. Name another file, or move this one away")]
    NotOurs {
        /// The file.
        path: PathBuf,
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
    #[error("no room left for the database {path}. Nothing acknowledged is lost; free space on its disk and try again")]
    DiskFull {
        /// The database file.
        path: PathBuf,
    },
    /// Anything else that SQLite reports.
    #[error("the database {path} failed: {source}")]
    Database {
        /// The database file.
        path: PathBuf,
        /// SQLite's own error.
        source: Arc<rusqlite::Error>,
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
