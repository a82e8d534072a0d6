//! The rows of a call as one blob, for stores that keep a call whole.

use agl_core::trajectory::{CallOutcome, CallRow, Delivery};

use crate::codec::{
    Varints, ids_from_blob, ids_to_blob, log_probs_from_blob, log_probs_to_blob, push_slice, push_varint,
    versions_from_blob, versions_to_blob,
};

/// The lowest bits of the flags; two bits of outcome and two of delivery follow.
const HAS_LOG_PROBS: u8 = 1;
const TRAINABLE: u8 = 2;
const OUTCOME: u32 = 2;
const DELIVERY: u32 = 4;
/// Of the same call as the row before.
const SAME_CALL: u8 = 64;

const OUTCOMES: [CallOutcome; 3] = [CallOutcome::Ok, CallOutcome::Failed, CallOutcome::NoTokenIds];
const DELIVERIES: [Delivery; 3] = [Delivery::Delivered, Delivery::Undelivered, Delivery::Superseded];

/// Row after row; token ids and log-probs in the form of [`codec`](crate::codec).
pub(crate) fn to_blob(rows: &[CallRow]) -> Vec<u8> {
    let tokens: usize = rows.iter().map(|row| row.inserted.len() * 3 + row.sampled.len() * 7).sum();
    let mut blob = Vec::with_capacity(tokens + rows.len() * 80);
    let mut before: Option<&str> = None;
    for row in rows {
        let same = before == Some(row.call_id.as_str());
        before = Some(&row.call_id);
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        let flags = flag(row.log_probs.is_some(), HAS_LOG_PROBS)
            | flag(row.trainable, TRAINABLE)
            | (code(&OUTCOMES, row.outcome) << OUTCOME)
            | (code(&DELIVERIES, row.delivery) << DELIVERY)
            | flag(same, SAME_CALL);
        blob.push(flags);
        if !same {
            push_slice(&mut blob, row.call_id.as_bytes());
        }
        let parent = row.parent.map_or(0, |parent| parent.saturating_add(1));
        for number in [row.seq, row.choice.into(), parent, row.shared_prefix.into()] {
            push_varint(&mut blob, number);
        }
        push_slice(&mut blob, &versions_to_blob(&row.versions));
        push_slice(&mut blob, &ids_to_blob(&row.inserted));
        push_slice(&mut blob, &ids_to_blob(&row.sampled));
        if let Some(log_probs) = &row.log_probs {
            push_slice(&mut blob, &log_probs_to_blob(log_probs));
        }
    }
    blob
}

/// The inverse of [`to_blob`]; says what is wrong with a blob that is none.
pub(crate) fn from_blob(blob: &[u8]) -> Result<Vec<CallRow>, String> {
    let mut rows: Vec<CallRow> = Vec::new();
    let mut rest = blob;
    while let Some((&flags, behind)) = rest.split_first() {
        let mut parts = Varints::new(behind);
        let call_id = match (flags & SAME_CALL != 0, rows.last()) {
            (true, Some(before)) => before.call_id.clone(),
            (true, None) => return Err("a row of no call".to_owned()),
            (false, _) => String::from_utf8(parts.next_slice()?.to_vec()).map_err(|_| "a call id that is no text")?,
        };
        let (seq, choice, parent, shared_prefix) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let small = |number: u64| u32::try_from(number).map_err(|_| format!("{number} is no 32-bit number"));
        rows.push(CallRow {
            seq,
            call_id,
            choice: small(choice)?,
            parent: parent.checked_sub(1),
            shared_prefix: small(shared_prefix)?,
            versions: versions_from_blob(parts.next_slice()?)?,
            inserted: ids_from_blob(parts.next_slice()?)?,
            sampled: ids_from_blob(parts.next_slice()?)?,
            log_probs: match flags & HAS_LOG_PROBS {
                0 => None,
                _ => Some(log_probs_from_blob(parts.next_slice()?)?),
            },
            delivery: of_code(&DELIVERIES, flags >> DELIVERY).ok_or("an unknown delivery")?,
            outcome: of_code(&OUTCOMES, flags >> OUTCOME).ok_or("an unknown outcome")?,
            trainable: flags & TRAINABLE != 0,
        });
        rest = parts.rest();
    }
    Ok(rows)
}

/// The place in a list of at most four, which is part of the format.
fn code<T: PartialEq>(known: &[T], value: T) -> u8 {
    (0..).zip(known).find(|(_, one)| **one == value).map_or(3, |(code, _)| code)
}

fn of_code<T: Copy>(known: &[T], code: u8) -> Option<T> {
    known.get(usize::from(code & 3)).copied()
}

#[cfg(test)]
mod tests {
    use agl_core::trajectory::VersionRun;

    use super::*;

    fn rows() -> Vec<CallRow> {
        let row = CallRow {
            seq: 7,
            call_id: "call-ä".to_owned(),
            choice: 0,
            parent: Some(3),
            shared_prefix: u32::MAX,
            inserted: vec![1, 300, u32::MAX],
            sampled: vec![7, 8],
            log_probs: Some(vec![-0.0, -1.5]),
            versions: vec![VersionRun { version: u64::MAX, count: 2 }],
            delivery: Delivery::Undelivered,
            outcome: CallOutcome::Ok,
            trainable: true,
        };
        let second = CallRow { seq: 8, choice: 1, parent: Some(0), log_probs: None, ..row.clone() };
        let failed = CallRow {
            seq: u64::MAX,
            call_id: String::new(),
            parent: None,
            inserted: Vec::new(),
            sampled: Vec::new(),
            versions: Vec::new(),
            log_probs: None,
            delivery: Delivery::Superseded,
            outcome: CallOutcome::Failed,
            trainable: false,
            ..row.clone()
        };
        let bare = CallRow { outcome: CallOutcome::NoTokenIds, delivery: Delivery::Delivered, ..failed.clone() };
        vec![row, second, failed, bare]
    }

    #[test]
    fn rows_come_back_as_they_were() {
        let blob = to_blob(&rows());
        assert_eq!(from_blob(&blob).unwrap(), rows());
        assert_eq!(from_blob(b"").unwrap(), []);
    }

    #[test]
    fn a_blob_that_breaks_off_or_says_nonsense_is_an_error_not_a_panic() {
        let blob = to_blob(&rows()[..1]);
        for length in 1..blob.len() {
            assert!(from_blob(&blob[..length]).is_err(), "{length}");
        }
        for (at, byte) in blob.iter().enumerate() {
            let mut wrong = blob.clone();
            wrong[at] = byte ^ 0x55;
            let _other_rows = from_blob(&wrong);
        }
        let no_such_outcome = [&[3 << OUTCOME][..], &blob[1..]].concat();
        assert!(from_blob(&no_such_outcome).is_err());
        assert!(from_blob(&[SAME_CALL, 0, 0, 0, 0, 0, 0, 0]).is_err());
    }
}
