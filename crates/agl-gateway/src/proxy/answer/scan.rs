//! JSON read in one pass over its bytes, for answers of many kilobytes of which a few fields count. What is passed over is looked at
//! only as far as needed to find its end; whatever does not look as expected ends the scan, and the answer is read with more care
//! elsewhere.

use agl_core::digits;

/// A place in a text.
pub(super) struct Scan<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Scan<'a> {
    /// At the beginning.
    pub(super) fn new(text: &'a str) -> Self {
        Self { text: text.as_bytes(), at: 0 }
    }

    /// The next byte that is no space.
    fn peek(&mut self) -> Option<u8> {
        while self.text.get(self.at).is_some_and(|byte| matches!(byte, b' ' | b'\n' | b'\r' | b'\t')) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn take(&mut self, wanted: u8) -> Option<()> {
        (self.peek()? == wanted).then(|| self.at += 1)
    }

    /// True where nothing but space is left.
    pub(super) fn is_at_end(&mut self) -> bool {
        self.peek().is_none()
    }

    /// An object: `field` is called behind each key, and is to take the value.
    pub(super) fn object(&mut self, mut field: impl FnMut(&mut Self, &'a [u8]) -> Option<()>) -> Option<()> {
        self.take(b'{')?;
        if self.take(b'}').is_some() {
            return Some(());
        }
        loop {
            let key = self.string()?;
            self.take(b':')?;
            field(self, key)?;
            if self.take(b',').is_none() {
                return self.take(b'}');
            }
        }
    }

    /// An array: `item` is to take each value.
    pub(super) fn array(&mut self, mut item: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.take(b'[')?;
        if self.take(b']').is_some() {
            return Some(());
        }
        loop {
            item(self)?;
            if self.take(b',').is_none() {
                return self.take(b']');
            }
        }
    }

    /// `None` inside where the value is null; otherwise what `value` takes.
    pub(super) fn nullable<T>(&mut self, value: impl FnOnce(&mut Self) -> Option<T>) -> Option<Option<T>> {
        if self.peek()? == b'n' {
            return self.skip().map(|()| None);
        }
        value(self).map(Some)
    }

    /// A string, without its quotes and as it is written.
    pub(super) fn string(&mut self) -> Option<&'a [u8]> {
        self.take(b'"')?;
        let start = self.at;
        loop {
            match self.text.get(self.at)? {
                b'"' => break,
                b'\\' => self.at += 2,
                _ => self.at += 1,
            }
        }
        let string = self.text.get(start..self.at);
        self.at += 1;
        string
    }

    /// A number.
    pub(super) fn number(&mut self) -> Option<f64> {
        let first = self.peek()?;
        let start = self.at;
        let is_part = |byte: &u8| byte.is_ascii_digit() || matches!(byte, b'-' | b'+' | b'.' | b'e' | b'E');
        while self.text.get(self.at).is_some_and(is_part) {
            self.at += 1;
        }
        let written = std::str::from_utf8(&self.text[start..self.at]).ok()?;
        written.parse().ok().filter(|_| first == b'-' || first.is_ascii_digit())
    }

    /// A whole number.
    pub(super) fn integer(&mut self) -> Option<u64> {
        self.peek()?;
        let (value, length) = digits::integer(&self.text[self.at..])?;
        self.at += length;
        Some(value)
    }

    /// A list of token ids.
    pub(super) fn ids(&mut self) -> Option<Vec<u32>> {
        self.peek()?;
        let rest = &self.text[self.at..];
        let end = memchr::memchr(b']', rest)? + 1;
        self.at += end;
        digits::list(&rest[..end])
    }

    /// Any value, as it is written.
    pub(super) fn raw(&mut self) -> Option<&'a [u8]> {
        self.peek()?;
        let start = self.at;
        self.skip()?;
        self.text.get(start..self.at)
    }

    /// Passes over any value.
    pub(super) fn skip(&mut self) -> Option<()> {
        match self.peek()? {
            b'"' => self.string().map(|_| ()),
            b'{' | b'[' => self.skip_nested(),
            _ => {
                let is_end = |byte: &u8| matches!(byte, b',' | b']' | b'}' | b' ' | b'\n' | b'\r' | b'\t');
                let length = self.text[self.at..].iter().position(is_end).unwrap_or(self.text.len() - self.at);
                let scalar = &self.text[self.at..self.at + length];
                self.at += length;
                serde_json::from_slice::<serde::de::IgnoredAny>(scalar).ok().map(|_| ())
            }
        }
    }

    fn skip_nested(&mut self) -> Option<()> {
        let mut depth = 0_u32;
        loop {
            match self.text.get(self.at)? {
                b'"' => {
                    self.string()?;
                    continue;
                }
                b'{' | b'[' => depth += 1,
                b'}' | b']' => depth -= 1,
                _ => {}
            }
            self.at += 1;
            if depth == 0 {
                return Some(());
            }
        }
    }
}
