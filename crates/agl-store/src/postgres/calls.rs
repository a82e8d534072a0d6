//! Model calls: written with their event and bodies in one statement, which is one transaction and one round trip.

use agl_core::event::MODEL_REQUEST;
use agl_core::trajectory::{CallOutcome, CallRow, Delivery};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

use super::gateways::LEASE;
use super::{Fault, corrupt, rollouts, signed, to_json};
use crate::StoreError;
use crate::bases::{Packed, Said};
use crate::codec::{self, Encoded, delivery_name, outcome_name};
use crate::memory::is_settled;
use crate::record::{CallRecord, Settlement, StoredCall, Writer};

/// What came of writing a call.
pub(super) enum Written {
    /// It is durable; this is where its bodies are.
    Yes { request: i64, response: Option<i64> },
    /// The bodies that its own stand behind are gone with their rollout: nothing was written.
    WithoutBase,
}

/// Writes the call. `base` is the call that its bodies were compressed behind.
pub(super) async fn record(
    sql: &mut PgConnection,
    call: &CallRecord,
    packed: &Packed,
    base: Option<&Said<i64>>,
    gateway: i64,
) -> Result<Written, Fault> {
    let (request_base, response_base) = base_places(packed, base);
    let needed: Vec<i64> = [request_base, response_base].into_iter().flatten().collect();
    let own: Vec<u64> = call.rows.iter().map(|row| row.seq).collect();
    let parents: Vec<i64> =
        call.rows.iter().filter_map(|row| row.parent).filter(|parent| !own.contains(parent)).map(signed).collect();
    let supersedes: Vec<i64> = call.supersedes.iter().copied().map(signed).collect();
    let rows = Columns::of(&call.rows);
    let statement = sqlx::query(
        "WITH rollout AS (SELECT 1 FROM rollouts WHERE rollout_id = $1 FOR KEY SHARE),
              based AS (SELECT 1 FROM rollout WHERE NOT EXISTS (
                  SELECT FROM unnest($3::bigint[]) AS needed (number)
                  WHERE NOT EXISTS (SELECT FROM blobs WHERE blobs.number = needed.number))),
              rooted AS (SELECT 1 FROM based WHERE NOT EXISTS (
                  SELECT FROM unnest($4::bigint[]) AS parent (seq) WHERE NOT EXISTS (
                      SELECT FROM calls WHERE rollout_id = $1 AND attempt_id = $2 AND calls.seq = parent.seq))),
              request AS (INSERT INTO blobs (body, base) SELECT $5, $6 FROM rooted RETURNING number),
              response AS (INSERT INTO blobs (body, base) SELECT $7, $8 FROM rooted WHERE $7 IS NOT NULL RETURNING number),
              event AS (
                  INSERT INTO events (rollout_id, attempt_id, event_type, timestamp, data, request, response, http_status, status)
                  SELECT $1, $2, $9, $10, $11, (SELECT number FROM request), (SELECT number FROM response), $12, $13
                  FROM rooted),
              superseded AS (
                  -- A row that another gateway has settled as delivered meanwhile reached its harness.
                  UPDATE calls SET delivery = $15, settled = true FROM rooted
                  WHERE rollout_id = $1 AND attempt_id = $2 AND seq = ANY($14) AND NOT (delivery = $16 AND settled)),
              written AS (
                  INSERT INTO calls (rollout_id, attempt_id, seq, call_id, choice, parent, shared_prefix, inserted, sampled,
                                     log_probs, versions, delivery, outcome, trainable, settled, request_digest, writer)
                  SELECT $1, $2, new.*, $17, $18 FROM rooted, unnest(
                      $19::bigint[], $20::text[], $21::bigint[], $22::bigint[], $23::bigint[], $24::bytea[], $25::bytea[],
                      $26::bytea[], $27::bytea[], $28::text[], $29::text[], $30::boolean[], $31::boolean[]) AS new)
         SELECT EXISTS (SELECT FROM rollout), EXISTS (SELECT FROM based), (SELECT number FROM request),
                (SELECT number FROM response)",
    );
    let status = call.data.get("status").and_then(|status| status.as_str()).unwrap_or_default();
    let outcome = statement
        .bind(&call.rollout_id)
        .bind(&call.attempt_id)
        .bind(needed)
        .bind(parents)
        .bind(packed.request.body.stored())
        .bind(request_base)
        .bind(packed.response.as_ref().map(|response| response.body.stored()))
        .bind(response_base)
        .bind(MODEL_REQUEST)
        .bind(call.timestamp)
        .bind(to_json(&call.data, &call.rollout_id)?)
        .bind(i64::from(call.http_status))
        .bind(status)
        .bind(supersedes)
        .bind(delivery_name(Delivery::Superseded))
        .bind(delivery_name(Delivery::Delivered))
        .bind(call.request_digest.as_slice())
        .bind(gateway)
        .bind(rows.seqs)
        .bind(rows.call_ids)
        .bind(rows.choices)
        .bind(rows.parents)
        .bind(rows.shared_prefixes)
        .bind(rows.inserted)
        .bind(rows.sampled)
        .bind(rows.log_probs)
        .bind(rows.versions)
        .bind(rows.deliveries)
        .bind(rows.outcomes)
        .bind(rows.trainable)
        .bind(rows.settled)
        .fetch_one(sql)
        .await?;
    if !outcome.try_get::<bool, _>(0)? {
        return Err(StoreError::RolloutNotFound(call.rollout_id.clone()).into());
    }
    if !outcome.try_get::<bool, _>(1)? {
        return Ok(Written::WithoutBase);
    }
    let Some(request) = outcome.try_get::<Option<i64>, _>(2)? else {
        return Err(raced(call).into());
    };
    Ok(Written::Yes { request, response: outcome.try_get(3)? })
}

/// Where the bodies are that these stand behind.
fn base_places(packed: &Packed, base: Option<&Said<i64>>) -> (Option<i64>, Option<i64>) {
    let request = base.filter(|_| packed.request.body.has_base()).map(|said| said.request.place);
    let answered = base.and_then(|said| said.response.as_ref());
    let response = answered.filter(|_| packed.response.as_ref().is_some_and(|response| response.body.has_base()));
    (request, response.map(|response| response.place))
}

pub(super) fn raced(call: &CallRecord) -> StoreError {
    StoreError::Raced { rollout_id: call.rollout_id.clone(), attempt_id: call.attempt_id.clone() }
}

/// True where this very call is stored: its acknowledgement was lost, or its connection before that.
pub(super) async fn is_there(sql: &mut PgConnection, call: &CallRecord) -> Result<bool, Fault> {
    let Some(row) = call.rows.first() else { return Ok(false) };
    let found = sqlx::query(
        "SELECT 1 FROM calls WHERE rollout_id = $1 AND attempt_id = $2 AND seq = $3 AND call_id = $4 AND choice = $5",
    );
    let found = found.bind(&call.rollout_id).bind(&call.attempt_id).bind(signed(row.seq)).bind(&row.call_id);
    Ok(found.bind(i64::from(row.choice)).fetch_optional(sql).await?.is_some())
}

/// Rows, column by column.
#[derive(Default)]
struct Columns<'a> {
    seqs: Vec<i64>,
    call_ids: Vec<&'a str>,
    choices: Vec<i64>,
    parents: Vec<Option<i64>>,
    shared_prefixes: Vec<i64>,
    inserted: Vec<Vec<u8>>,
    sampled: Vec<Vec<u8>>,
    log_probs: Vec<Option<Vec<u8>>>,
    versions: Vec<Vec<u8>>,
    deliveries: Vec<&'static str>,
    outcomes: Vec<&'static str>,
    trainable: Vec<bool>,
    settled: Vec<bool>,
}

impl<'a> Columns<'a> {
    fn of(rows: &'a [CallRow]) -> Self {
        let mut columns = Self::default();
        for row in rows {
            columns.seqs.push(signed(row.seq));
            columns.call_ids.push(&row.call_id);
            columns.choices.push(row.choice.into());
            columns.parents.push(row.parent.map(signed));
            columns.shared_prefixes.push(row.shared_prefix.into());
            columns.inserted.push(codec::ids_to_blob(&row.inserted));
            columns.sampled.push(codec::ids_to_blob(&row.sampled));
            columns.log_probs.push(row.log_probs.as_deref().map(codec::log_probs_to_blob));
            columns.versions.push(codec::versions_to_blob(&row.versions));
            columns.deliveries.push(delivery_name(row.delivery));
            columns.outcomes.push(outcome_name(row.outcome));
            columns.trainable.push(row.trainable);
            columns.settled.push(is_settled(row));
        }
        columns
    }
}

pub(super) async fn list(
    sql: &mut PgConnection,
    rollout_id: &str,
    attempt_id: &str,
    from: u64,
    gateway: i64,
) -> Result<Vec<StoredCall>, Fault> {
    let rows = sqlx::query(
        "SELECT c.seq, c.call_id, c.choice, c.parent, c.shared_prefix, c.inserted, c.sampled, c.log_probs, c.versions,
                c.delivery, c.outcome, c.trainable, c.request_digest, c.settled, c.writer,
                NOT c.settled AND EXISTS (
                    SELECT FROM gateways g WHERE g.number = c.writer AND g.left_at IS NULL
                        AND g.seen_at > clock_timestamp() - make_interval(secs => $4))
         FROM calls c WHERE c.rollout_id = $1 AND c.attempt_id = $2 AND c.seq >= $3 ORDER BY c.seq",
    );
    let rows = rows.bind(rollout_id).bind(attempt_id).bind(signed(from)).bind(LEASE.as_secs_f64());
    let rows = rows.fetch_all(&mut *sql).await?;
    if rows.is_empty() {
        rollouts::must_exist(sql, rollout_id).await?;
    }
    rows.iter().map(|row| read(row, rollout_id, gateway)).collect()
}

fn read(row: &PgRow, rollout_id: &str, gateway: i64) -> Result<StoredCall, Fault> {
    let number = |column: usize| -> Result<u32, Fault> {
        let value: i64 = row.try_get(column)?;
        Ok(u32::try_from(value).map_err(|_| corrupt(rollout_id, format!("{value} is no 32-bit number")))?)
    };
    let digest: &[u8] = row.try_get(12)?;
    let encoded = Encoded {
        row: CallRow {
            seq: row.try_get::<i64, _>(0)?.cast_unsigned(),
            call_id: row.try_get(1)?,
            choice: number(2)?,
            parent: row.try_get::<Option<i64>, _>(3)?.map(i64::cast_unsigned),
            shared_prefix: number(4)?,
            inserted: Vec::new(),
            sampled: Vec::new(),
            log_probs: None,
            versions: Vec::new(),
            delivery: Delivery::Delivered,
            outcome: CallOutcome::Ok,
            trainable: row.try_get(11)?,
        },
        inserted: row.try_get(5)?,
        sampled: row.try_get(6)?,
        log_probs: row.try_get(7)?,
        versions: row.try_get(8)?,
        delivery: row.try_get(9)?,
        outcome: row.try_get(10)?,
    };
    let writer_lives: bool = row.try_get(15)?;
    let writer = match row.try_get::<i64, _>(14)? {
        writer if writer == gateway => Writer::Here,
        _ if writer_lives => Writer::Elsewhere,
        _ => Writer::Gone,
    };
    Ok(StoredCall {
        row: encoded.decoded().map_err(|reason| corrupt(rollout_id, reason))?,
        request_digest: digest.try_into().map_err(|_| corrupt(rollout_id, "a digest that is not 32 bytes long"))?,
        settled: row.try_get(13)?,
        writer,
    })
}

/// One statement, which commits by itself.
pub(super) async fn settle(sql: &mut PgConnection, settlements: &[Settlement]) -> Result<(), Fault> {
    let mut columns: (Vec<&str>, Vec<&str>, Vec<i64>, Vec<&str>) = Default::default();
    for settlement in settlements {
        for &seq in &settlement.seqs {
            columns.0.push(&settlement.rollout_id);
            columns.1.push(&settlement.attempt_id);
            columns.2.push(signed(seq));
            columns.3.push(delivery_name(settlement.delivery));
        }
    }
    let update = sqlx::query(
        "WITH told AS (
             -- The last that was said of a row counts. Rows are locked in their order: nobody waits in a circle.
             SELECT DISTINCT ON (rollout_id, attempt_id, seq) * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[])
                 WITH ORDINALITY AS told (rollout_id, attempt_id, seq, delivery, place)
             ORDER BY rollout_id, attempt_id, seq, place DESC),
              locked AS (
             SELECT c.rollout_id, c.attempt_id, c.seq, told.delivery FROM calls c JOIN told USING (rollout_id, attempt_id, seq)
             ORDER BY c.rollout_id, c.attempt_id, c.seq FOR NO KEY UPDATE OF c)
         UPDATE calls c SET settled = true, delivery = CASE c.delivery WHEN $5 THEN c.delivery ELSE locked.delivery END
         FROM locked WHERE c.rollout_id = locked.rollout_id AND c.attempt_id = locked.attempt_id AND c.seq = locked.seq",
    );
    let (rollouts, attempts, seqs, deliveries) = columns;
    let update = update.bind(rollouts).bind(attempts).bind(seqs).bind(deliveries);
    update.bind(delivery_name(Delivery::Superseded)).execute(sql).await?;
    Ok(())
}
