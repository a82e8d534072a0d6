//! The append-only log of an attempt.

use agl_core::event::Event;
use rusqlite::params;

use super::{Sql, from_json, rollouts, to_json};
use crate::record::StoredEvent;
use crate::{Body, StoreError};

pub(super) fn append(sql: &Sql<'_>, event: Event) -> Result<Event, StoreError> {
    rollouts::must_exist(sql, &event.rollout_id)?;
    sql.run(
        "INSERT INTO events (rollout_id, attempt_id, event_type, timestamp, data) VALUES (?1, ?2, ?3, ?4, ?5)",
        params![
            event.rollout_id,
            event.attempt_id,
            event.event_type,
            event.timestamp,
            to_json(&event.data, &event.rollout_id)?
        ],
    )?;
    Ok(event)
}

pub(super) fn list(
    sql: &Sql<'_>,
    rollout_id: &str,
    attempt_id: &str,
    event_type: Option<&str>,
) -> Result<Vec<StoredEvent>, StoreError> {
    rollouts::must_exist(sql, rollout_id)?;
    let rows = sql.all(
        "SELECT e.event_type, e.timestamp, e.data, request.body, response.body
         FROM events e LEFT JOIN blobs request ON request.number = e.request
                       LEFT JOIN blobs response ON response.number = e.response
         WHERE e.rollout_id = ?1 AND e.attempt_id = ?2 AND (?3 IS NULL OR e.event_type = ?3) ORDER BY e.number",
        params![rollout_id, attempt_id, event_type],
        |row| {
            let bodies = (row.get::<_, Option<Vec<u8>>>(3)?, row.get::<_, Option<Vec<u8>>>(4)?);
            Ok((row.get::<_, String>(0)?, row.get::<_, f64>(1)?, row.get::<_, String>(2)?, bodies))
        },
    )?;
    rows.into_iter()
        .map(|(event_type, timestamp, data, (request, response))| {
            let event = Event {
                event_type,
                rollout_id: rollout_id.to_owned(),
                attempt_id: attempt_id.to_owned(),
                timestamp,
                data: from_json(&data, rollout_id)?,
            };
            Ok(StoredEvent {
                event,
                request: request.map(Body::from_stored),
                response: response.map(Body::from_stored),
            })
        })
        .collect()
}

pub(super) fn attempts(sql: &Sql<'_>, rollout_id: &str) -> Result<Vec<String>, StoreError> {
    rollouts::must_exist(sql, rollout_id)?;
    sql.all(
        "SELECT attempt_id FROM events WHERE rollout_id = ?1 GROUP BY attempt_id ORDER BY min(number)",
        [rollout_id],
        |row| row.get(0),
    )
}
