//! Model calls: each is a row with its event, its bodies and what it adds to the attempt's tree.

use std::collections::HashMap;
use std::sync::Arc;

use agl_core::event::MODEL_REQUEST;
use agl_core::trajectory::Delivery;
use bytes::Bytes;
use rusqlite::params;

use super::{Sql, attempts, corrupt, failure, rollouts, signed, to_json};
use crate::bases::{Packed, Said};
use crate::codec::{delivery_name, delivery_of};
use crate::memory::is_settled;
use crate::record::{CallRecord, Settlement, StoredCall, Writer};
use crate::{StoreError, rows};

/// A call as it goes into the file.
pub(super) struct Ready {
    call: CallRecord,
    data: String,
    rows: Bytes,
    packed: Packed,
    base: Option<Arc<Said<i64>>>,
}

impl Ready {
    /// `packed` stands behind `base`, and beside `rows`.
    pub(super) fn new(
        call: CallRecord,
        rows: Bytes,
        packed: Packed,
        base: Option<Arc<Said<i64>>>,
    ) -> Result<Self, StoreError> {
        let data = to_json(&call.data, &call.rollout_id)?;
        Ok(Self { call, data, rows, packed, base })
    }
}

/// Writes the call and says where its bodies are.
pub(super) fn record(sql: &Sql<'_>, ready: Ready) -> Result<(CallRecord, Said<i64>), StoreError> {
    let Ready { call, data, rows, packed, base } = ready;
    let attempt = attempts::number_or_new(sql, &call.rollout_id, &call.attempt_id)?;
    let numbers = || call.rows.iter().map(|row| row.seq);
    if last_seq(sql, attempt)?.is_some_and(|last| numbers().any(|seq| seq <= last)) {
        // Another call has that number already, which whoever numbered this one did not know.
        return Err(StoreError::Raced { rollout_id: call.rollout_id, attempt_id: call.attempt_id });
    }
    let base = base.map(|base| base.request.place).filter(|_| packed.stand_behind());
    // The rollout may have been deleted and made anew in between, and its bodies with it.
    let base_is_gone = base.map(|base| is_there(sql, base, attempt)).transpose()? == Some(false);
    let (base, packed) = match base_is_gone {
        true => (None, Packed::alone(&call.request, &call.response, &rows)?),
        false => (base, packed),
    };
    let place = sql.insert(
        "INSERT INTO events (attempt, event_type, timestamp, data, http_status, status, digest, seq, rows, base, request, response)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
        params![
            attempt,
            MODEL_REQUEST,
            call.timestamp,
            data,
            call.http_status,
            call.data.get("status").and_then(|status| status.as_str()).unwrap_or_default(),
            call.request_digest,
            numbers().max().map(signed),
            &*rows,
            base,
            packed.request.body.stored(),
            packed.response.as_ref().map(|response| response.body.stored()),
        ],
    )?;
    for &seq in &call.supersedes {
        put_delivery(sql, attempt, seq, Delivery::Superseded)?;
    }
    Ok((call, packed.into_said(|body| body.hollow(), place, place)))
}

fn is_there(sql: &Sql<'_>, event: i64, attempt: i64) -> Result<bool, StoreError> {
    Ok(sql.first("SELECT 1 FROM events WHERE number = ?1 AND attempt = ?2", [event, attempt], |_| Ok(()))?.is_some())
}

/// The highest number of a row of the attempt.
fn last_seq(sql: &Sql<'_>, attempt: i64) -> Result<Option<u64>, StoreError> {
    let newest = "SELECT seq FROM events WHERE attempt = ?1 AND seq IS NOT NULL ORDER BY number DESC LIMIT 1";
    Ok(sql.first(newest, [attempt], |row| row.get::<_, i64>(0))?.map(i64::cast_unsigned))
}

/// One that is superseded stays so.
fn put_delivery(sql: &Sql<'_>, attempt: i64, seq: u64, delivery: Delivery) -> Result<(), StoreError> {
    sql.run(
        "INSERT INTO deliveries (attempt, seq, delivery) VALUES (?1, ?2, ?3)
         ON CONFLICT DO UPDATE SET delivery = excluded.delivery WHERE delivery <> ?4",
        params![attempt, signed(seq), delivery_name(delivery), delivery_name(Delivery::Superseded)],
    )?;
    Ok(())
}

pub(super) fn list(
    sql: &Sql<'_>,
    rollout_id: &str,
    attempt_id: &str,
    from: u64,
) -> Result<Vec<StoredCall>, StoreError> {
    let Some(attempt) = attempts::number(sql, rollout_id, attempt_id)? else {
        return rollouts::must_exist(sql, rollout_id).map(|()| Vec::new());
    };
    // Both as of one moment.
    let _moment = sql.connection.unchecked_transaction().map_err(|error| failure(sql.path, error))?;
    let recorded = sql.all(
        "SELECT rows, digest FROM events WHERE attempt = ?1 AND rows IS NOT NULL ORDER BY number",
        [attempt],
        |row| Ok((row.get::<_, Vec<u8>>(0)?, row.get::<_, [u8; 32]>(1)?)),
    )?;
    let told = sql.all("SELECT seq, delivery FROM deliveries WHERE attempt = ?1", [attempt], |row| {
        Ok((row.get::<_, i64>(0)?.cast_unsigned(), row.get::<_, String>(1)?))
    })?;
    let told: HashMap<u64, String> = told.into_iter().collect();
    let unreadable = |reason| corrupt(rollout_id, reason);
    let mut calls = Vec::with_capacity(recorded.len());
    for (blob, request_digest) in recorded {
        for mut row in rows::from_blob(&blob).map_err(unreadable)? {
            let told = told.get(&row.seq);
            let settled = told.is_some() || is_settled(&row);
            if let Some(name) = told
                && row.delivery != Delivery::Superseded
            {
                row.delivery = delivery_of(name).map_err(unreadable)?;
            }
            calls.push(StoredCall { row, request_digest, settled, writer: Writer::Gone });
        }
    }
    calls.retain(|call| call.row.seq >= from);
    calls.sort_by_key(|call| call.row.seq);
    Ok(calls)
}

pub(super) fn settle(sql: &Sql<'_>, settlement: &Settlement) -> Result<(), StoreError> {
    // Of a rollout that was deleted nothing is to be told.
    let Some(attempt) = attempts::number(sql, &settlement.rollout_id, &settlement.attempt_id)? else { return Ok(()) };
    // Nor of one that was made anew under the same name.
    let Some(last) = last_seq(sql, attempt)? else { return Ok(()) };
    let known = settlement.seqs.iter().filter(|&&seq| seq <= last);
    known.into_iter().try_for_each(|&seq| put_delivery(sql, attempt, seq, settlement.delivery))
}
