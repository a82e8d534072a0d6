//! Request and response bodies, compressed: they are most of what a store holds and are read rarely.
//!
//! A turn sends all that the turns before it sent. A body is therefore compressed against the one it continues, so that a
//! rollout's bodies grow with what its turns add and not with turns × context.

use std::sync::Arc;

use bytes::Bytes;
use zstd::zstd_safe::CParameter;

use crate::StoreError;

/// Favours speed: a body is compressed while a harness waits for its answer.
const ZSTD_LEVEL: i32 = 1;
/// The longest chain of bodies that stand on each other: reading one decompresses the whole chain.
const LONGEST_CHAIN: u32 = 32;
/// The largest window that a body may ask for when it is read: 2 GiB, more than any body is long.
const MAX_WINDOW_LOG: u32 = 31;

/// One body as it went over the wire, zstd-compressed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body {
    packed: Bytes,
    base: Option<Arc<Body>>,
    depth: u32,
}

impl Body {
    /// Compresses. Takes about 3 ms per megabyte: large bodies belong on a blocking thread.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] where zstd fails, which it does only without memory.
    pub fn compress(raw: &[u8]) -> Result<Self, StoreError> {
        let packed = zstd::bulk::compress(raw, ZSTD_LEVEL).map_err(|error| unreadable(&error))?;
        Ok(Self::from_stored(packed, None))
    }

    /// Compresses what continues `said`, whose body is `base`. Where the chain would grow too long, the body stands alone.
    ///
    /// # Errors
    /// As [`Self::compress`].
    pub fn compress_behind(raw: &[u8], said: &[u8], base: Arc<Self>) -> Result<Self, StoreError> {
        if base.depth >= LONGEST_CHAIN || said.is_empty() {
            return Self::compress(raw);
        }
        // The window reaches back over all of both: 2ⁿ ≥ their lengths together.
        let window = u32::max((raw.len() + said.len()).next_power_of_two().trailing_zeros(), 10);
        let pack = || {
            let mut encoder = zstd::stream::write::Encoder::with_ref_prefix(Vec::new(), ZSTD_LEVEL, said)?;
            encoder.window_log(window)?;
            // One slot for each place of what was said, or the beginning would be forgotten before it is looked for.
            encoder.set_parameter(CParameter::HashLog(window.clamp(12, 24)))?;
            std::io::Write::write_all(&mut encoder, raw)?;
            encoder.finish()
        };
        pack().map(|packed| Self::from_stored(packed, Some(base))).map_err(|error| unreadable(&error))
    }

    /// A body as a store kept it, and the one it was compressed behind.
    #[must_use]
    pub fn from_stored(packed: Vec<u8>, base: Option<Arc<Self>>) -> Self {
        let depth = base.as_ref().map_or(0, |base| base.depth + 1);
        Self { packed: packed.into(), base, depth }
    }

    /// The compressed bytes, for a store to keep.
    #[must_use]
    pub fn stored(&self) -> &[u8] {
        &self.packed
    }

    /// True where it can only be read with the body that it was compressed behind.
    #[must_use]
    pub fn has_base(&self) -> bool {
        self.base.is_some()
    }

    /// The bytes as they went over the wire.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if these are not the bytes that were compressed.
    pub fn read(&self) -> Result<Vec<u8>, StoreError> {
        let mut chain = vec![self];
        while let Some(base) = chain.last().and_then(|body| body.base.as_deref()) {
            chain.push(base);
        }
        let mut raw = Vec::new();
        for body in chain.iter().rev() {
            raw = body.unpack(&raw).map_err(|error| unreadable(&error))?;
        }
        Ok(raw)
    }

    fn unpack(&self, said: &[u8]) -> std::io::Result<Vec<u8>> {
        if self.base.is_none() {
            return zstd::stream::decode_all(&*self.packed);
        }
        let mut raw = Vec::new();
        let mut decoder = zstd::stream::read::Decoder::with_ref_prefix(&*self.packed, said)?;
        decoder.window_log_max(MAX_WINDOW_LOG)?;
        std::io::Read::read_to_end(&mut decoder, &mut raw)?;
        Ok(raw)
    }
}

fn unreadable(error: &std::io::Error) -> StoreError {
    StoreError::Corrupt { what: "body of a model call".to_owned(), reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_comes_back_as_it_was_and_takes_less_room() {
        let raw = br#"{"role":"user","content":"again"}"#.repeat(100);
        let body = Body::compress(&raw).unwrap();
        assert_eq!(body.read().unwrap(), raw);
        assert!(body.stored().len() < raw.len() / 10);
    }

    #[test]
    fn bytes_that_are_no_body_are_an_error() {
        assert!(Body::from_stored(b"not zstd".to_vec(), None).read().is_err());
        let base = Arc::new(Body::compress(b"base").unwrap());
        assert!(Body::from_stored(b"not zstd".to_vec(), Some(base)).read().is_err());
    }

    /// Text that does not compress by itself.
    fn turn(number: u64) -> String {
        let words = (0..400_u64).map(|word| (word + 1).wrapping_mul(number + 7).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        words.map(|word| format!("{word:x} ")).collect()
    }

    #[test]
    fn a_long_conversation_takes_room_for_what_its_turns_add() {
        let mut said = String::from("{");
        let mut before: Option<(Vec<u8>, Arc<Body>)> = None;
        let (mut bodies, mut stored, mut alone) = (Vec::new(), 0, 0);
        for number in 0..100 {
            said += &turn(number);
            let raw = format!("{said}]}}").into_bytes();
            let body = match &before {
                Some((said, base)) => Body::compress_behind(&raw, said, Arc::clone(base)).unwrap(),
                None => Body::compress(&raw).unwrap(),
            };
            stored += body.stored().len();
            alone += Body::compress(&raw).unwrap().stored().len();
            before = Some((raw.clone(), Arc::new(body.clone())));
            bodies.push((raw, body));
        }
        for (raw, body) in &bodies {
            assert_eq!(&body.read().unwrap(), raw);
        }
        // Three bodies stand alone: the others hold what their turn added.
        assert!(stored < 2 * said.len(), "{stored} bytes of {}", said.len());
        assert!(alone > 10 * said.len(), "{alone} bytes of {}", said.len());
        assert_eq!(bodies.iter().filter(|(_, body)| !body.has_base()).count(), 4);
    }
}
