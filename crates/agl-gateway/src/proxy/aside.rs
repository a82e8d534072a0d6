//! Work on large bodies, away from the threads that others wait for.

use super::recorder::RecordError;

/// As [`agl_store::aside`]; work that panics is lost.
pub(crate) async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, RecordError> {
    agl_store::aside(work).await.ok_or(RecordError::Lost)
}
