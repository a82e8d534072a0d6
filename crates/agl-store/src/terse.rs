//! Answers of inference servers, shorter: token ids and log-probs are most of what a turn adds, and as digits a compressor can do little
//! with them; and the text of the answer stands there twice, once in pieces.
//!
//! This looks at bytes, not at JSON: what looks like a list of integers, a single-precision number as Python writes it, or an entry of
//! `logprobs.content` as vLLM writes it, is replaced by a mark, and its value put aside, wherever writing the value gives back just these
//! bytes. Of an entry whose token is the next piece of the `content` before it, only the length is kept. Marks are control characters,
//! which JSON does not have; a text that has them stays as it is.

use std::borrow::Cow;

use agl_core::digits::integer;

use crate::codec::{Varints, push_varint};
use crate::python::Written;

/// A list of integers: how many.
const INTEGERS: u8 = 1;
/// A number.
const NUMBER: u8 = 2;
/// A token with its log-prob: its text as JSON, a quote.
const ENTRY: u8 = 3;
/// A token that goes on with the content, and its log-prob: how long it is.
const NEXT: u8 = 4;
/// The same further on: how much of the content is passed over, how long it is.
const FURTHER: u8 = 5;
/// The first byte says whether anything was replaced.
const AS_IT_IS: u8 = 0;
const SHORTENED: u8 = 1;
/// A shorter list, or number, is as short as its mark.
const FEWEST_INTEGERS: usize = 4;
const SHORTEST_NUMBER: usize = 8;
/// Tokens that end inside a character are not in the content; behind them it goes on a little later.
const FURTHEST: usize = 12;

const BEFORE_CONTENT: &[u8] = br#""content":""#;
const BEFORE_TOKEN: &[u8] = br#"{"token":""#;
const BEFORE_LOG_PROB: &[u8] = br#"","logprob":"#;
const BEFORE_BYTES: &[u8] = br#","bytes":["#;
const BEHIND_BYTES: &[u8] = br#"],"top_logprobs":[]}"#;

/// A text without its numbers, and the numbers: those of a call are known from its rows too.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Terse {
    /// Of the whole text.
    pub(crate) length: usize,
    /// With a mark for each number or list of numbers.
    pub(crate) text: Vec<u8>,
    /// LEB128.
    pub(crate) integers: Vec<u8>,
    /// Single precision, little-endian.
    pub(crate) floats: Vec<u8>,
}

/// The same text with numbers put aside.
pub(crate) fn shorten(text: &[u8]) -> Terse {
    let mut short = Terse { length: text.len(), ..Terse::default() };
    if text.iter().any(|byte| (INTEGERS..=FURTHER).contains(byte)) {
        return Terse::plain(text);
    }
    short.text.push(SHORTENED);
    let mut content = Content::default();
    // What stays as it is is copied piece by piece.
    let (mut done, mut at) = (0, 0);
    while let Some(length) = text[at..].iter().position(|byte| matches!(byte, b'{' | b':' | b'[' | b',')) {
        at += length;
        let rest = &text[at + 1..];
        let taken = match text[at] {
            b'{' => entry(&text[at..]).map(|(token, value, length)| {
                short.text.extend_from_slice(&text[done..at]);
                content.push_token(&text[..at], token, &mut short.text);
                content.entry_ends(at + length);
                short.floats.extend_from_slice(&value.to_le_bytes());
                length
            }),
            b':' => {
                content.may_begin(&text[..at], rest);
                number(rest).map(|(value, length)| {
                    short.text.extend_from_slice(&text[done..=at]);
                    short.text.push(NUMBER);
                    short.floats.extend_from_slice(&value.to_le_bytes());
                    1 + length
                })
            }
            // Most commas stand before something else.
            _ if rest.first().is_some_and(u8::is_ascii_digit) => {
                push_integers(rest, &mut short.integers).map(|(count, length)| {
                    short.text.extend_from_slice(&text[done..=at]);
                    short.text.push(INTEGERS);
                    push_varint(&mut short.text, count as u64);
                    1 + length
                })
            }
            _ => None,
        };
        at += taken.unwrap_or(1);
        if taken.is_some() {
            done = at;
        }
    }
    short.text.extend_from_slice(&text[done..]);
    short
}

/// Where the content stands that the next entry's token may go on with.
#[derive(Default)]
struct Content {
    /// Of the newest content.
    begins: Option<usize>,
    /// What the entries have come to.
    next: Option<usize>,
    /// Where the entry before ended.
    entry_ended: usize,
}

impl Content {
    /// To be told of every colon, and what stands before and behind it.
    fn may_begin(&mut self, before: &[u8], behind: &[u8]) {
        let (name, quote) = BEFORE_CONTENT.split_at(BEFORE_CONTENT.len() - 2);
        if behind.first() == quote.last() && before.ends_with(name) {
            self.begins = Some(before.len() + quote.len());
        }
    }

    fn entry_ends(&mut self, at: usize) {
        self.entry_ended = at;
    }

    /// The first of several entries begins with the content.
    fn at_entry(&mut self, at: usize) -> Option<usize> {
        if self.entry_ended == 0 || self.entry_ended + 1 != at {
            self.next = self.begins;
        }
        self.next
    }

    fn push_token(&mut self, before: &[u8], token: &[u8], short: &mut Vec<u8>) {
        if let Some(next) = self.at_entry(before.len())
            && !token.is_empty()
            && let Some(skip) =
                (0..=FURTHEST).find(|skip| before.get(next + skip..).is_some_and(|t| t.starts_with(token)))
        {
            if skip == 0 {
                short.push(NEXT);
            } else {
                short.push(FURTHER);
                push_varint(short, skip as u64);
            }
            push_varint(short, token.len() as u64);
            self.next = Some(next + skip + token.len());
            return;
        }
        short.push(ENTRY);
        short.extend_from_slice(token);
        short.push(b'"');
    }

    /// The token that goes on with the content.
    fn token(&mut self, before: &[u8], skip: usize, length: usize) -> Result<Vec<u8>, String> {
        let start = self.at_entry(before.len()).filter(|_| skip <= FURTHEST).map(|next| next + skip);
        let end = start.and_then(|start| start.checked_add(length));
        self.next = end;
        let token = start.zip(end).and_then(|(start, end)| before.get(start..end));
        token.map(<[u8]>::to_vec).ok_or_else(|| "a token of no content".to_owned())
    }
}

impl Terse {
    /// A text of which nothing is put aside: one that is no answer.
    pub(crate) fn plain(text: &[u8]) -> Self {
        Self { length: text.len(), text: [&[AS_IT_IS], text].concat(), ..Self::default() }
    }

    /// In bytes.
    pub(crate) fn size(&self) -> usize {
        self.text.len() + self.integers.len() + self.floats.len()
    }

    /// The inverse of [`shorten`]; says what is wrong with bytes that it did not make.
    pub(crate) fn restore(&self) -> Result<Vec<u8>, String> {
        let Some((&first, mut rest)) = self.text.split_first() else { return Err("nothing at all".to_owned()) };
        if first == AS_IT_IS {
            return Ok(rest.to_vec());
        }
        let (mut integers, mut floats) = (Varints::new(&self.integers), self.floats.as_slice());
        let mut next_float = || {
            let (value, behind) = floats.split_first_chunk::<4>().ok_or("a number that is missing")?;
            floats = behind;
            Ok::<_, String>(f32::from_le_bytes(*value))
        };
        let mut content = Content::default();
        let mut text = Vec::with_capacity(rest.len() * 2);
        while let Some((&byte, behind)) = rest.split_first() {
            if text.len() > self.length {
                return Err("more text than there was".to_owned());
            }
            rest = behind;
            let mut numbers = Varints::new(rest);
            match byte {
                INTEGERS => {
                    let count = numbers.next()?;
                    rest = numbers.rest();
                    for index in 0..count {
                        if index > 0 {
                            text.push(b',');
                        }
                        push_decimal(&mut text, integers.next()?);
                    }
                }
                NUMBER => text.extend_from_slice(Written::of(next_float()?.into()).as_bytes()),
                ENTRY | NEXT | FURTHER => {
                    let token = if byte == ENTRY {
                        let end = string_end(rest).ok_or("a token that breaks off")?;
                        let token = &rest[..end];
                        rest = &rest[end + 1..];
                        content.at_entry(text.len());
                        token.to_vec()
                    } else {
                        let skip = if byte == FURTHER { numbers.next_usize()? } else { 0 };
                        let token = content.token(&text, skip, numbers.next_usize()?)?;
                        rest = numbers.rest();
                        token
                    };
                    push_entry(&mut text, &token, next_float()?).ok_or("a token that is no text")?;
                    content.entry_ends(text.len());
                }
                byte => {
                    if byte == b':' {
                        content.may_begin(&text, rest);
                    }
                    text.push(byte);
                }
            }
        }
        if text.len() != self.length {
            return Err(format!("{} bytes of text instead of {}", text.len(), self.length));
        }
        if !integers.rest().is_empty() || !floats.is_empty() {
            return Err("numbers without a place".to_owned());
        }
        Ok(text)
    }
}

/// Integers at the beginning of the text, behind `[` or `,`: how many, and how long they are.
fn push_integers(text: &[u8], integers: &mut Vec<u8>) -> Option<(usize, usize)> {
    let before = integers.len();
    let (mut count, mut end, mut at) = (0, 0, 0);
    while let Some((value, length)) = integer(&text[at..]) {
        push_varint(integers, value);
        count += 1;
        end = at + length;
        if text.get(end) != Some(&b',') {
            break;
        }
        at = end + 1;
    }
    if count < FEWEST_INTEGERS {
        integers.truncate(before);
        return None;
    }
    Some((count, end))
}

/// A long number of single precision, and its length.
fn number(text: &[u8]) -> Option<(f32, usize)> {
    let is_part = |byte: &u8| byte.is_ascii_digit() || matches!(byte, b'-' | b'.' | b'e' | b'+');
    text.first().filter(|byte| byte.is_ascii_digit() || **byte == b'-')?;
    let length = text.iter().take_while(|byte| is_part(byte)).count();
    if length < SHORTEST_NUMBER {
        return None;
    }
    let value: f64 = std::str::from_utf8(&text[..length]).ok()?.parse().ok()?;
    #[expect(clippy::cast_possible_truncation, reason = "whether anything was lost is seen in what it is written as")]
    let single = value as f32;
    let is_it = single.is_finite() && Written::of(single.into()).as_bytes() == &text[..length];
    is_it.then_some((single, length))
}

/// A token with its log-prob: its text as JSON, the log-prob, and how long all of it is.
fn entry(text: &[u8]) -> Option<(&[u8], f32, usize)> {
    let rest = text.strip_prefix(BEFORE_TOKEN)?;
    let token = &rest[..string_end(rest)?];
    let rest = rest[token.len()..].strip_prefix(BEFORE_LOG_PROB)?;
    let (value, length) = number(rest)?;
    let mut rest = rest[length..].strip_prefix(BEFORE_BYTES)?;
    for (index, byte) in decode(token)?.iter().enumerate() {
        if index > 0 {
            rest = rest.strip_prefix(b",")?;
        }
        let (value, length) = integer(rest)?;
        rest = &rest[length..];
        if value != u64::from(*byte) {
            return None;
        }
    }
    let rest = rest.strip_prefix(BEHIND_BYTES)?;
    Some((token, value, text.len() - rest.len()))
}

fn push_entry(text: &mut Vec<u8>, token: &[u8], log_prob: f32) -> Option<()> {
    let bytes = decode(token)?;
    text.extend_from_slice(BEFORE_TOKEN);
    text.extend_from_slice(token);
    text.extend_from_slice(BEFORE_LOG_PROB);
    text.extend_from_slice(Written::of(log_prob.into()).as_bytes());
    text.extend_from_slice(BEFORE_BYTES);
    for (index, byte) in bytes.iter().enumerate() {
        if index > 0 {
            text.push(b',');
        }
        push_decimal(text, u64::from(*byte));
    }
    text.extend_from_slice(BEHIND_BYTES);
    Some(())
}

/// What a JSON string says that is written so between its quotes; `None` where that is no text.
fn decode(token: &[u8]) -> Option<Cow<'_, [u8]>> {
    if !token.contains(&b'\\') {
        return Some(token.into());
    }
    serde_json::from_slice(&[b"\"", token, b"\""].concat()).ok().map(|text: String| text.into_bytes().into())
}

/// Where the quote stands that ends a JSON string.
fn string_end(text: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        match text.get(at)? {
            b'"' => return Some(at),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

fn push_decimal(text: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        let digit = (value % 10) as u8;
        digits[at] = b'0' + digit;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    text.extend_from_slice(&digits[at..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn again(text: &str) -> usize {
        let short = shorten(text.as_bytes());
        assert_eq!(String::from_utf8_lossy(&short.restore().unwrap()), text);
        short.text.len() + short.integers.len() + short.floats.len()
    }

    #[test]
    fn ids_take_as_many_bytes_as_their_size_needs() {
        assert_eq!(again("[1,22,333,4444,55555]"), 1 + 1 + 2 + 1 + 1 + 2 + 2 + 3 + 1);
        assert_eq!(again(r#"45,12345,67890,1,2,3],"b":["#), 1 + 2 + 1 + 2 + 2 + 3 + 3 + 7);
    }

    #[test]
    fn an_entry_is_its_token_and_four_bytes() {
        let entry = r#"{"token":" caf\u00e9\n","logprob":-0.006819606758654118,"bytes":[32,99,97,102,195,169,10],"top_logprobs":[]}"#;
        assert_eq!(again(entry), 1 + 1 + r#" caf\u00e9\n""#.len() + 4);
        assert_eq!(
            again(r#"{"token":"a","logprob":-1.1920928955078125e-07,"bytes":[97],"top_logprobs":[]}"#),
            1 + 3 + 4
        );
        // Other bytes than the token's, an alternative, spaces: the number alone.
        for entry in [
            r#"{"token":"a","logprob":-0.006819606758654118,"bytes":[98],"top_logprobs":[]}"#,
            r#"{"token":"a","logprob":-0.006819606758654118,"bytes":[97],"top_logprobs":[{}]}"#,
            r#"{"token":"a","logprob":-0.006819606758654118,"bytes":null,"top_logprobs":[]}"#,
        ] {
            assert_eq!(again(entry), 1 + entry.len() - 21 + 5);
        }
    }

    #[test]
    fn a_token_of_the_content_is_its_length_and_four_bytes() {
        let entry = |token: &str, bytes: &str| {
            format!(r#"{{"token":"{token}","logprob":-0.5461,"bytes":[{bytes}],"top_logprobs":[]}}"#)
                .replace("-0.5461", "-0.006819606758654118")
        };
        let answer = |tokens: &[String]| {
            format!(r#"{{"message":{{"content":"Aé \n€B"}},"logprobs":{{"content":[{}]}}}}"#, tokens.join(","))
        };
        let rest = answer(&[]).len() + 1;
        let split = [("A", "65"), ("é", "195,169"), (" \\n", "32,10"), ("€", "226,130,172"), ("B", "66")];
        let split = split.map(|(token, bytes)| entry(token, bytes));
        assert_eq!(again(&answer(&split)), rest + 4 + 5 * (2 + 4));
        // Of a character in two tokens neither is in the content.
        let mut parts = split.to_vec();
        parts[3] = entry("\u{fffd}", "239,191,189");
        parts.insert(4, parts[3].clone());
        assert_eq!(again(&answer(&parts)), rest + 5 + 3 * (2 + 4) + 2 * (1 + 3 + 1 + 4) + 3 + 4);
        // A second choice has its own content.
        again(&format!("[{},{}]", answer(&split), answer(&split)));
        again(&format!("{}{}", answer(&split), split[0]));
        again(&split.join(","));
    }

    #[test]
    fn what_would_not_come_back_to_the_letter_stays() {
        for text in [
            "",
            ":",
            "[",
            ",",
            "[1,2,3]",
            "[01,02,03,04,05]",
            "[1,2,3,4,05,6]",
            "[1,2,3,4,]",
            "[1,2,3,4,x",
            "[0,0,0,0,0]",
            "[-1,-2,-3,-4,-5]",
            "[1.5,2.5,3.5,4.5,5.5]",
            "[1,2,3,4.5,6]",
            "[1, 2, 3, 4, 5]",
            "[999999999999999999,1,2,3,9999999999999999999,18446744073709551616]",
            ":-0.1234567890123456789",
            ":1e-7000000",
            ":0.10000000000000001",
            ":1.1920928955078125e-7",
            ":-----------",
            ":3.4028234663852886e+39",
            r#"{"token":""#,
            r#"{"token":"\"#,
            r#"{"token":"\ud800","logprob":-0.006819606758654118,"bytes":[],"top_logprobs":[]}"#,
            "a\u{1}b[1,2,3,4,5]",
            "\u{3}\"",
        ] {
            again(text);
        }
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(shorten(&bytes).restore().unwrap(), bytes);
    }

    #[test]
    fn bytes_that_were_not_made_here_are_an_error_not_a_panic() {
        for wrong in [
            &b""[..],
            &[1, INTEGERS],
            &[1, INTEGERS, 5],
            &[1, NUMBER],
            &[1, ENTRY, b'a'],
            &[1, ENTRY, b'"'],
            &[1, NEXT, 1],
            &[1, FURTHER, 1],
        ] {
            let short = Terse { length: 9, text: wrong.to_vec(), integers: vec![1], floats: vec![0; 3] };
            assert!(short.restore().is_err(), "{wrong:?}");
        }
        // Numbers that nothing refers to.
        let short = Terse { length: 1, text: vec![1, b'a'], integers: vec![1], floats: Vec::new() };
        assert!(short.restore().is_err());
        // Another length than it had.
        let entry =
            br#"{"content":"ab"},{"token":"ab","logprob":-0.006819606758654118,"bytes":[97,98],"top_logprobs":[]}"#;
        for length in [0, 20, entry.len() - 1, entry.len() + 1] {
            assert!(Terse { length, ..shorten(entry) }.restore().is_err(), "{length}");
        }
    }
}
