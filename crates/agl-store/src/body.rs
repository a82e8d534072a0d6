//! Request and response bodies, compressed: they are most of what a store holds and are read rarely.
//!
//! A turn sends all that the turns before it sent. A body is therefore kept as what it adds to the one it continues
//! ([`delta`]), so that a rollout's bodies grow with what its turns add and not with turns × context. In what is left numbers are
//! shortened ([`terse`](crate::terse)), and the rest is compressed with zstd behind a dictionary of what such bodies are mostly made of.

use std::cell::RefCell;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use zstd::bulk::{Compressor, Decompressor};
use zstd::dict::{DecoderDictionary, EncoderDictionary};

use crate::StoreError;
use crate::codec::{Varints, push_varint};
use crate::delta::{self, Delta, Encoded};
use crate::terse::{restore, shorten};

/// Favours speed: a body is compressed while a harness waits for its answer.
const ZSTD_LEVEL: i32 = 1;
/// The longest chain of bodies that stand on each other: reading one reads what all of them added.
const LONGEST_CHAIN: u32 = 512;
/// Part of the format: a body can only be read with the dictionary that it was compressed behind.
const DICTIONARY: &[u8] = include_bytes!("body.dictionary");

static ENCODER: LazyLock<EncoderDictionary<'static>> =
    LazyLock::new(|| EncoderDictionary::copy(DICTIONARY, ZSTD_LEVEL));
static DECODER: LazyLock<DecoderDictionary<'static>> = LazyLock::new(|| DecoderDictionary::copy(DICTIONARY));

thread_local! {
    /// Making one takes longer than compressing a small body.
    static COMPRESSOR: RefCell<Option<Compressor<'static>>> = const { RefCell::new(None) };
}

/// One body as it went over the wire, compressed.
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
        Ok(Self::from_stored(pack(&shorten(raw))?, None))
    }

    /// Compresses what continues `said`, whose body is `base`. Where too little of it is in `said`, or the chain would grow too
    /// long, the body stands alone.
    ///
    /// # Errors
    /// As [`Self::compress`].
    pub fn compress_behind(raw: &[u8], said: &[u8], base: Arc<Self>) -> Result<Self, StoreError> {
        match delta::encode(raw, said).filter(|_| base.depth < LONGEST_CHAIN) {
            Some(Encoded { copies, literals }) => {
                let mut added = Vec::with_capacity(copies.len() + literals.len() + 8);
                push_varint(&mut added, copies.len() as u64);
                added.extend(copies);
                added.extend(shorten(&literals));
                Ok(Self::from_stored(pack(&added)?, Some(base)))
            }
            None => Self::compress(raw),
        }
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

    /// What others may be compressed behind, where the store itself knows the bytes: the place in the chain without content.
    #[must_use]
    pub fn hollow(&self) -> Self {
        Self { packed: Bytes::new(), base: None, depth: self.depth }
    }

    /// The bytes as they went over the wire.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if these are not the bytes that were compressed.
    pub fn read(&self) -> Result<Vec<u8>, StoreError> {
        let mut bodies = vec![self];
        while let Some(base) = bodies.last().and_then(|body| body.base.as_deref()) {
            bodies.push(base);
        }
        let mut unpacker = Decompressor::with_prepared_dictionary(&DECODER).map_err(unreadable)?;
        let mut chain: Vec<Delta> = Vec::with_capacity(bodies.len());
        for body in bodies.iter().rev() {
            let raw = unpack(&mut unpacker, &body.packed).map_err(unreadable)?;
            let delta = match chain.last() {
                Some(base) => decode(&raw, base.len()),
                None => restore(&raw).map(Delta::alone),
            };
            chain.push(delta.map_err(unreadable)?);
        }
        Ok(Delta::resolve(&chain))
    }
}

/// What a body adds to one of `base_length` bytes.
fn decode(added: &[u8], base_length: usize) -> Result<Delta, String> {
    let mut numbers = Varints::new(added);
    let length = numbers.next_usize()?;
    let (copies, literals) = numbers.rest().split_at_checked(length).ok_or("copies that break off")?;
    Delta::decode(copies, restore(literals)?, base_length)
}

fn pack(raw: &[u8]) -> Result<Vec<u8>, StoreError> {
    COMPRESSOR.with_borrow_mut(|kept| {
        let compressor = match kept {
            Some(compressor) => compressor,
            None => kept.insert(Compressor::with_prepared_dictionary(&ENCODER).map_err(unreadable)?),
        };
        let mut packed = compressor.compress(raw).map_err(unreadable)?;
        // It was made as long as it could have become.
        packed.shrink_to_fit();
        Ok(packed)
    })
}

fn unpack(unpacker: &mut Decompressor<'_>, packed: &[u8]) -> std::io::Result<Vec<u8>> {
    let length = zstd::zstd_safe::get_frame_content_size(packed).ok().flatten();
    let length = length.and_then(|length| usize::try_from(length).ok());
    let length = length.ok_or_else(|| std::io::Error::other("it is not a body, or not a whole one"))?;
    unpacker.decompress(packed, length)
}

fn unreadable(error: impl std::fmt::Display) -> StoreError {
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
        // One body stands alone: the others hold what their turn added.
        assert!(stored < 2 * said.len(), "{stored} bytes of {}", said.len());
        assert!(alone > 10 * said.len(), "{alone} bytes of {}", said.len());
        assert_eq!(bodies.iter().filter(|(_, body)| !body.has_base()).count(), 1);
    }

    #[test]
    fn a_chain_that_grows_too_long_begins_anew() {
        let said = turn(1).into_bytes();
        let mut body = Body::compress(&said).unwrap();
        let mut alone = 0;
        for _ in 0..=LONGEST_CHAIN {
            body = Body::compress_behind(&said, &said, Arc::new(body)).unwrap();
            alone += u32::from(!body.has_base());
        }
        assert_eq!((alone, body.read().unwrap()), (1, said));
    }

    #[test]
    fn what_is_unlike_its_base_stands_alone() {
        let (one, other) = (turn(1).into_bytes(), turn(2).into_bytes());
        let base = Arc::new(Body::compress(&one).unwrap());
        let body = Body::compress_behind(&other, &one, base).unwrap();
        assert!(!body.has_base());
        assert_eq!(body.read().unwrap(), other);
    }
}
