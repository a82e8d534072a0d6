//! The append-only log of an attempt.

use std::collections::HashMap;
use std::sync::Arc;

use agl_core::event::Event;
use rusqlite::params;

use super::{Sql, corrupt, from_json, rollouts, to_json};
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
        "SELECT event_type, timestamp, data, request, response FROM events
         WHERE rollout_id = ?1 AND attempt_id = ?2 AND (?3 IS NULL OR event_type = ?3) ORDER BY number",
        params![rollout_id, attempt_id, event_type],
        |row| {
            let bodies = (row.get::<_, Option<i64>>(3)?, row.get::<_, Option<i64>>(4)?);
            Ok((row.get::<_, String>(0)?, row.get::<_, f64>(1)?, row.get::<_, String>(2)?, bodies))
        },
    )?;
    let mut bodies = Bodies { sql, rollout_id, read: HashMap::new() };
    rows.into_iter()
        .map(|(event_type, timestamp, data, (request, response))| {
            let event = Event {
                event_type,
                rollout_id: rollout_id.to_owned(),
                attempt_id: attempt_id.to_owned(),
                timestamp,
                data: from_json(&data, rollout_id)?,
            };
            let mut body = |number: Option<i64>| number.map(|number| bodies.get(number)).transpose();
            Ok(StoredEvent { event, request: body(request)?, response: body(response)? })
        })
        .collect()
}

/// Bodies with those that they were compressed behind.
struct Bodies<'a> {
    sql: &'a Sql<'a>,
    rollout_id: &'a str,
    read: HashMap<i64, Arc<Body>>,
}

impl Bodies<'_> {
    fn get(&mut self, number: i64) -> Result<Body, StoreError> {
        // Down to a body that is read already or stands alone, and up again.
        let mut waiting: Vec<(i64, Vec<u8>)> = Vec::new();
        let mut next = Some(number);
        let mut base = None;
        while let Some(number) = next {
            if let Some(known) = self.read.get(&number) {
                base = Some(Arc::clone(known));
                break;
            }
            let found = self.sql.first("SELECT body, base FROM blobs WHERE number = ?1", [number], |row| {
                Ok((row.get::<_, Vec<u8>>(0)?, row.get::<_, Option<i64>>(1)?))
            })?;
            let (packed, behind) =
                found.ok_or_else(|| corrupt(self.rollout_id, format!("body {number} is missing")))?;
            // A body stands behind an older one: anything else would be a circle.
            if behind.is_some_and(|behind| behind >= number) {
                return Err(corrupt(self.rollout_id, format!("body {number} stands behind a newer one")));
            }
            waiting.push((number, packed));
            next = behind;
        }
        for (number, packed) in waiting.into_iter().rev() {
            let body = Arc::new(Body::from_stored(packed, base));
            self.read.insert(number, Arc::clone(&body));
            base = Some(body);
        }
        base.map(|body| (*body).clone()).ok_or_else(|| corrupt(self.rollout_id, format!("body {number} is missing")))
    }
}

pub(super) fn count(sql: &Sql<'_>, rollout_id: &str) -> Result<u64, StoreError> {
    let counted =
        sql.first("SELECT count(*) FROM events WHERE rollout_id = ?1", [rollout_id], |row| row.get::<_, i64>(0))?;
    Ok(counted.unwrap_or(0).cast_unsigned())
}

pub(super) fn attempts(sql: &Sql<'_>, rollout_id: &str) -> Result<Vec<String>, StoreError> {
    rollouts::must_exist(sql, rollout_id)?;
    sql.all(
        "SELECT attempt_id FROM events WHERE rollout_id = ?1 GROUP BY attempt_id ORDER BY min(number)",
        [rollout_id],
        |row| row.get(0),
    )
}
