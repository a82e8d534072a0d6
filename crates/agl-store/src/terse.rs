//! Numbers in JSON, shorter: token ids and log-probs are most of what a turn adds, and as digits a compressor can do little with them.
//!
//! This looks at bytes, not at JSON: what looks like a list of integers, a single-precision number as Python writes it, or an entry of
//! `logprobs.content` as vLLM writes it, is replaced by a mark and its value, wherever writing the value gives back just these bytes.
//! Marks are control characters, which JSON does not have; a text that has them stays as it is.

use crate::codec::{Varints, push_varint};

/// A list of integers: how many, then each.
const INTEGERS: u8 = 1;
/// A number: four bytes.
const NUMBER: u8 = 2;
/// A token with its log-prob: its text as JSON, a quote, four bytes.
const ENTRY: u8 = 3;
/// The first byte says whether anything was replaced.
const AS_IT_IS: u8 = 0;
const SHORTENED: u8 = 1;
/// A shorter list, or number, is as short as its mark.
const FEWEST_INTEGERS: usize = 4;
const SHORTEST_NUMBER: usize = 8;

const BEFORE_TOKEN: &[u8] = br#"{"token":""#;
const BEFORE_LOG_PROB: &[u8] = br#"","logprob":"#;
const BEFORE_BYTES: &[u8] = br#","bytes":["#;
const BEHIND_BYTES: &[u8] = br#"],"top_logprobs":[]}"#;

/// The same text with numbers replaced.
pub(crate) fn shorten(text: &[u8]) -> Vec<u8> {
    let mut short = Vec::with_capacity(text.len() + 1);
    if text.iter().any(|byte| (INTEGERS..=ENTRY).contains(byte)) {
        short.push(AS_IT_IS);
        short.extend_from_slice(text);
        return short;
    }
    short.push(SHORTENED);
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        let rest = &text[at..];
        let taken = match byte {
            b'{' => push_entry(rest, &mut short),
            b'[' | b',' => push_integers(rest, &mut short),
            b':' => push_number(rest, &mut short),
            _ => None,
        };
        at += taken.unwrap_or_else(|| {
            short.push(byte);
            1
        });
    }
    short
}

/// The inverse of [`shorten`]; says what is wrong with bytes that it did not make.
pub(crate) fn restore(short: &[u8]) -> Result<Vec<u8>, String> {
    let Some((&first, mut rest)) = short.split_first() else { return Err("nothing at all".to_owned()) };
    if first == AS_IT_IS {
        return Ok(rest.to_vec());
    }
    let mut text = Vec::with_capacity(rest.len() * 2);
    while let Some((&byte, behind)) = rest.split_first() {
        rest = behind;
        match byte {
            INTEGERS => {
                let mut numbers = Varints::new(rest);
                for index in 0..numbers.next()? {
                    if index > 0 {
                        text.push(b',');
                    }
                    push_decimal(&mut text, numbers.next()?);
                }
                rest = numbers.rest();
            }
            NUMBER => {
                let (value, behind) = rest.split_first_chunk::<4>().ok_or("a number that breaks off")?;
                text.extend_from_slice(python(f32::from_le_bytes(*value).into()).as_bytes());
                rest = behind;
            }
            ENTRY => {
                let end = string_end(rest).ok_or("a token that breaks off")?;
                let (token, behind) = (&rest[..end], &rest[end + 1..]);
                let (value, behind) = behind.split_first_chunk::<4>().ok_or("a log-prob that breaks off")?;
                push_written_entry(&mut text, token, f32::from_le_bytes(*value)).ok_or("a token that is no text")?;
                rest = behind;
            }
            byte => text.push(byte),
        }
    }
    Ok(text)
}

/// `[` or `,` and integers behind it. Gives how many bytes were replaced.
fn push_integers(text: &[u8], short: &mut Vec<u8>) -> Option<usize> {
    // Most commas stand before something else.
    text.get(1).filter(|byte| byte.is_ascii_digit())?;
    let mut values = Vec::new();
    let mut end = 1;
    while let Some((value, length)) = integer(&text[end..]) {
        values.push(value);
        end += length;
        if text.get(end) != Some(&b',') || !text.get(end + 1).is_some_and(u8::is_ascii_digit) {
            break;
        }
        end += 1;
    }
    // Behind a comma that was taken there may be no integer after all, such as 01.
    if text[end - 1] == b',' {
        end -= 1;
    }
    if values.len() < FEWEST_INTEGERS {
        return None;
    }
    short.extend_from_slice(&[text[0], INTEGERS]);
    push_varint(short, values.len() as u64);
    values.iter().for_each(|&value| push_varint(short, value));
    Some(end)
}

/// An integer as JSON writes it, and its length.
fn integer(text: &[u8]) -> Option<(u64, usize)> {
    const LONGEST: usize = 18;
    let mut value = 0;
    let mut length = 0;
    while let Some(digit) = text.get(length).filter(|byte| byte.is_ascii_digit()) {
        value = value * 10 + u64::from(digit - b'0');
        length += 1;
        if length > LONGEST {
            return None;
        }
    }
    (length == 1 || (length > 1 && text[0] != b'0')).then_some((value, length))
}

/// `:` and a number behind it.
fn push_number(text: &[u8], short: &mut Vec<u8>) -> Option<usize> {
    let (value, length) = number(&text[1..])?;
    short.extend_from_slice(&[b':', NUMBER]);
    short.extend_from_slice(&value.to_le_bytes());
    Some(1 + length)
}

/// A long number of single precision, and its length.
fn number(text: &[u8]) -> Option<(f32, usize)> {
    let is_part = |byte: &u8| byte.is_ascii_digit() || matches!(byte, b'-' | b'.' | b'e' | b'+');
    text.first().filter(|byte| byte.is_ascii_digit() || **byte == b'-')?;
    let length = text.iter().take_while(|byte| is_part(byte)).count();
    if length < SHORTEST_NUMBER {
        return None;
    }
    let written = std::str::from_utf8(&text[..length]).ok()?;
    let value: f64 = written.parse().ok()?;
    #[expect(clippy::cast_possible_truncation, reason = "whether anything was lost is seen in what it is written as")]
    let single = value as f32;
    (single.is_finite() && python(single.into()) == written).then_some((single, length))
}

fn push_entry(text: &[u8], short: &mut Vec<u8>) -> Option<usize> {
    let rest = text.strip_prefix(BEFORE_TOKEN)?;
    let token = &rest[..string_end(rest)?];
    let rest = rest[token.len()..].strip_prefix(BEFORE_LOG_PROB)?;
    let (value, _) = number(rest)?;
    let mut written = Vec::new();
    push_written_entry(&mut written, token, value)?;
    if !text.starts_with(&written) {
        return None;
    }
    short.push(ENTRY);
    short.extend_from_slice(token);
    short.push(b'"');
    short.extend_from_slice(&value.to_le_bytes());
    Some(written.len())
}

fn push_written_entry(text: &mut Vec<u8>, token: &[u8], log_prob: f32) -> Option<()> {
    let decoded;
    let bytes = if token.contains(&b'\\') {
        decoded = serde_json::from_slice::<String>(&[b"\"", token, b"\""].concat()).ok()?;
        decoded.as_bytes()
    } else {
        token
    };
    text.extend_from_slice(BEFORE_TOKEN);
    text.extend_from_slice(token);
    text.extend_from_slice(BEFORE_LOG_PROB);
    text.extend_from_slice(python(log_prob.into()).as_bytes());
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

/// A number as Python's `repr` and `json.dumps` write it.
fn python(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.unsigned_abs());
    }
    let mut plain = value.to_string();
    if !plain.contains('.') {
        plain.push_str(".0");
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn again(text: &str) -> usize {
        let short = shorten(text.as_bytes());
        assert_eq!(String::from_utf8_lossy(&restore(&short).unwrap()), text);
        short.len()
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
        assert_eq!(restore(&shorten(&bytes)).unwrap(), bytes);
    }

    #[test]
    fn numbers_are_written_as_python_writes_them() {
        for (value, written) in [
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-1.192_092_895_507_812_5e-7, "-1.1920928955078125e-07"),
            (123_456_789.5, "123456789.5"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
        ] {
            assert_eq!(python(value), written);
        }
    }

    #[test]
    fn bytes_that_were_not_made_here_are_an_error_not_a_panic() {
        for wrong in [&b""[..], &[1, INTEGERS, 5, 1], &[1, NUMBER, 1], &[1, ENTRY, b'a'], &[1, ENTRY, b'"', 0]] {
            assert!(restore(wrong).is_err(), "{wrong:?}");
        }
    }
}
