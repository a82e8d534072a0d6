//! JSON read in one pass over its bytes, for answers of many kilobytes of which a few fields count. What is no JSON is refused, also where
//! it is passed over; whatever else does not look as expected ends the scan too, and the answer is read with more care elsewhere.

use agl_core::digits;

/// What is nested deeper is left to others.
const DEEPEST: u32 = 64;

/// A place in a text.
pub(super) struct Scan<'a> {
    text: &'a [u8],
    at: usize,
    /// Of what is passed over.
    depth: u32,
}

impl<'a> Scan<'a> {
    /// At the beginning.
    pub(super) fn new(text: &'a str) -> Self {
        Self { text: text.as_bytes(), at: 0, depth: 0 }
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
            // A key that is written with escapes may be one of ours.
            let key = self.string().filter(|key| !key.contains(&b'\\'))?;
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
                b'\\' => self.at += self.escape()?,
                0..0x20 => return None,
                _ => self.at += 1,
            }
        }
        let string = self.text.get(start..self.at);
        self.at += 1;
        string
    }

    /// How long the escape is that begins here.
    fn escape(&self) -> Option<usize> {
        match self.text.get(self.at + 1)? {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Some(2),
            b'u' => {
                let digits = self.text.get(self.at + 2..self.at + 6)?;
                digits.iter().all(u8::is_ascii_hexdigit).then_some(6)
            }
            _ => None,
        }
    }

    /// A number.
    pub(super) fn number(&mut self) -> Option<f64> {
        self.peek()?;
        let start = self.at;
        self.pass_number()?;
        std::str::from_utf8(&self.text[start..self.at]).ok()?.parse().ok()
    }

    fn pass_number(&mut self) -> Option<()> {
        self.at += usize::from(self.text.get(self.at) == Some(&b'-'));
        match self.text.get(self.at)? {
            b'0' => self.at += 1,
            _ => self.pass_digits()?,
        }
        if self.text.get(self.at) == Some(&b'.') {
            self.at += 1;
            self.pass_digits()?;
        }
        if matches!(self.text.get(self.at), Some(b'e' | b'E')) {
            self.at += 1;
            self.at += usize::from(matches!(self.text.get(self.at), Some(b'+' | b'-')));
            self.pass_digits()?;
        }
        Some(())
    }

    /// One digit or more.
    fn pass_digits(&mut self) -> Option<()> {
        let start = self.at;
        while self.text.get(self.at).is_some_and(u8::is_ascii_digit) {
            self.at += 1;
        }
        (self.at > start).then_some(())
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
            b'{' => self.deeper(|scan| scan.object(|scan, _| scan.skip())),
            b'[' => self.deeper(|scan| scan.array(Self::skip)),
            b't' => self.word(b"true"),
            b'f' => self.word(b"false"),
            b'n' => self.word(b"null"),
            _ => self.pass_number(),
        }
    }

    fn word(&mut self, word: &[u8]) -> Option<()> {
        self.text[self.at..].starts_with(word).then(|| self.at += word.len())
    }

    fn deeper(&mut self, pass: impl FnOnce(&mut Self) -> Option<()>) -> Option<()> {
        self.depth += 1;
        let passed = (self.depth <= DEEPEST).then(|| pass(self)).flatten();
        self.depth -= 1;
        passed
    }
}
