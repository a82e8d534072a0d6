//! Lists of whole numbers in JSON, such as token ids: most of what an inference server answers, and read several times per call.

/// The whole number that the text begins with, as JSON writes it, and how many bytes it takes; `None` for more than 18 digits.
#[must_use]
#[inline]
pub fn integer(text: &[u8]) -> Option<(u64, usize)> {
    let Some(eight) = text.first_chunk::<8>() else { return digit_by_digit(text) };
    // Eight bytes at once: what is no digit has its highest bit set in `others`.
    let digits = u64::from_le_bytes(*eight) ^ 0x3030_3030_3030_3030;
    let others = (digits.wrapping_add(0x7676_7676_7676_7676) | digits) & 0x8080_8080_8080_8080;
    let length = others.trailing_zeros() / 8;
    if length == 0 || length == 8 {
        return digit_by_digit(text);
    }
    if length > 1 && text[0] == b'0' {
        return None;
    }
    // Zeros in front; then pairs, fours and all eight are put together.
    let digits = digits << (64 - 8 * length);
    let pairs = digits.wrapping_mul(10).wrapping_add(digits >> 8);
    let even = (pairs & 0x0000_00ff_0000_00ff).wrapping_mul(0x000f_4240_0000_0064);
    let odd = ((pairs >> 16) & 0x0000_00ff_0000_00ff).wrapping_mul(0x0000_2710_0000_0001);
    Some((even.wrapping_add(odd) >> 32, length as usize))
}

fn digit_by_digit(text: &[u8]) -> Option<(u64, usize)> {
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

/// A JSON list of whole numbers below 2³², with whatever space between them; `None` where it is anything else.
#[must_use]
pub fn list(text: &[u8]) -> Option<Vec<u32>> {
    let mut rest = trimmed(text.strip_prefix(b"[")?.strip_suffix(b"]")?);
    if rest.is_empty() {
        return Some(Vec::new());
    }
    // A number and its comma are six bytes or so.
    let mut values = Vec::with_capacity(rest.len() / 5 + 4);
    loop {
        let (value, length) = integer(rest)?;
        values.push(u32::try_from(value).ok()?);
        rest = &rest[length..];
        match rest {
            [] => break,
            [b',', next, ..] if next.is_ascii_digit() => rest = &rest[1..],
            _ => match trimmed(rest) {
                [] => break,
                behind => rest = trimmed(behind.strip_prefix(b",")?),
            },
        }
    }
    values.shrink_to_fit();
    Some(values)
}

/// Without the space in front of it, as JSON knows it.
fn trimmed(text: &[u8]) -> &[u8] {
    let space = text.iter().take_while(|byte| matches!(byte, b' ' | b'\n' | b'\r' | b'\t')).count();
    &text[space..]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_no_list_of_token_ids_is_none() {
        for text in [
            "",
            "[",
            "]",
            "1",
            "[1,]",
            "[,1]",
            "[01]",
            "[1 2]",
            "[1.5]",
            "[-1]",
            "[1e3]",
            "[4294967296]",
            "[\"1\"]",
            "[null]",
            "[1],",
        ] {
            assert_eq!(list(text.as_bytes()), None, "{text}");
        }
        assert_eq!(list(b"[1,\x0c2]"), None);
        assert_eq!(list(b"[ 1 , 2,3 ,\n4294967295 ]"), Some(vec![1, 2, 3, u32::MAX]));
        assert_eq!((list(b"[]"), list(b"[ ]")), (Some(Vec::new()), Some(Vec::new())));
    }

    proptest! {
        #[test]
        fn numbers_are_read_as_serde_reads_them(values: Vec<u32>, spaced: bool) {
            let text = serde_json::to_string(&values).unwrap();
            let text = if spaced { text.replace(',', ", ") } else { text };
            prop_assert_eq!(list(text.as_bytes()), Some(values));
        }

        #[test]
        fn a_number_ends_where_its_digits_do(value in 0..1_000_000_000_000_000_000_u64, behind in "[^0-9]{0,9}") {
            let text = format!("{value}{behind}");
            prop_assert_eq!(integer(text.as_bytes()), Some((value, value.to_string().len())));
        }
    }

    #[test]
    fn leading_zeros_and_too_many_digits_are_refused() {
        for text in ["01", "00", "012345678", "1234567890123456789", "x1234567", ""] {
            assert_eq!(integer(text.as_bytes()), None, "{text}");
        }
        for (text, value) in
            [("0", 0), ("0,123456", 0), ("7", 7), ("12345678", 12_345_678), ("123456789,", 123_456_789)]
        {
            assert_eq!(integer(text.as_bytes()).map(|(value, _)| value), Some(value), "{text}");
        }
    }
}
