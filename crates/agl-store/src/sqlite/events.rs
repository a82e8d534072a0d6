//! The append-only log of an attempt.

use std::collections::HashMap;
use std::sync::Arc;

use agl_core::event::Event;
use bytes::Bytes;
use rusqlite::params;

use super::{Sql, attempts, corrupt, from_json, rollouts, to_json};
use crate::record::StoredEvent;
use crate::{Body, StoreError};

pub(super) fn append(sql: &Sql<'_>, event: Event) -> Result<Event, StoreError> {
    let data = to_json(&event.data, &event.rollout_id)?;
    sql.run(
        "INSERT INTO events (attempt, event_type, timestamp, data) VALUES (?1, ?2, ?3, ?4)",
        params![
            attempts::number_or_new(sql, &event.rollout_id, &event.attempt_id)?,
            event.event_type,
            event.timestamp,
            data
        ],
    )?;
    Ok(event)
}

/// A row before its bodies are put together.
struct Row {
    number: i64,
    event: Event,
    rows: Bytes,
    base: Option<i64>,
    request: Option<Vec<u8>>,
    response: Option<Vec<u8>>,
}

pub(super) fn list(
    sql: &Sql<'_>,
    rollout_id: &str,
    attempt_id: &str,
    event_type: Option<&str>,
) -> Result<Vec<StoredEvent>, StoreError> {
    let Some(attempt) = attempts::number(sql, rollout_id, attempt_id)? else {
        return rollouts::must_exist(sql, rollout_id).map(|()| Vec::new());
    };
    let found = sql.all(
        "SELECT number, event_type, timestamp, data, rows, base, request, response FROM events
         WHERE attempt = ?1 AND (?2 IS NULL OR event_type = ?2) ORDER BY number",
        params![attempt, event_type],
        |row| {
            let event = Event {
                event_type: row.get(1)?,
                rollout_id: rollout_id.to_owned(),
                attempt_id: attempt_id.to_owned(),
                timestamp: row.get(2)?,
                data: serde_json::Map::new(),
            };
            let rows = row.get::<_, Option<Vec<u8>>>(4)?.unwrap_or_default().into();
            let (base, request, response) = (row.get(5)?, row.get(6)?, row.get(7)?);
            Ok((Row { number: row.get(0)?, event, rows, base, request, response }, row.get::<_, String>(3)?))
        },
    )?;
    // Calls stand behind older ones of the same attempt: each finds its own among those that were read before it.
    let mut bodies: HashMap<i64, [Option<Arc<Body>>; 2]> = HashMap::new();
    let mut events = Vec::with_capacity(found.len());
    for (Row { number, mut event, rows, base, request, response }, data) in found {
        event.data = from_json(&data, rollout_id)?;
        let base = match base {
            Some(base) => bodies.get(&base).cloned().ok_or_else(|| {
                corrupt(rollout_id, format!("event {number} stands behind {base}, which is missing or newer"))
            })?,
            None => [None, None],
        };
        let [before, answered] = base;
        let request = request.map(|packed| Arc::new(Body::from_stored(packed, Bytes::new(), before)));
        let response = response.map(|packed| Arc::new(Body::from_stored(packed, rows, answered)));
        let own = |body: &Option<Arc<Body>>| body.as_deref().cloned();
        events.push(StoredEvent { event, request: own(&request), response: own(&response) });
        bodies.insert(number, [request, response]);
    }
    Ok(events)
}

pub(super) fn count(sql: &Sql<'_>, rollout_id: &str) -> Result<u64, StoreError> {
    let counted = sql.first(
        "SELECT count(*) FROM attempts a JOIN events e ON e.attempt = a.number WHERE a.rollout_id = ?1",
        [rollout_id],
        |row| row.get::<_, i64>(0),
    )?;
    Ok(counted.unwrap_or(0).cast_unsigned())
}

pub(super) fn attempts(sql: &Sql<'_>, rollout_id: &str) -> Result<Vec<String>, StoreError> {
    rollouts::must_exist(sql, rollout_id)?;
    sql.all(
        "SELECT a.attempt_id FROM attempts a JOIN events e ON e.attempt = a.number WHERE a.rollout_id = ?1
         GROUP BY a.number ORDER BY min(e.number)",
        [rollout_id],
        |row| row.get(0),
    )
}
