//! Model calls: written with their event and bodies in one transaction.

use std::sync::Arc;

use agl_core::event::MODEL_REQUEST;
use agl_core::trajectory::{CallOutcome, CallRow, Delivery};
use bytes::Bytes;
use rusqlite::params;

use super::{Sql, corrupt, rollouts, signed, to_json};
use crate::bases::{Kept, Packed, Said};
use crate::codec::{self, Encoded, delivery_name, outcome_name};
use crate::memory::is_settled;
use crate::record::{CallRecord, Settlement, StoredCall, Writer};
use crate::{Body, StoreError};

/// Writes the call and says where its bodies are. `base` is the call that they were compressed behind.
pub(super) fn record(
    sql: &Sql<'_>,
    call: &CallRecord,
    packed: Packed,
    base: Option<&Said<i64>>,
) -> Result<Said<i64>, StoreError> {
    rollouts::must_exist(sql, &call.rollout_id)?;
    // The rollout may have been deleted and made anew in between, and its bodies with it: both of a call's, or none.
    let base_is_gone = base.map(|base| is_there(sql, base.request.place)).transpose()? == Some(false);
    let store = |raw: &Bytes, body: Body, base: Option<&Kept<i64>>| -> Result<Kept<i64>, StoreError> {
        let body = if body.has_base() && base_is_gone { Body::compress(raw)? } else { body };
        let base = base.filter(|_| body.has_base()).map(|base| base.place);
        let place = sql.insert("INSERT INTO blobs (body, base) VALUES (?1, ?2)", params![body.stored(), base])?;
        Ok(Kept { raw: raw.clone(), body: Arc::new(body.hollow()), place })
    };
    let request = store(&call.request, packed.request, base.map(|said| &said.request))?;
    let answered = base.and_then(|said| said.response.as_ref());
    let response = packed.response.map(|body| store(&call.response, body, answered)).transpose()?;
    sql.run(
        "INSERT INTO events (rollout_id, attempt_id, event_type, timestamp, data, request, response, http_status, status)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
        params![
            call.rollout_id,
            call.attempt_id,
            MODEL_REQUEST,
            call.timestamp,
            to_json(&call.data, &call.rollout_id)?,
            request.place,
            response.as_ref().map(|response| response.place),
            call.http_status,
            call.data.get("status").and_then(|status| status.as_str()).unwrap_or_default()
        ],
    )?;
    for &seq in &call.supersedes {
        sql.run(
            "UPDATE calls SET delivery = ?4, settled = 1 WHERE rollout_id = ?1 AND attempt_id = ?2 AND seq = ?3",
            params![call.rollout_id, call.attempt_id, signed(seq), delivery_name(Delivery::Superseded)],
        )?;
    }
    call.rows.iter().try_for_each(|row| insert(sql, call, row))?;
    Ok(Said { request, response })
}

fn is_there(sql: &Sql<'_>, blob: i64) -> Result<bool, StoreError> {
    Ok(sql.first("SELECT 1 FROM blobs WHERE number = ?1", [blob], |_| Ok(()))?.is_some())
}

fn insert(sql: &Sql<'_>, call: &CallRecord, row: &CallRow) -> Result<(), StoreError> {
    sql.run(
        "INSERT INTO calls (rollout_id, attempt_id, seq, call_id, choice, parent, shared_prefix, inserted, sampled,
                            log_probs, versions, delivery, outcome, trainable, request_digest, settled)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)",
        params![
            call.rollout_id,
            call.attempt_id,
            signed(row.seq),
            row.call_id,
            row.choice,
            row.parent.map(signed),
            row.shared_prefix,
            codec::ids_to_blob(&row.inserted),
            codec::ids_to_blob(&row.sampled),
            row.log_probs.as_deref().map(codec::log_probs_to_blob),
            codec::versions_to_blob(&row.versions),
            delivery_name(row.delivery),
            outcome_name(row.outcome),
            row.trainable,
            call.request_digest,
            is_settled(row)
        ],
    )?;
    Ok(())
}

pub(super) fn list(
    sql: &Sql<'_>,
    rollout_id: &str,
    attempt_id: &str,
    from: u64,
) -> Result<Vec<StoredCall>, StoreError> {
    rollouts::must_exist(sql, rollout_id)?;
    let rows = sql.all(
        "SELECT seq, call_id, choice, parent, shared_prefix, inserted, sampled, log_probs, versions, delivery, outcome,
                trainable, request_digest, settled
         FROM calls WHERE rollout_id = ?1 AND attempt_id = ?2 AND seq >= ?3 ORDER BY seq",
        params![rollout_id, attempt_id, signed(from)],
        |row| {
            let encoded = Encoded {
                row: CallRow {
                    seq: row.get::<_, i64>(0)?.cast_unsigned(),
                    call_id: row.get(1)?,
                    choice: row.get(2)?,
                    parent: row.get::<_, Option<i64>>(3)?.map(i64::cast_unsigned),
                    shared_prefix: row.get(4)?,
                    inserted: Vec::new(),
                    sampled: Vec::new(),
                    log_probs: None,
                    versions: Vec::new(),
                    delivery: Delivery::Delivered,
                    outcome: CallOutcome::Ok,
                    trainable: row.get(11)?,
                },
                inserted: row.get(5)?,
                sampled: row.get(6)?,
                log_probs: row.get(7)?,
                versions: row.get(8)?,
                delivery: row.get(9)?,
                outcome: row.get(10)?,
            };
            Ok((encoded, row.get(12)?, row.get(13)?))
        },
    )?;
    rows.into_iter()
        .map(|(encoded, request_digest, settled)| {
            let row = encoded.decoded().map_err(|reason| corrupt(rollout_id, reason))?;
            Ok(StoredCall { row, request_digest, settled, writer: Writer::Gone })
        })
        .collect()
}

pub(super) fn settle(sql: &Sql<'_>, settlement: &Settlement) -> Result<(), StoreError> {
    for &seq in &settlement.seqs {
        sql.run(
            "UPDATE calls SET settled = 1, delivery = CASE delivery WHEN ?5 THEN delivery ELSE ?4 END
             WHERE rollout_id = ?1 AND attempt_id = ?2 AND seq = ?3",
            params![
                settlement.rollout_id,
                settlement.attempt_id,
                signed(seq),
                delivery_name(settlement.delivery),
                delivery_name(Delivery::Superseded)
            ],
        )?;
    }
    Ok(())
}
