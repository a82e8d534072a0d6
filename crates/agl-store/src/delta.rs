//! What a body adds to the one that it continues, as copies out of that one and literal bytes between them.
//!
//! A body of an agent's turn repeats most of the turn before, shifted by what was put in between. So the old body is sampled at every
//! [`STEP`]th place, and the new one is looked through for any of the samples; each one found is stretched both ways. This costs less
//! than a compressor with so long a memory, which would look at every byte of the old body again.
//!
//! A chain of such deltas is read without making the bodies in between: a copy out of a copy is a copy ([`Delta::resolve`]).

use std::ops::Range;

use crate::codec::{Varints, push_varint};

/// How many bytes are compared at once, and how far apart the samples are. Every repetition of `STEP + WINDOW - 1` bytes is found.
const STEP: usize = 16;
const WINDOW: usize = 16;
/// Shorter copies cost as much as they save.
const SHORTEST_COPY: usize = 32;

/// A body in terms of another.
#[derive(Debug)]
pub(crate) struct Delta {
    /// One after the other they are the body.
    pieces: Vec<Piece>,
    literals: Vec<u8>,
    length: usize,
}

/// Bytes of the body, and where they are to be had.
#[derive(Clone, Debug)]
struct Piece {
    /// Where in the body the piece ends.
    end: usize,
    length: usize,
    source: Source,
}

#[derive(Clone, Copy, Debug)]
enum Source {
    /// From there in the other body.
    Copy(usize),
    /// From there in the literals.
    Literal(usize),
}

/// A delta to be stored: where its copies are, and the bytes between them.
#[derive(Debug)]
pub(crate) struct Encoded {
    pub(crate) copies: Vec<u8>,
    pub(crate) literals: Vec<u8>,
}

/// The bytes of `raw` as copies out of `base` and literals; `None` where too little of it is there.
pub(crate) fn encode(raw: &[u8], base: &[u8]) -> Option<Encoded> {
    let samples = Samples::of(base);
    let mut copies: Vec<(Range<usize>, usize)> = Vec::new();
    let (mut at, mut done, mut misses) = (0, 0, 0_usize);
    while at + WINDOW <= raw.len() {
        let found = samples.find(&raw[at..at + WINDOW]);
        let Some(mut from) = found.filter(|&from| base[from..from + WINDOW] == raw[at..at + WINDOW]) else {
            // What is new is passed over faster and faster. Odd steps come to every distance from a sample.
            misses += 1;
            at += 1 + 2 * (misses >> 5).min(7);
            continue;
        };
        let before = raw[done..at].iter().rev().zip(base[..from].iter().rev()).take_while(|(one, other)| one == other);
        let before = before.count();
        let (start, after) = (at - before, at + WINDOW + shared_prefix(&raw[at + WINDOW..], &base[from + WINDOW..]));
        from -= before;
        if after - start < SHORTEST_COPY {
            at += 1;
            continue;
        }
        copies.push((start..after, from));
        (at, done, misses) = (after, after, 0);
    }
    let copied: usize = copies.iter().map(|(range, _)| range.len()).sum();
    (copied * 4 >= raw.len()).then(|| write(raw, &copies))
}

/// The number of copies; of each the literal bytes before it, its length, and how far behind the end of the one before it begins; how
/// many literal bytes there are at the end.
fn write(raw: &[u8], ranges: &[(Range<usize>, usize)]) -> Encoded {
    let copied: usize = ranges.iter().map(|(range, _)| range.len()).sum();
    let mut copies = Vec::with_capacity(12 * ranges.len() + 16);
    let mut literals = Vec::with_capacity(raw.len() - copied);
    push_varint(&mut copies, ranges.len() as u64);
    let (mut done, mut expected) = (0, 0_i64);
    for (range, from) in ranges {
        let from = signed(*from);
        push_varint(&mut copies, (range.start - done) as u64);
        push_varint(&mut copies, range.len() as u64);
        push_varint(&mut copies, zigzag(from - expected));
        literals.extend_from_slice(&raw[done..range.start]);
        (done, expected) = (range.end, from + signed(range.len()));
    }
    push_varint(&mut copies, (raw.len() - done) as u64);
    literals.extend_from_slice(&raw[done..]);
    Encoded { copies, literals }
}

impl Delta {
    /// A body that stands alone.
    pub(crate) fn alone(raw: Vec<u8>) -> Self {
        let length = raw.len();
        Self { pieces: vec![Piece { end: length, length, source: Source::Literal(0) }], literals: raw, length }
    }

    /// The inverse of [`encode`], for a base of `base_length` bytes.
    pub(crate) fn decode(copies: &[u8], literals: Vec<u8>, base_length: usize) -> Result<Self, String> {
        let mut numbers = Varints::new(copies);
        let count = numbers.next_usize()?;
        let (mut pieces, mut end, mut literal, mut expected) = (Vec::new(), 0_usize, 0_usize, 0_i64);
        let mut push = |length: usize, source| {
            end = end.checked_add(length).ok_or("a body longer than memory")?;
            if length > 0 {
                pieces.push(Piece { end, length, source });
            }
            Ok::<_, String>(())
        };
        for _ in 0..count {
            let (before, length, moved) = (numbers.next_usize()?, numbers.next_usize()?, numbers.next()?);
            push(before, Source::Literal(literal))?;
            literal = literal.saturating_add(before);
            let from = expected.saturating_add(unzigzag(moved));
            let start = usize::try_from(from).map_err(|_| "a copy from before the beginning")?;
            if start.checked_add(length).is_none_or(|end| end > base_length) {
                return Err("a copy from behind the end".to_owned());
            }
            push(length, Source::Copy(start))?;
            expected = from.saturating_add(signed(length));
        }
        let rest = numbers.next_usize()?;
        push(rest, Source::Literal(literal))?;
        if !numbers.rest().is_empty() || literals.len() != literal.saturating_add(rest) {
            return Err(format!("{} literal bytes instead of {}", literals.len(), literal.saturating_add(rest)));
        }
        Ok(Self { pieces, literals, length: end })
    }

    /// How long the body is.
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// The last body of a chain, each of which stands behind the one before it.
    pub(crate) fn resolve(chain: &[Self]) -> Vec<u8> {
        let Some(last) = chain.last() else { return Vec::new() };
        let mut raw = Vec::with_capacity(last.length);
        // Parts of bodies that are still to be written, the next on top.
        let mut wanted = vec![(chain.len() - 1, 0..last.length)];
        let mut parts = Vec::new();
        while let Some((level, range)) = wanted.pop() {
            let Self { pieces, literals, .. } = &chain[level];
            let first = pieces.partition_point(|piece| piece.end <= range.start);
            for piece in &pieces[first..] {
                let begin = piece.end - piece.length;
                let (start, end) = (range.start.max(begin), range.end.min(piece.end));
                if start >= end {
                    break;
                }
                parts.push((piece.source, start - begin, end - start));
            }
            // Literals in front are written at once; from the first copy on, everything waits for it.
            let copies = parts.iter().position(|(source, ..)| matches!(source, Source::Copy(_))).unwrap_or(parts.len());
            for (source, skip, length) in parts.drain(..copies) {
                let Source::Literal(from) = source else { continue };
                raw.extend_from_slice(&literals[from + skip..][..length]);
            }
            let mut end = range.end;
            for (source, skip, length) in parts.drain(..).rev() {
                match source {
                    Source::Copy(from) => wanted.push((level - 1, from + skip..from + skip + length)),
                    Source::Literal(_) => wanted.push((level, end - length..end)),
                }
                end -= length;
            }
        }
        raw
    }
}

/// Places of a body by a hash of what stands there.
struct Samples {
    /// The number of the sample, from 1; 0 is none.
    table: Vec<u32>,
    shift: u32,
}

impl Samples {
    fn of(base: &[u8]) -> Self {
        let size = (base.len() / STEP * 2).next_power_of_two().max(64);
        let mut samples = Self { table: vec![0; size], shift: 64 - size.trailing_zeros() };
        for (number, window) in (1_u32..).zip(base.chunks_exact(STEP)) {
            let slot = samples.slot(window);
            samples.table[slot] = number;
        }
        samples
    }

    fn find(&self, window: &[u8]) -> Option<usize> {
        let number = self.table[self.slot(window)];
        (number > 0).then(|| (number as usize - 1) * STEP)
    }

    fn slot(&self, window: &[u8]) -> usize {
        let (halves, _) = window.as_chunks::<8>();
        let [one, other, ..] = halves else { return 0 };
        let mixed = u64::from_le_bytes(*one).wrapping_mul(0x9E37_79B9_7F4A_7C15)
            ^ u64::from_le_bytes(*other).wrapping_mul(0xC2B2_AE3D_27D4_EB4F).rotate_left(29);
        #[expect(clippy::cast_possible_truncation, reason = "the shift leaves as many bits as the table has")]
        let slot = (mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize;
        slot
    }
}

/// How many bytes both begin with.
pub(crate) fn shared_prefix(one: &[u8], other: &[u8]) -> usize {
    // Block by block: bodies are long and mostly agree.
    const BLOCK: usize = 64;
    let blocks = one.chunks_exact(BLOCK).zip(other.chunks_exact(BLOCK)).take_while(|(one, other)| one == other).count();
    let (one, other) = (&one[blocks * BLOCK..], &other[blocks * BLOCK..]);
    blocks * BLOCK + one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

/// Lengths of bodies in memory never reach the sign bit.
fn signed(length: usize) -> i64 {
    i64::try_from(length).unwrap_or(i64::MAX)
}

fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)).cast_unsigned()
}

fn unzigzag(value: u64) -> i64 {
    (value >> 1).cast_signed() ^ -(value & 1).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(Encoded { copies, literals }: Encoded, base: &[u8]) -> Result<Delta, String> {
        Delta::decode(&copies, literals, base.len())
    }

    fn again(raw: &[u8], base: &[u8]) -> Vec<u8> {
        Delta::resolve(&[Delta::alone(base.to_vec()), decoded(encode(raw, base).unwrap(), base).unwrap()])
    }

    /// Text without repetitions.
    fn text(number: u64, words: u64) -> Vec<u8> {
        let words = (0..words).map(|word| (word + 1).wrapping_mul(number + 7).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        words.flat_map(|word| format!("{word:x} ").into_bytes()).collect()
    }

    #[test]
    fn what_moved_is_copied_wherever_it_went() {
        let (a, b, c) = (text(1, 50), text(2, 50), text(3, 50));
        let base = [&a[..], &b, &c].concat();
        for raw in [
            base.clone(),
            [&b"x"[..], &base].concat(),
            [&a[..], &b, b"new", &c, b"end"].concat(),
            [&c[..], b"-", &a, b"-", &b].concat(),
            a.clone(),
        ] {
            let Encoded { copies, literals } = encode(&raw, &base).unwrap();
            assert!(copies.len() + literals.len() < 100, "{} and {} bytes", copies.len(), literals.len());
            assert_eq!(again(&raw, &base), raw);
        }
    }

    #[test]
    fn what_shares_nothing_is_no_delta() {
        assert!(encode(&text(1, 50), &text(2, 50)).is_none());
        assert!(encode(b"short", b"short").is_none());
        assert!(encode(&text(1, 50), b"").is_none());
        assert!(encode(b"", b"").is_none_or(|encoded| decoded(encoded, b"").unwrap().len() == 0));
    }

    #[test]
    fn a_chain_is_read_without_the_bodies_between() {
        let mut raw = text(0, 60);
        let mut chain = vec![Delta::alone(raw.clone())];
        for number in 1..100 {
            // Every body loses something in the middle, gains something there, and something at its end.
            let (middle, base) = (raw.len() / 2, raw.clone());
            raw.splice(middle..middle + 10, text(number, 3));
            raw.extend(text(number + 1000, 5));
            chain.push(decoded(encode(&raw, &base).unwrap(), &base).unwrap());
            assert_eq!(Delta::resolve(&chain), raw);
        }
    }

    #[test]
    fn bytes_that_are_no_delta_are_an_error_not_a_panic() {
        let base = text(1, 50);
        let Encoded { copies, literals } = encode(&[&base[..], b"more"].concat(), &base).unwrap();
        for length in 0..copies.len() {
            assert!(Delta::decode(&copies[..length], literals.clone(), base.len()).is_err(), "{length}");
        }
        assert!(Delta::decode(&copies, literals.clone(), base.len() - 1).is_err());
        assert!(Delta::decode(&copies, Vec::new(), base.len()).is_err());
        for index in 0..copies.len() {
            let mut wrong = copies.clone();
            wrong[index] ^= 0x55;
            if let Ok(delta) = Delta::decode(&wrong, literals.clone(), base.len()) {
                let _other_bytes = Delta::resolve(&[Delta::alone(base.clone()), delta]);
            }
        }
    }
}
