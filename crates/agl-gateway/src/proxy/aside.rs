//! Work on large bodies, away from the threads that others wait for.

use std::num::NonZero;
use std::sync::LazyLock;

use tokio::sync::Semaphore;

use super::recorder::RecordError;

/// More at once than there are processors would only use more memory: every thread keeps what it has freed.
static TURNS: LazyLock<Semaphore> =
    LazyLock::new(|| Semaphore::new(std::thread::available_parallelism().map_or(2, NonZero::get)));

/// Does the work on a blocking thread, as soon as a processor may be free for it.
pub(crate) async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, RecordError> {
    let turn = TURNS.acquire().await;
    let done = tokio::task::spawn_blocking(work).await.map_err(|_| RecordError::Lost);
    drop(turn);
    done
}
