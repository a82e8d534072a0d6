//! The tables, and which database files this build accepts.

use std::path::Path;

use rusqlite::Connection;

use super::failure;
use crate::StoreError;

/// Written to `PRAGMA user_version`. Raise it with every change of [`TABLES`].
pub(super) const VERSION: i64 = 4;

const TABLES: &str = "
CREATE TABLE rollouts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout_id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,
    run_id TEXT,
    body TEXT NOT NULL
) STRICT;
CREATE INDEX rollouts_by_state ON rollouts (state, number);
CREATE INDEX rollouts_by_run ON rollouts (run_id, number) WHERE run_id IS NOT NULL;

-- Its numbers are the cursor of GET /api/rollouts/terminal; none is used twice, also not that of a rollout that was deleted.
CREATE TABLE terminal_order (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout_id TEXT NOT NULL,
    state TEXT NOT NULL,
    data_id TEXT NOT NULL,
    is_train INTEGER NOT NULL
) STRICT;

CREATE TABLE changes (
    cursor INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    rollout_id TEXT NOT NULL
) STRICT;

-- Without a body where calls or events came for an attempt that nobody has made.
CREATE TABLE attempts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout_id TEXT NOT NULL,
    attempt_id TEXT NOT NULL,
    -- In the order in which the rollout's attempts were made.
    made INTEGER,
    body TEXT,
    UNIQUE (rollout_id, attempt_id)
) STRICT;

-- The log of each attempt (attempts.number). A model call is one row with everything of it: what it adds to the attempt's tree as
-- agl_store::rows writes it, and its bodies, agl_store::Body, which may stand behind those of the older call `base` of the same attempt.
CREATE TABLE events (
    number INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL,
    event_type TEXT NOT NULL,
    timestamp REAL NOT NULL,
    data TEXT NOT NULL,
    http_status INTEGER,
    status TEXT,
    digest BLOB,
    -- The highest number among its rows.
    seq INTEGER,
    rows BLOB,
    base INTEGER,
    request BLOB,
    response BLOB
) STRICT;
CREATE INDEX events_by_attempt ON events (attempt, number);

-- What became of answers after they were recorded.
CREATE TABLE deliveries (
    attempt INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    delivery TEXT NOT NULL,
    PRIMARY KEY (attempt, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE models (
    model TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (model, endpoint)
) STRICT;

-- The pause, and the secret that attempt keys are derived from.
CREATE TABLE settings (
    name TEXT PRIMARY KEY,
    value BLOB NOT NULL
) STRICT;
";

/// What a deletion looks for. Beside the tables, and made where it is missing: a file with and one without it hold the same.
const INDEXES: &str = "
CREATE INDEX IF NOT EXISTS terminal_order_by_rollout ON terminal_order (rollout_id);
CREATE INDEX IF NOT EXISTS changes_by_rollout ON changes (rollout_id);
CREATE INDEX IF NOT EXISTS changes_of_deletions ON changes (cursor) WHERE kind = 'deleted';
";

/// Makes the tables in an empty file, or refuses a file that is not ours or of another version.
pub(super) fn prepare(connection: &mut Connection, path: &Path) -> Result<(), StoreError> {
    make_tables(connection, path)?;
    connection.execute_batch(INDEXES).map_err(|error| failure(path, error))
}

fn make_tables(connection: &mut Connection, path: &Path) -> Result<(), StoreError> {
    let failed = |error| failure(path, error);
    let found: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(failed)?;
    if found == VERSION {
        return Ok(());
    }
    if found != 0 {
        return Err(StoreError::DatabaseVersion { database: path.display().to_string(), found, supported: VERSION });
    }
    let tables: i64 =
        connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0)).map_err(failed)?;
    if tables != 0 {
        return Err(StoreError::NotOurs {
            database: path.display().to_string(),
            reason: "it holds tables of something else".to_owned(),
        });
    }
    // Only a file without tables can be told so. See `space`.
    connection.pragma_update(None, "auto_vacuum", "INCREMENTAL").map_err(failed)?;
    let transaction = connection.transaction().map_err(failed)?;
    transaction.execute_batch(TABLES).map_err(failed)?;
    transaction.pragma_update(None, "user_version", VERSION).map_err(failed)?;
    transaction.commit().map_err(failed)
}
