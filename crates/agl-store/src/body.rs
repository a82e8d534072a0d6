//! Request and response bodies, compressed: they are most of what a store holds and are read rarely.
//!
//! A turn sends all that the turns before it sent. A body is therefore kept as what it adds to the one it continues
//! ([`delta`]), so that a rollout's bodies grow with what its turns add and not with turns × context. Before that an answer's numbers are
//! taken out ([`terse`](crate::terse)), and those that the store has beside the body anyway, in the call's rows, are only pointed to. The rest is
//! compressed with zstd behind a dictionary of what such bodies are mostly made of.

use std::cell::RefCell;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use zstd::bulk::{Compressor, Decompressor};
use zstd::dict::{DecoderDictionary, EncoderDictionary};

use crate::StoreError;
use crate::codec::{Varints, push_slice, push_varint};
use crate::delta::{self, Delta, Encoded};
use crate::terse::Terse;
#[cfg(any(test, feature = "fuzzing"))]
use crate::terse::shorten;

/// Both favour speed: a body is compressed while a harness waits for its answer. The first has no code for literals, whose
/// making would take half of the time of a small body.
const LEVELS: [i32; 2] = [-1, 1];
/// Of what is a small body, in bytes.
const SMALL: usize = 1024;
/// The longest chain of bodies that stand on each other: reading one reads what all of them added.
const LONGEST_CHAIN: u32 = 512;
/// What claims to be longer is none.
const LONGEST: usize = 1 << 30;
/// Part of the format: a body can only be read with the dictionary that it was compressed behind.
const DICTIONARY: &[u8] = include_bytes!("body.dictionary");

static ENCODERS: LazyLock<[EncoderDictionary<'static>; 2]> =
    LazyLock::new(|| LEVELS.map(|level| EncoderDictionary::copy(DICTIONARY, level)));
static DECODER: LazyLock<DecoderDictionary<'static>> = LazyLock::new(|| DecoderDictionary::copy(DICTIONARY));

thread_local! {
    /// One for each level: making one takes longer than compressing a small body.
    static COMPRESSORS: RefCell<[Option<Compressor<'static>>; 2]> = const { RefCell::new([None, None]) };
}

/// One body as it went over the wire, compressed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body {
    packed: Bytes,
    /// What the store has beside it.
    beside: Bytes,
    base: Option<Arc<Body>>,
    depth: u32,
}

impl Body {
    /// A body that stands alone.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn compress(raw: &[u8], beside: &[u8]) -> Result<Self, StoreError> {
        Self::of(&shorten(raw), &Bytes::copy_from_slice(beside), None)
    }

    /// A body that continues `said`.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn compress_behind(raw: &[u8], beside: &[u8], said: &[u8], base: Arc<Self>) -> Result<Self, StoreError> {
        Self::of(&shorten(raw), &Bytes::copy_from_slice(beside), Some((&shorten(said), base)))
    }

    /// Compresses. `beside` is what the store has at hand whenever it reads the body, such as the call's token ids. `behind` is what the
    /// body continues, and the body of that. Where too little of it is there, or the chain would grow too long, the body stands alone.
    /// Takes milliseconds per megabyte: large bodies belong on a thread of their own.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] where zstd fails, which it does only without memory.
    pub(crate) fn of(said: &Terse, beside: &Bytes, behind: Option<(&Terse, Arc<Self>)>) -> Result<Self, StoreError> {
        let behind = behind.filter(|(_, base)| base.depth < LONGEST_CHAIN);
        let content = Content::of(said, behind.as_ref().map(|(base, _)| *base));
        let base = behind.map(|(_, base)| base).filter(|_| !content.is_alone());
        let packed = pack(&content.write(beside))?;
        Ok(Self::from_stored(packed, beside.clone(), base))
    }

    /// A body as a store kept it, what it was compressed beside, and the one it was compressed behind. One that stands alone does not
    /// look at `base`.
    #[must_use]
    pub fn from_stored(packed: Vec<u8>, beside: Bytes, base: Option<Arc<Self>>) -> Self {
        let depth = base.as_ref().map_or(0, |base| base.depth + 1);
        Self { packed: packed.into(), beside, base, depth }
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
        Self { packed: Bytes::new(), beside: Bytes::new(), base: None, depth: self.depth }
    }

    /// The bytes as they went over the wire.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if these are not the bytes that were compressed.
    pub fn read(&self) -> Result<Vec<u8>, StoreError> {
        let mut unpacker = Decompressor::with_prepared_dictionary(&DECODER).map_err(unreadable)?;
        // From this one down to the one that stands alone.
        let mut contents: Vec<Content> = Vec::new();
        let mut next = Some(self);
        while let Some(body) = next {
            let raw = unpack(&mut unpacker, &body.packed).map_err(unreadable)?;
            contents.push(Content::read(&raw, &body.beside).map_err(unreadable)?);
            let is_whole = |part: fn(&Content) -> &Part| contents.iter().any(|content| part(content).copies.is_empty());
            next = match is_whole(|content| &content.text) && is_whole(|content| &content.integers) {
                true => None,
                false => Some(body.base.as_deref().ok_or_else(|| unreadable("what it stands behind is missing"))?),
            };
        }
        let text = resolve(&contents, |content| &content.text).map_err(unreadable)?;
        let integers = resolve(&contents, |content| &content.integers).map_err(unreadable)?;
        let Content { length, floats, .. } = contents.swap_remove(0);
        Terse { length, text, integers, floats }.restore().map_err(unreadable)
    }
}

impl Drop for Body {
    /// One after the other: a chain may be as long as its attempt, and each in the drop of the next would need that much stack.
    fn drop(&mut self) {
        let mut next = self.base.take();
        while let Some(base) = next {
            next = Arc::into_inner(base).and_then(|mut body| body.base.take());
        }
    }
}

/// A part of the newest body, put together out of the same part of those that it stands behind.
fn resolve(newest_first: &[Content], part: fn(&Content) -> &Part) -> Result<Vec<u8>, String> {
    let alone = newest_first.iter().position(|content| part(content).copies.is_empty()).unwrap_or_default();
    let mut chain: Vec<Delta> = Vec::with_capacity(alone + 1);
    for content in newest_first[..=alone].iter().rev() {
        let Part { copies, literals } = part(content);
        chain.push(match chain.last() {
            Some(base) => Delta::decode(copies, literals.clone(), base.len())?,
            None => Delta::alone(literals.clone()),
        });
    }
    Ok(Delta::resolve(&chain))
}

/// What is compressed of a body: what it adds to the one before it.
struct Content {
    /// Of the whole body.
    length: usize,
    text: Part,
    integers: Part,
    floats: Vec<u8>,
}

/// As in [`delta`]. Without copies it stands alone.
struct Part {
    copies: Vec<u8>,
    literals: Vec<u8>,
}

impl Part {
    fn of(said: &[u8], base: Option<&[u8]>) -> Self {
        match base.filter(|_| !said.is_empty()).and_then(|base| delta::encode(said, base)) {
            Some(Encoded { copies, literals }) => Self { copies, literals },
            None => Self { copies: Vec::new(), literals: said.to_vec() },
        }
    }
}

impl Content {
    fn of(said: &Terse, base: Option<&Terse>) -> Self {
        Self {
            length: said.length,
            text: Part::of(&said.text, base.map(|base| &*base.text)),
            integers: Part::of(&said.integers, base.map(|base| &*base.integers)),
            floats: said.floats.clone(),
        }
    }

    fn is_alone(&self) -> bool {
        self.text.copies.is_empty() && self.integers.copies.is_empty()
    }

    /// The body's length, and that of the literal integers; each part behind its length: the copies of the text and the rest of it, the copies of
    /// the integers, the copies of the numbers out of what is beside; then the numbers that are not there.
    fn write(self, beside: &[u8]) -> Vec<u8> {
        let Self { length: whole, text, integers, floats } = self;
        let numbers = [&*integers.literals, &floats].concat();
        let known = Part::of(&numbers, Some(beside));
        let parts = [&text.copies, &text.literals, &integers.copies, &known.copies];
        let length: usize = parts.iter().map(|part| part.len() + 4).sum();
        let mut content = Vec::with_capacity(length + known.literals.len() + 12);
        push_varint(&mut content, whole as u64);
        push_varint(&mut content, integers.literals.len() as u64);
        parts.into_iter().for_each(|part| push_slice(&mut content, part));
        content.extend_from_slice(&known.literals);
        content
    }

    fn read(content: &[u8], beside: &Bytes) -> Result<Self, String> {
        let mut parts = Varints::new(content);
        let (whole, length) = (parts.next_usize()?, parts.next_usize()?);
        let mut next = || parts.next_slice().map(<[u8]>::to_vec);
        let (text, copies, known) = (Part { copies: next()?, literals: next()? }, next()?, next()?);
        let mut literals = parts.rest().to_vec();
        if !known.is_empty() {
            let numbers = Delta::decode(&known, literals, beside.len())?;
            literals = Delta::resolve(&[Delta::alone(beside.to_vec()), numbers]);
        }
        if length > literals.len() {
            return Err("integers that break off".to_owned());
        }
        let floats = literals.split_off(length);
        Ok(Self { length: whole, text, integers: Part { copies, literals }, floats })
    }
}

fn pack(raw: &[u8]) -> Result<Vec<u8>, StoreError> {
    let which = usize::from(raw.len() >= SMALL);
    COMPRESSORS.with_borrow_mut(|kept| {
        let compressor = match &mut kept[which] {
            Some(compressor) => compressor,
            none => none.insert(Compressor::with_prepared_dictionary(&ENCODERS[which]).map_err(unreadable)?),
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
    let length = length.filter(|length| *length <= LONGEST);
    let length = length.ok_or_else(|| std::io::Error::other("it is not a body, or not a whole one"))?;
    unpacker.decompress(packed, length)
}

fn unreadable(error: impl std::fmt::Display) -> StoreError {
    StoreError::Corrupt { what: "body of a model call".to_owned(), reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;

    #[test]
    fn a_body_comes_back_as_it_was_and_takes_less_room() {
        let raw = br#"{"role":"user","content":"again"}"#.repeat(100);
        let body = Body::compress(&raw, b"").unwrap();
        assert_eq!(body.read().unwrap(), raw);
        assert!(body.stored().len() < raw.len() / 10);
    }

    #[test]
    fn bytes_that_are_no_body_are_an_error() {
        assert!(Body::from_stored(b"not zstd".to_vec(), Bytes::new(), None).read().is_err());
        let base = Arc::new(Body::compress(b"base", b"").unwrap());
        assert!(Body::from_stored(b"not zstd".to_vec(), Bytes::new(), Some(base)).read().is_err());
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
                Some((said, base)) => Body::compress_behind(&raw, b"", said, Arc::clone(base)).unwrap(),
                None => Body::compress(&raw, b"").unwrap(),
            };
            stored += body.stored().len();
            alone += Body::compress(&raw, b"").unwrap().stored().len();
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
        let mut body = Body::compress(&said, b"").unwrap();
        let mut alone = 0;
        for _ in 0..=LONGEST_CHAIN {
            body = Body::compress_behind(&said, b"", &said, Arc::new(body)).unwrap();
            alone += u32::from(!body.has_base());
        }
        assert_eq!((alone, body.read().unwrap()), (1, said));
    }

    #[test]
    fn what_is_unlike_its_base_stands_alone() {
        let (one, other) = (turn(1).into_bytes(), turn(2).into_bytes());
        let base = Arc::new(Body::compress(&one, b"").unwrap());
        let body = Body::compress_behind(&other, b"", &one, base).unwrap();
        assert!(!body.has_base());
        assert_eq!(body.read().unwrap(), other);
    }

    #[test]
    fn numbers_that_are_beside_the_body_are_not_stored_again() {
        let ids: Vec<u32> = (0..500_u32).map(|number| number.wrapping_mul(2_654_435_761) % 150_000).collect();
        let log_probs: Vec<f32> = ids.iter().map(|&id| -0.01 - id as f32 / 1e5).collect();
        let entries = log_probs.iter().map(|value| {
            format!(r#"{{"token":"a","logprob":{:?},"bytes":[97],"top_logprobs":[]}}"#, f64::from(*value))
        });
        let raw =
            format!(r#"{{"logprobs":{{"content":[{}]}},"token_ids":{ids:?}}}"#, entries.collect::<Vec<_>>().join(","));
        let raw = raw.replace(", ", ",").into_bytes();
        let beside = [codec::ids_to_blob(&ids), codec::log_probs_to_blob(&log_probs)].concat();
        let alone = Body::compress(&raw, b"").unwrap();
        let body = Body::compress(&raw, &beside).unwrap();
        assert!(
            alone.stored().len() > 3000 && body.stored().len() < 300,
            "{} {}",
            alone.stored().len(),
            body.stored().len()
        );
        assert_eq!(body.read().unwrap(), raw);
        let stored = Body::from_stored(body.stored().to_vec(), beside.into(), None);
        assert_eq!(stored.read().unwrap(), raw);
        assert!(Body::from_stored(body.stored().to_vec(), Bytes::new(), None).read().is_err());
    }
}
