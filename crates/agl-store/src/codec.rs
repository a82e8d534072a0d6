//! Token ids, log-probs and version runs as blobs, and, for Postgres, the rest of a call row by name. Ids are LEB128 varints:
//! two or three bytes for most vocabularies.

use agl_core::trajectory::{CallOutcome, CallRow, Delivery, VersionRun};

/// A row of a database before its blobs and names are read.
pub(crate) struct Encoded {
    /// The row; what the other fields hold is not in it yet.
    pub(crate) row: CallRow,
    pub(crate) inserted: Vec<u8>,
    pub(crate) sampled: Vec<u8>,
    pub(crate) log_probs: Option<Vec<u8>>,
    pub(crate) versions: Vec<u8>,
    pub(crate) delivery: String,
    pub(crate) outcome: String,
}

impl Encoded {
    /// The whole row; says what is wrong with one that cannot be read.
    pub(crate) fn decoded(self) -> Result<CallRow, String> {
        let Self { row, inserted, sampled, log_probs, versions, delivery, outcome } = self;
        Ok(CallRow {
            inserted: ids_from_blob(&inserted)?,
            sampled: ids_from_blob(&sampled)?,
            log_probs: log_probs.as_deref().map(log_probs_from_blob).transpose()?,
            versions: versions_from_blob(&versions)?,
            delivery: delivery_of(&delivery)?,
            outcome: [CallOutcome::Ok, CallOutcome::Failed, CallOutcome::NoTokenIds]
                .into_iter()
                .find(|known| outcome_name(*known) == outcome)
                .ok_or_else(|| format!("an unknown outcome {outcome:?}"))?,
            ..row
        })
    }
}

pub(crate) fn delivery_name(delivery: Delivery) -> &'static str {
    match delivery {
        Delivery::Delivered => "delivered",
        Delivery::Undelivered => "undelivered",
        Delivery::Superseded => "superseded",
    }
}

/// The inverse of [`delivery_name`].
pub(crate) fn delivery_of(name: &str) -> Result<Delivery, String> {
    let known = [Delivery::Delivered, Delivery::Undelivered, Delivery::Superseded];
    known.into_iter().find(|known| delivery_name(*known) == name).ok_or_else(|| format!("an unknown delivery {name:?}"))
}

pub(crate) fn outcome_name(outcome: CallOutcome) -> &'static str {
    match outcome {
        CallOutcome::Ok => "ok",
        CallOutcome::Failed => "failed",
        CallOutcome::NoTokenIds => "no_token_ids",
    }
}

/// LEB128, one after the other.
pub(crate) fn ids_to_blob(ids: &[u32]) -> Vec<u8> {
    let mut blob = Vec::with_capacity(ids.len() * 3);
    for &id in ids {
        push_varint(&mut blob, u64::from(id));
    }
    blob
}

/// The inverse of [`ids_to_blob`]; says what is wrong with a blob that is none.
pub(crate) fn ids_from_blob(blob: &[u8]) -> Result<Vec<u32>, String> {
    varints(blob)?
        .into_iter()
        .map(|id| u32::try_from(id).map_err(|_| format!("token id {id} exceeds 32 bits")))
        .collect()
}

/// Little-endian f32, one after the other.
pub(crate) fn log_probs_to_blob(log_probs: &[f32]) -> Vec<u8> {
    log_probs.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The inverse of [`log_probs_to_blob`].
pub(crate) fn log_probs_from_blob(blob: &[u8]) -> Result<Vec<f32>, String> {
    let (values, rest) = blob.as_chunks::<4>();
    if rest.is_empty() {
        Ok(values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    } else {
        Err(format!("{} bytes are no whole number of log-probs", blob.len()))
    }
}

/// LEB128 pairs of version and count.
pub(crate) fn versions_to_blob(runs: &[VersionRun]) -> Vec<u8> {
    let mut blob = Vec::new();
    for run in runs {
        push_varint(&mut blob, run.version);
        push_varint(&mut blob, u64::from(run.count));
    }
    blob
}

/// The inverse of [`versions_to_blob`].
pub(crate) fn versions_from_blob(blob: &[u8]) -> Result<Vec<VersionRun>, String> {
    let numbers = varints(blob)?;
    let (pairs, rest) = numbers.as_chunks::<2>();
    if !rest.is_empty() {
        return Err("a version run without its count".to_owned());
    }
    pairs
        .iter()
        .map(|&[version, count]| {
            let count = u32::try_from(count).map_err(|_| format!("a version run of {count} tokens"))?;
            Ok(VersionRun { version, count })
        })
        .collect()
}

/// Adds a number as LEB128.
pub(crate) fn push_varint(blob: &mut Vec<u8>, mut value: u64) {
    #[expect(clippy::cast_possible_truncation, reason = "seven bits each, and what is left of three times seven")]
    let [one, two, three] = [value as u8, (value >> 7) as u8, (value >> 14) as u8];
    // Token ids have one to three bytes.
    match value {
        0..0x80 => blob.push(one),
        0x80..0x4000 => blob.extend_from_slice(&[one | 0x80, two]),
        0x4000..0x20_0000 => blob.extend_from_slice(&[one | 0x80, two | 0x80, three]),
        _ => {
            while value >= 0x80 {
                #[expect(clippy::cast_possible_truncation, reason = "the low seven bits are what this byte holds")]
                blob.push(value as u8 | 0x80);
                value >>= 7;
            }
            #[expect(clippy::cast_possible_truncation, reason = "less than 0x80 by the loop")]
            blob.push(value as u8);
        }
    }
}

/// Adds bytes behind their length.
pub(crate) fn push_slice(blob: &mut Vec<u8>, slice: &[u8]) {
    push_varint(blob, slice.len() as u64);
    blob.extend_from_slice(slice);
}

fn varints(blob: &[u8]) -> Result<Vec<u64>, String> {
    let mut values = Vec::with_capacity(blob.len() / 2);
    let mut numbers = Varints::new(blob);
    while !numbers.rest().is_empty() {
        values.push(numbers.next()?);
    }
    Ok(values)
}

/// Reads LEB128 numbers one after the other.
pub(crate) struct Varints<'a>(&'a [u8]);

impl<'a> Varints<'a> {
    pub(crate) fn new(blob: &'a [u8]) -> Self {
        Self(blob)
    }

    /// What has not been read.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.0
    }

    pub(crate) fn next(&mut self) -> Result<u64, String> {
        let (mut value, mut shift) = (0_u64, 0_u32);
        while let Some((&byte, rest)) = self.0.split_first() {
            if shift > 63 {
                return Err("a varint of more than 64 bits".to_owned());
            }
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err("a varint that breaks off".to_owned())
    }

    /// A length and as many bytes.
    pub(crate) fn next_slice(&mut self) -> Result<&'a [u8], String> {
        let length = self.next_usize()?;
        let (slice, rest) = self.0.split_at_checked(length).ok_or("bytes that break off")?;
        self.0 = rest;
        Ok(slice)
    }

    pub(crate) fn next_usize(&mut self) -> Result<usize, String> {
        let value = self.next()?;
        usize::try_from(value).map_err(|_| format!("a length of {value}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_come_back_whatever_their_size() {
        let ids = [0, 1, 127, 128, 16_383, 16_384, 151_935, u32::MAX];
        assert_eq!(ids_from_blob(&ids_to_blob(&ids)).unwrap(), ids);
    }

    #[test]
    fn log_probs_come_back_to_the_bit() {
        let log_probs = [-0.0, -1.5, f32::MIN_POSITIVE, -103.972_08];
        let back = log_probs_from_blob(&log_probs_to_blob(&log_probs)).unwrap();
        assert!(back.iter().zip(log_probs).all(|(a, b)| a.to_bits() == b.to_bits()) && back.len() == 4);
    }

    #[test]
    fn versions_come_back() {
        let runs = [VersionRun { version: u64::MAX, count: 3 }, VersionRun { version: 0, count: 400 }];
        assert_eq!(versions_from_blob(&versions_to_blob(&runs)).unwrap(), runs);
    }

    #[test]
    fn a_blob_that_breaks_off_is_an_error() {
        assert!(ids_from_blob(&[0x80]).is_err());
        assert!(log_probs_from_blob(&[0; 5]).is_err());
        assert!(versions_from_blob(&[1]).is_err());
        assert!(ids_from_blob(&[0xff, 0xff, 0xff, 0xff, 0x7f]).is_err());
    }
}
