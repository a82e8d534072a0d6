//! Attempts, with what their model calls came to.

use agl_core::attempt::{Attempt, AttemptPatch};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

use super::{Fault, from_json, rollouts, to_json};
use crate::StoreError;
use crate::memory::next_attempt_id;
use crate::record::{AttemptDetail, LastCall};

pub(super) async fn create(
    sql: &mut PgConnection,
    rollout_id: &str,
    attempt_id: Option<&str>,
    now: f64,
) -> Result<(AttemptDetail, bool), Fault> {
    // One at a time: the next free number is free for one of them only.
    let rollout = sqlx::query("SELECT 1 FROM rollouts WHERE rollout_id = $1 FOR NO KEY UPDATE").bind(rollout_id);
    if rollout.fetch_optional(&mut *sql).await?.is_none() {
        return Err(StoreError::RolloutNotFound(rollout_id.to_owned()).into());
    }
    if let Some(id) = attempt_id
        && let Some(known) = details(sql, rollout_id, Some(id)).await?.pop()
    {
        return Ok((known, false));
    }
    let attempt_id = match attempt_id {
        Some(id) => id.to_owned(),
        None => {
            let known = sqlx::query_scalar::<_, String>("SELECT attempt_id FROM attempts WHERE rollout_id = $1");
            let known = known.bind(rollout_id).fetch_all(&mut *sql).await?;
            next_attempt_id(known.iter().map(String::as_str))
        }
    };
    let attempt = Attempt::new(rollout_id.to_owned(), attempt_id, now);
    let insert = sqlx::query("INSERT INTO attempts (rollout_id, attempt_id, body) VALUES ($1, $2, $3)");
    let body = to_json(&attempt, rollout_id)?;
    insert.bind(rollout_id).bind(&attempt.attempt_id).bind(body).execute(&mut *sql).await?;
    Ok((detail(sql, attempt).await?, true))
}

pub(super) async fn get(sql: &mut PgConnection, rollout_id: &str, attempt_id: &str) -> Result<Option<Attempt>, Fault> {
    let body = sqlx::query_scalar::<_, String>("SELECT body FROM attempts WHERE rollout_id = $1 AND attempt_id = $2");
    let body = body.bind(rollout_id).bind(attempt_id).fetch_optional(sql).await?;
    Ok(body.map(|body| from_json(&body, rollout_id)).transpose()?)
}

pub(super) async fn list(sql: &mut PgConnection, rollout_id: &str) -> Result<Vec<AttemptDetail>, Fault> {
    rollouts::must_exist(sql, rollout_id).await?;
    details(sql, rollout_id, None).await
}

pub(super) async fn patch(
    sql: &mut PgConnection,
    rollout_id: &str,
    attempt_id: &str,
    patch: &AttemptPatch,
    now: f64,
) -> Result<AttemptDetail, Fault> {
    rollouts::must_stay(sql, rollout_id).await?;
    let body = sqlx::query_scalar::<_, String>(
        "SELECT body FROM attempts WHERE rollout_id = $1 AND attempt_id = $2 FOR UPDATE",
    );
    let body = body.bind(rollout_id).bind(attempt_id).fetch_optional(&mut *sql).await?;
    let body = body.ok_or_else(|| StoreError::AttemptNotFound {
        rollout_id: rollout_id.to_owned(),
        attempt_id: attempt_id.to_owned(),
    })?;
    let mut attempt: Attempt = from_json(&body, rollout_id)?;
    attempt.apply(patch, now).map_err(StoreError::from)?;
    let update = sqlx::query("UPDATE attempts SET body = $3 WHERE rollout_id = $1 AND attempt_id = $2");
    update.bind(rollout_id).bind(attempt_id).bind(to_json(&attempt, rollout_id)?).execute(&mut *sql).await?;
    detail(sql, attempt).await
}

/// An attempt that is not stored as it is here, or was a moment ago.
async fn detail(sql: &mut PgConnection, attempt: Attempt) -> Result<AttemptDetail, Fault> {
    let stored = details(sql, &attempt.rollout_id, Some(&attempt.attempt_id)).await?.pop();
    let (calls, last_call) = stored.map_or((0, None), |detail| (detail.calls, detail.last_call));
    Ok(AttemptDetail { attempt, calls, last_call })
}

/// One attempt of the rollout or all, oldest first.
async fn details(
    sql: &mut PgConnection,
    rollout_id: &str,
    attempt_id: Option<&str>,
) -> Result<Vec<AttemptDetail>, Fault> {
    let rows = sqlx::query(
        "SELECT a.body, counted.calls, latest.http_status, latest.status
         FROM attempts a
         CROSS JOIN LATERAL (SELECT count(*) AS calls FROM events e
             WHERE e.rollout_id = a.rollout_id AND e.attempt_id = a.attempt_id AND e.request IS NOT NULL) counted
         LEFT JOIN LATERAL (SELECT e.http_status, e.status FROM events e
             WHERE e.rollout_id = a.rollout_id AND e.attempt_id = a.attempt_id AND e.request IS NOT NULL
             ORDER BY e.number DESC LIMIT 1) latest ON true
         WHERE a.rollout_id = $1 AND ($2::text IS NULL OR a.attempt_id = $2)
         ORDER BY a.number",
    );
    let rows = rows.bind(rollout_id).bind(attempt_id).fetch_all(sql).await?;
    rows.iter().map(|row| read(row, rollout_id)).collect()
}

fn read(row: &PgRow, rollout_id: &str) -> Result<AttemptDetail, Fault> {
    let http_status = row.try_get::<Option<i64>, _>(2)?.map(|status| u16::try_from(status).unwrap_or_default());
    let status: Option<String> = row.try_get(3)?;
    Ok(AttemptDetail {
        attempt: from_json(row.try_get(0)?, rollout_id)?,
        calls: row.try_get::<i64, _>(1)?.cast_unsigned(),
        last_call: http_status.zip(status).map(|(http_status, status)| LastCall { http_status, status }),
    })
}
