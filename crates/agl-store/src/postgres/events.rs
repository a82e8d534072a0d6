//! The append-only log of an attempt.

use std::collections::HashMap;
use std::sync::Arc;

use agl_core::event::Event;
use bytes::Bytes;
use sqlx::{PgConnection, Row};

use super::{Fault, corrupt, from_json, rollouts, to_json};
use crate::record::StoredEvent;
use crate::{Body, StoreError};

pub(super) async fn append(sql: &mut PgConnection, event: &Event) -> Result<(), Fault> {
    let insert = sqlx::query(
        "INSERT INTO events (rollout_id, attempt_id, event_type, timestamp, data)
         SELECT rollout_id, $2, $3, $4, $5 FROM rollouts WHERE rollout_id = $1 FOR KEY SHARE",
    );
    let insert = insert.bind(&event.rollout_id).bind(&event.attempt_id).bind(&event.event_type).bind(event.timestamp);
    let made = insert.bind(to_json(&event.data, &event.rollout_id)?).execute(sql).await?;
    if made.rows_affected() == 0 {
        return Err(StoreError::RolloutNotFound(event.rollout_id.clone()).into());
    }
    Ok(())
}

pub(super) async fn list(
    sql: &mut PgConnection,
    rollout_id: &str,
    attempt_id: &str,
    event_type: Option<&str>,
) -> Result<Vec<StoredEvent>, Fault> {
    rollouts::must_exist(sql, rollout_id).await?;
    let rows = sqlx::query(
        "SELECT event_type, timestamp, data, request, response FROM events
         WHERE rollout_id = $1 AND attempt_id = $2 AND ($3::text IS NULL OR event_type = $3) ORDER BY number",
    );
    let rows = rows.bind(rollout_id).bind(attempt_id).bind(event_type).fetch_all(&mut *sql).await?;
    let mut named = Vec::new();
    for row in &rows {
        named.extend([row.try_get::<Option<i64>, _>(3)?, row.try_get(4)?].into_iter().flatten());
    }
    let bodies = bodies(sql, &named, rollout_id).await?;
    let body = |number: Option<i64>| -> Result<Option<Body>, StoreError> {
        let Some(number) = number else { return Ok(None) };
        let body = bodies.get(&number).ok_or_else(|| corrupt(rollout_id, format!("body {number} is missing")))?;
        Ok(Some((**body).clone()))
    };
    let mut events = Vec::with_capacity(rows.len());
    for row in rows {
        let event = Event {
            event_type: row.try_get(0)?,
            rollout_id: rollout_id.to_owned(),
            attempt_id: attempt_id.to_owned(),
            timestamp: row.try_get(1)?,
            data: from_json(row.try_get(2)?, rollout_id)?,
        };
        events.push(StoredEvent { event, request: body(row.try_get(3)?)?, response: body(row.try_get(4)?)? });
    }
    Ok(events)
}

/// These bodies and those that they stand behind.
async fn bodies(sql: &mut PgConnection, numbers: &[i64], rollout_id: &str) -> Result<HashMap<i64, Arc<Body>>, Fault> {
    if numbers.is_empty() {
        return Ok(HashMap::new());
    }
    // A body stands behind an older one: read from the oldest on, each finds its own.
    let rows = sqlx::query(
        "WITH RECURSIVE needed (number, base) AS (
             SELECT number, base FROM blobs WHERE number = ANY($1)
             UNION SELECT b.number, b.base FROM needed n JOIN blobs b ON b.number = n.base)
         SELECT b.number, b.body, b.base FROM needed JOIN blobs b USING (number) ORDER BY b.number",
    );
    let mut bodies: HashMap<i64, Arc<Body>> = HashMap::new();
    for row in rows.bind(numbers).fetch_all(sql).await? {
        let number: i64 = row.try_get(0)?;
        let base = match row.try_get::<Option<i64>, _>(2)? {
            Some(base) => {
                let found = bodies.get(&base).map(Arc::clone);
                let lost =
                    || corrupt(rollout_id, format!("body {number} stands behind {base}, which is missing or newer"));
                Some(found.ok_or_else(lost)?)
            }
            None => None,
        };
        bodies.insert(number, Arc::new(Body::from_stored(row.try_get(1)?, Bytes::new(), base)));
    }
    Ok(bodies)
}

pub(super) async fn count(sql: &mut PgConnection, rollout_id: &str) -> Result<u64, Fault> {
    let counted = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM events WHERE rollout_id = $1");
    Ok(counted.bind(rollout_id).fetch_one(sql).await?.cast_unsigned())
}

pub(super) async fn attempts(sql: &mut PgConnection, rollout_id: &str) -> Result<Vec<String>, Fault> {
    rollouts::must_exist(sql, rollout_id).await?;
    let attempts = sqlx::query_scalar::<_, String>(
        "SELECT attempt_id FROM events WHERE rollout_id = $1 GROUP BY attempt_id ORDER BY min(number)",
    );
    Ok(attempts.bind(rollout_id).fetch_all(sql).await?)
}
