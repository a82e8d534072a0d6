//! Attempts, with what their model calls came to.

use agl_core::attempt::{Attempt, AttemptPatch};
use rusqlite::params;

use super::{Sql, from_json, rollouts, to_json};
use crate::StoreError;
use crate::memory::next_attempt_id;
use crate::record::{AttemptDetail, LastCall};

pub(super) fn create(
    sql: &Sql<'_>,
    rollout_id: &str,
    attempt_id: Option<String>,
    now: f64,
) -> Result<(AttemptDetail, bool), StoreError> {
    rollouts::must_exist(sql, rollout_id)?;
    if let Some(id) = &attempt_id
        && let Some(known) = get(sql, rollout_id, id)?
    {
        return Ok((detail(sql, known)?, false));
    }
    let attempt_id = match attempt_id {
        Some(id) => id,
        None => {
            let known = sql.all(
                "SELECT attempt_id FROM attempts WHERE rollout_id = ?1 AND body IS NOT NULL",
                [rollout_id],
                |row| row.get::<_, String>(0),
            )?;
            next_attempt_id(known.iter().map(String::as_str))
        }
    };
    let attempt = Attempt::new(rollout_id.to_owned(), attempt_id, now);
    sql.run(
        "INSERT INTO attempts (rollout_id, attempt_id, body, made)
         VALUES (?1, ?2, ?3, (SELECT coalesce(max(made), 0) + 1 FROM attempts WHERE rollout_id = ?1))
         ON CONFLICT DO UPDATE SET body = excluded.body, made = excluded.made",
        params![rollout_id, attempt.attempt_id, to_json(&attempt, rollout_id)?],
    )?;
    Ok((detail(sql, attempt)?, true))
}

pub(super) fn get(sql: &Sql<'_>, rollout_id: &str, attempt_id: &str) -> Result<Option<Attempt>, StoreError> {
    let body = sql.first(
        "SELECT body FROM attempts WHERE rollout_id = ?1 AND attempt_id = ?2",
        [rollout_id, attempt_id],
        |row| row.get::<_, Option<String>>(0),
    )?;
    body.flatten().map(|body| from_json(&body, rollout_id)).transpose()
}

pub(super) fn list(sql: &Sql<'_>, rollout_id: &str) -> Result<Vec<AttemptDetail>, StoreError> {
    rollouts::must_exist(sql, rollout_id)?;
    let bodies = "SELECT body FROM attempts WHERE rollout_id = ?1 AND body IS NOT NULL ORDER BY made";
    let bodies = sql.all(bodies, [rollout_id], |row| row.get::<_, String>(0))?;
    bodies.iter().map(|body| detail(sql, from_json(body, rollout_id)?)).collect()
}

pub(super) fn patch(
    sql: &Sql<'_>,
    rollout_id: &str,
    attempt_id: &str,
    patch: &AttemptPatch,
    now: f64,
) -> Result<AttemptDetail, StoreError> {
    rollouts::must_exist(sql, rollout_id)?;
    let mut attempt = get(sql, rollout_id, attempt_id)?.ok_or_else(|| StoreError::AttemptNotFound {
        rollout_id: rollout_id.to_owned(),
        attempt_id: attempt_id.to_owned(),
    })?;
    attempt.apply(patch, now)?;
    sql.run(
        "UPDATE attempts SET body = ?3 WHERE rollout_id = ?1 AND attempt_id = ?2",
        params![rollout_id, attempt_id, to_json(&attempt, rollout_id)?],
    )?;
    detail(sql, attempt)
}

/// Under which an attempt's events are kept, if there is anything of it.
pub(super) fn number(sql: &Sql<'_>, rollout_id: &str, attempt_id: &str) -> Result<Option<i64>, StoreError> {
    let statement = "SELECT number FROM attempts WHERE rollout_id = ?1 AND attempt_id = ?2";
    sql.first(statement, [rollout_id, attempt_id], |row| row.get(0))
}

/// The same for one of which nothing may be there yet. Attempts go with their rollout: where one is, the other is too.
pub(super) fn number_or_new(sql: &Sql<'_>, rollout_id: &str, attempt_id: &str) -> Result<i64, StoreError> {
    if let Some(number) = number(sql, rollout_id, attempt_id)? {
        return Ok(number);
    }
    rollouts::must_exist(sql, rollout_id)?;
    sql.insert("INSERT INTO attempts (rollout_id, attempt_id) VALUES (?1, ?2)", [rollout_id, attempt_id])
}

fn detail(sql: &Sql<'_>, attempt: Attempt) -> Result<AttemptDetail, StoreError> {
    let number = number(sql, &attempt.rollout_id, &attempt.attempt_id)?;
    let calls =
        sql.first("SELECT count(*) FROM events WHERE attempt = ?1 AND request IS NOT NULL", [number], |row| {
            row.get::<_, i64>(0)
        })?;
    let last_call = sql.first(
        "SELECT http_status, status FROM events WHERE attempt = ?1 AND request IS NOT NULL ORDER BY number DESC LIMIT 1",
        [number],
        |row| Ok(LastCall { http_status: row.get(0)?, status: row.get(1)? }),
    )?;
    Ok(AttemptDetail { attempt, calls: calls.unwrap_or(0).cast_unsigned(), last_call })
}
