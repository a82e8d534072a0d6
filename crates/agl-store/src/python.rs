//! Numbers as Python writes them, without memory of their own: most of what inference servers answer was written by it.

/// A number as Python's `repr` and `json.dumps` write it: the fewest digits that give it back.
pub(crate) struct Written {
    bytes: [u8; 32],
    length: usize,
}

impl Written {
    /// Of a finite number.
    pub(crate) fn of(value: f64) -> Self {
        let mut written = Self { bytes: [0; 32], length: 0 };
        if value.is_sign_negative() {
            written.push(b"-");
        }
        let Digits { digits, count, point } = Digits::of(value.abs());
        let digits = &digits[..count];
        if !(-3..=16).contains(&point) {
            written.push(&digits[..1]);
            if count > 1 {
                written.push(b".");
                written.push(&digits[1..]);
            }
            let exponent = point - 1;
            written.push(if exponent < 0 { b"e-" } else { b"e+" });
            let exponent = exponent.unsigned_abs();
            if exponent > 99 {
                written.push_digit(exponent / 100);
            }
            written.push_digit(exponent / 10);
            written.push_digit(exponent);
            return written;
        }
        const ZEROS: [u8; 16] = [b'0'; 16];
        let before = usize::try_from(point).unwrap_or_default();
        match before {
            0 => written.push(b"0"),
            _ => written.push(&digits[..before.min(count)]),
        }
        written.push(&ZEROS[..before.saturating_sub(count)]);
        written.push(b".");
        written.push(&ZEROS[..usize::try_from(-point).unwrap_or_default()]);
        written.push(if before < count { &digits[before..] } else { b"0" });
        written
    }

    fn push(&mut self, bytes: &[u8]) {
        let end = self.length + bytes.len();
        if let Some(room) = self.bytes.get_mut(self.length..end) {
            room.copy_from_slice(bytes);
            self.length = end;
        }
    }

    fn push_digit(&mut self, digit: u32) {
        self.push(&[b'0' + (digit % 10) as u8]);
    }

    /// ASCII.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// A number as 0.DIGITS · 10^point, with as few digits as give it back.
struct Digits {
    digits: [u8; 20],
    count: usize,
    point: i32,
}

impl Digits {
    /// Of a finite number that is not negative.
    fn of(value: f64) -> Self {
        let mut buffer = zmij::Buffer::new();
        let mut found = Self { digits: [b'0'; 20], count: 0, point: 0 };
        let (mut behind, mut exponent, mut is_exponent, mut sign) = (false, 0, false, 1);
        for byte in buffer.format_finite(value).bytes() {
            match byte {
                b'.' => behind = true,
                b'+' => {}
                b'e' => is_exponent = true,
                b'-' => sign = -1,
                digit if is_exponent => exponent = exponent * 10 + i32::from(digit - b'0'),
                // Zeros in front only move the point.
                b'0' if found.count == 0 => found.point -= i32::from(behind),
                digit => {
                    if let Some(place) = found.digits.get_mut(found.count) {
                        *place = digit;
                    }
                    found.count += 1;
                    found.point += i32::from(!behind);
                }
            }
        }
        found.point += sign * exponent;
        while found.count > 1 && found.digits.get(found.count - 1) == Some(&b'0') {
            found.count -= 1;
        }
        if found.count == 0 {
            // Zero itself.
            (found.count, found.point) = (1, 1);
        }
        found.count = found.count.min(found.digits.len());
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(String::from_utf8_lossy(Written::of(value).as_bytes()), written);
        }
        // Of two that are equally near, Python takes the even one.
        assert_eq!(String::from_utf8_lossy(Written::of(f64::from(763.101_14_f32)).as_bytes()), "763.1011352539062");
        for step in 0..20_000_u32 {
            let value = f64::from(f32::from_bits(step.wrapping_mul(2_654_435_761)));
            if value.is_finite() {
                let written = Written::of(value);
                let text = std::str::from_utf8(written.as_bytes()).unwrap();
                assert_eq!(text.parse(), Ok(value));
                // As few digits as the standard library needs.
                let digits = |text: &str| {
                    let digits = text.split('e').next().unwrap_or_default().replace(['-', '.'], "");
                    digits.trim_matches('0').len()
                };
                assert_eq!(digits(text), digits(&format!("{value:e}")), "{text}");
            }
        }
    }
}
