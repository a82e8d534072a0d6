//! What the fuzzer `stored` calls: a database whose rows hold anything at all. Reading them may fail, and nothing else. Compiled for
//! the fuzzer (feature `fuzzing`) and for the test that runs its seeds.
#![expect(clippy::unwrap_used, reason = "whatever fails here is a finding")]

use std::cell::RefCell;
use std::sync::Arc;

use bytes::Bytes;
use rusqlite::{Connection, params};

use crate::{Body, codec, rows, sqlite};

/// Blobs as token ids, log-probs and versions; chains of bodies; rows of every table. The first byte chooses.
pub fn stored(data: &[u8]) {
    let Some((&kind, data)) = data.split_first() else { return };
    match kind % 4 {
        0 => blobs(data),
        1 => chain(data),
        2 => compressed(data),
        _ => rows(data),
    }
}

fn blobs(data: &[u8]) {
    if let Ok(ids) = codec::ids_from_blob(data) {
        assert_eq!(codec::ids_from_blob(&codec::ids_to_blob(&ids)).unwrap(), ids);
    }
    if let Ok(log_probs) = codec::log_probs_from_blob(data) {
        assert_eq!(codec::log_probs_to_blob(&log_probs), data);
    }
    if let Ok(runs) = codec::versions_from_blob(data) {
        assert_eq!(codec::versions_from_blob(&codec::versions_to_blob(&runs)).unwrap(), runs);
    }
    if let Ok(calls) = rows::from_blob(data) {
        // Log-probs may be no numbers, which are not equal to themselves.
        let blob = rows::to_blob(&calls);
        assert_eq!(rows::to_blob(&rows::from_blob(&blob).unwrap()), blob);
    }
}

/// Bodies behind each other, none of which need be one.
fn chain(data: &[u8]) {
    let mut base = None;
    for packed in data.split(|&byte| byte == b'|').take(4) {
        let body = Arc::new(Body::from_stored(packed.to_vec(), data.to_vec().into(), base));
        let _may_fail = body.read();
        base = Some(body);
    }
}

/// What is compressed comes back, behind whatever it stands.
fn compressed(data: &[u8]) {
    let (said, raw) = data.split_at(data.len() / 2);
    let base = Arc::new(Body::compress(said, b"").unwrap());
    let body = Body::compress_behind(raw, said, said, base).unwrap();
    assert_eq!(body.read().unwrap(), raw);
    // As a store gives it back.
    let base = Arc::new(Body::from_stored(Body::compress(said, b"").unwrap().stored().to_vec(), Bytes::new(), None));
    let back = Body::from_stored(body.stored().to_vec(), said.to_vec().into(), body.has_base().then_some(base));
    assert_eq!(back.read().unwrap(), raw);
}

/// Fields from `|` to `|`, put into the tables one after the other and over again.
fn rows(data: &[u8]) {
    thread_local! { static CONNECTION: RefCell<Connection> = RefCell::new(sqlite::fuzz::empty()); }
    CONNECTION.with_borrow_mut(|connection| {
        let mut fields = data.split(|&byte| byte == b'|').cycle();
        let mut field = || fields.next().unwrap_or_default().to_vec();
        let transaction = connection.transaction().unwrap();
        for statement in [
            "INSERT INTO rollouts (number, rollout_id, state, run_id, body) VALUES (1, 'r', CAST(?1 AS TEXT), NULL, CAST(?2 AS TEXT))",
            "INSERT INTO terminal_order (rollout_id, state, data_id, is_train) VALUES ('r', CAST(?1 AS TEXT), CAST(?2 AS TEXT), 1)",
            "INSERT INTO changes (kind, rollout_id) VALUES (CAST(?1 AS TEXT), CAST(?2 AS TEXT))",
            "INSERT INTO attempts (number, rollout_id, attempt_id, body) VALUES (1, 'r', '0', CAST(?1 AS TEXT)), (2, 'r', '1', CAST(?2 AS TEXT))",
            "INSERT INTO models (model, endpoint, body) VALUES (CAST(?1 AS TEXT), 'e', CAST(?2 AS TEXT))",
            "INSERT INTO deliveries (attempt, seq, delivery) VALUES (1, 0, CAST(?1 AS TEXT)), (1, 1, CAST(?2 AS TEXT))",
        ] {
            transaction.execute(statement, params![field(), field()]).unwrap();
        }
        let shape = field();
        let small = |at: usize| i64::from(shape.get(at).copied().unwrap_or_default().cast_signed());
        for name in ["pause", "secret"] {
            transaction.execute("INSERT INTO settings VALUES (?1, ?2)", params![name, field()]).unwrap();
        }
        for number in [1, 2] {
            transaction
                .execute(
                    "INSERT INTO events (number, attempt, event_type, timestamp, data, http_status, digest, seq, rows, base, request, response)
                     VALUES (?1, 1, CAST(?2 AS TEXT), 0.0, CAST(?3 AS TEXT), ?4, ?5, ?1, ?6, ?7, ?8, ?9)",
                    params![
                        number,
                        field(),
                        field(),
                        small(0) * 1000,
                        field(),
                        field(),
                        Some(small(1)).filter(|base| *base != 0),
                        field(),
                        field()
                    ],
                )
                .unwrap();
        }
        sqlite::fuzz::read_all(&transaction);
        transaction.rollback().unwrap();
    });
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_seeds_of_the_fuzzer_pass() {
        let seeds = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/stored")).unwrap();
        let mut count = 0;
        for seed in seeds {
            super::stored(&std::fs::read(seed.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count >= 5, "{count} seeds");
    }
}
