//! The tables, which databases this build accepts, and which servers.

use sqlx::{Connection, Executor, PgConnection, Row};

use super::Fault;
use crate::StoreError;

/// Written to `about.version`. Raise it with every change of [`TABLES`].
pub(super) const VERSION: i64 = 2;

/// Gateways that start at once make the tables one after the other: `agl` in bytes.
const PREPARING: i64 = 0x61_67_6c;

/// Everything stands in a schema of its own, so that the database may hold other things too.
const TABLES: &str = "
CREATE SCHEMA IF NOT EXISTS agl;
CREATE TABLE agl.about (version BIGINT NOT NULL);

-- The last number of each kind that was given out. Whoever changes rollouts holds this row until it commits, so that numbers
-- become visible in their order, also with several gateways.
CREATE TABLE agl.heads (
    only_row BOOLEAN PRIMARY KEY DEFAULT true CHECK (only_row),
    rollout BIGINT NOT NULL DEFAULT 0,
    terminal BIGINT NOT NULL DEFAULT 0,
    change BIGINT NOT NULL DEFAULT 0
);
INSERT INTO agl.heads DEFAULT VALUES;

CREATE TABLE agl.rollouts (
    number BIGINT PRIMARY KEY,
    rollout_id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,
    run_id TEXT,
    body TEXT NOT NULL
);
CREATE INDEX rollouts_by_state ON agl.rollouts (state, number);
CREATE INDEX rollouts_by_run ON agl.rollouts (run_id, number) WHERE run_id IS NOT NULL;

-- Keeps its rows when the rollout is deleted: its numbers are the cursor of GET /api/rollouts/terminal.
CREATE TABLE agl.terminal_order (
    number BIGINT PRIMARY KEY,
    rollout_id TEXT NOT NULL,
    state TEXT NOT NULL,
    data_id TEXT NOT NULL,
    is_train BOOLEAN NOT NULL
);

CREATE TABLE agl.changes (
    cursor BIGINT PRIMARY KEY,
    kind TEXT NOT NULL,
    rollout_id TEXT NOT NULL
);

CREATE TABLE agl.attempts (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rollout_id TEXT NOT NULL,
    attempt_id TEXT NOT NULL,
    body TEXT NOT NULL,
    UNIQUE (rollout_id, attempt_id)
);

-- Bodies of model calls, zstd, compressed behind the older body `base`. Named by events.request and events.response; deleted with
-- their rollout, and so are their bases. Numbers are never used again: a base stays the one it was.
CREATE TABLE agl.blobs (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    body BYTEA NOT NULL,
    base BIGINT
);
-- They are compressed already.
ALTER TABLE agl.blobs ALTER COLUMN body SET STORAGE EXTERNAL;

CREATE TABLE agl.events (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rollout_id TEXT NOT NULL,
    attempt_id TEXT NOT NULL,
    event_type TEXT NOT NULL,
    timestamp DOUBLE PRECISION NOT NULL,
    data TEXT NOT NULL,
    request BIGINT,
    response BIGINT,
    http_status BIGINT,
    status TEXT
);
CREATE INDEX events_by_attempt ON agl.events (rollout_id, attempt_id, number);

-- One row per sampled answer: agl_core::trajectory::CallRow. Ids are LEB128, log-probs little-endian f32. `writer` is the
-- gateway that knows what became of the answer until it is settled.
CREATE TABLE agl.calls (
    rollout_id TEXT NOT NULL,
    attempt_id TEXT NOT NULL,
    seq BIGINT NOT NULL,
    call_id TEXT NOT NULL,
    choice BIGINT NOT NULL,
    parent BIGINT,
    shared_prefix BIGINT NOT NULL,
    inserted BYTEA NOT NULL,
    sampled BYTEA NOT NULL,
    log_probs BYTEA,
    versions BYTEA NOT NULL,
    delivery TEXT NOT NULL,
    outcome TEXT NOT NULL,
    trainable BOOLEAN NOT NULL,
    request_digest BYTEA NOT NULL,
    settled BOOLEAN NOT NULL,
    writer BIGINT NOT NULL,
    PRIMARY KEY (rollout_id, attempt_id, seq)
);

CREATE TABLE agl.models (
    model TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (model, endpoint)
);

-- The secret that attempt keys are derived from.
CREATE TABLE agl.secrets (
    name TEXT PRIMARY KEY,
    value BYTEA NOT NULL
);

-- What all gateways must know before it counts: the pause here, and the models. `epoch` rises with every change of either.
CREATE TABLE agl.agreement (
    only_row BOOLEAN PRIMARY KEY DEFAULT true CHECK (only_row),
    epoch BIGINT NOT NULL DEFAULT 0,
    pause TEXT
);
INSERT INTO agl.agreement DEFAULT VALUES;

-- The gateways on this database, as they last checked in. `epoch` is the agreement that a gateway keeps.
CREATE SEQUENCE agl.gateway_numbers;
CREATE TABLE agl.gateways (
    number BIGINT PRIMARY KEY,
    started_at TIMESTAMPTZ NOT NULL,
    seen_at TIMESTAMPTZ NOT NULL,
    left_at TIMESTAMPTZ,
    inflight BIGINT NOT NULL,
    held BIGINT NOT NULL,
    epoch BIGINT NOT NULL
);
";

/// Makes the tables in a database that has none of ours, or refuses one of another version, and a server that would lose what
/// was acknowledged.
pub(super) async fn prepare(sql: &mut PgConnection, database: &str) -> Result<(), Fault> {
    let settings = sqlx::query("SELECT current_setting('fsync'), current_setting('full_page_writes')");
    let settings = settings.fetch_one(&mut *sql).await?;
    check_server(settings.try_get(0)?, settings.try_get(1)?, database)?;

    let mut transaction = sql.begin().await?;
    sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(PREPARING).execute(&mut *transaction).await?;
    let ours: bool =
        sqlx::query_scalar("SELECT to_regclass('agl.about') IS NOT NULL").fetch_one(&mut *transaction).await?;
    if ours {
        let found = sqlx::query_scalar("SELECT version FROM agl.about").fetch_one(&mut *transaction).await?;
        transaction.rollback().await?;
        if found != VERSION {
            return Err(StoreError::DatabaseVersion { database: database.to_owned(), found, supported: VERSION }.into());
        }
        return Ok(());
    }
    let theirs: bool = sqlx::query_scalar(
        "SELECT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'agl')",
    )
    .fetch_one(&mut *transaction)
    .await?;
    if theirs {
        let reason = "its schema `agl` holds tables of something else".to_owned();
        return Err(StoreError::NotOurs { database: database.to_owned(), reason }.into());
    }
    transaction.execute(TABLES).await?;
    sqlx::query("INSERT INTO agl.about VALUES ($1)").bind(VERSION).execute(&mut *transaction).await?;
    transaction.commit().await?;
    Ok(())
}

/// What the tables take, room that deletions have left and that is not used again yet included.
pub(super) async fn stored_bytes(sql: &mut PgConnection) -> Result<u64, Fault> {
    let bytes = sqlx::query_scalar::<_, i64>(
        "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint
         FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'agl' AND c.relkind = 'r'",
    );
    Ok(bytes.fetch_one(sql).await?.max(0).cast_unsigned())
}

/// A commit that is not on disk, or a page that may be torn, would break what a resolved write promises.
fn check_server(fsync: &str, full_page_writes: &str, database: &str) -> Result<(), StoreError> {
    let unsafe_setting =
        [("fsync", fsync), ("full_page_writes", full_page_writes)].into_iter().find(|(_, is)| *is != "on");
    match unsafe_setting {
        Some((setting, _)) => Err(StoreError::UnsafeServer { database: database.to_owned(), setting }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_does_not_write_through_is_refused_by_the_name_of_its_setting() {
        assert!(check_server("on", "on", "d").is_ok());
        let refused = check_server("off", "on", "postgres://u@h/d").unwrap_err().to_string();
        assert!(refused.contains("fsync = off") && refused.contains("postgres://u@h/d"), "{refused}");
        assert!(check_server("on", "off", "d").unwrap_err().to_string().contains("full_page_writes"));
    }
}
