//! Request and response bodies, compressed: they are most of what a store holds and are read rarely.

use bytes::Bytes;

use crate::StoreError;

/// Favours speed: a body is compressed while a harness waits for its answer.
const ZSTD_LEVEL: i32 = 1;

/// One body as it went over the wire, zstd-compressed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body(Bytes);

impl Body {
    /// Compresses. Takes about 3 ms per megabyte: large bodies belong on a blocking thread.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] where zstd fails, which it does only without memory.
    pub fn compress(raw: &[u8]) -> Result<Self, StoreError> {
        zstd::bulk::compress(raw, ZSTD_LEVEL).map(|packed| Self(packed.into())).map_err(|error| unreadable(&error))
    }

    /// A body as a store kept it.
    #[must_use]
    pub fn from_stored(packed: Vec<u8>) -> Self {
        Self(packed.into())
    }

    /// The compressed bytes, for a store to keep.
    #[must_use]
    pub fn stored(&self) -> &[u8] {
        &self.0
    }

    /// The bytes as they went over the wire.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if these are not the bytes that [`Body::compress`] made.
    pub fn read(&self) -> Result<Vec<u8>, StoreError> {
        zstd::stream::decode_all(&*self.0).map_err(|error| unreadable(&error))
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
        assert!(Body::from_stored(b"not zstd".to_vec()).read().is_err());
    }
}
