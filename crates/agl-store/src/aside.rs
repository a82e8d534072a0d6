//! Work on large bodies, away from the threads that others wait for.
//!
//! Threads of its own, as many as there are processors: an allocator keeps what a thread has freed for that thread, and tokio's blocking
//! threads, any of which may get the work, would keep tens of megabytes each.

use std::sync::OnceLock;

use rayon::{ThreadPool, ThreadPoolBuilder};
use tokio::sync::oneshot;

/// Does the work as soon as a processor may be free for it; `None` where it panicked.
pub async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    static POOL: OnceLock<Option<ThreadPool>> = OnceLock::new();
    let pool = POOL.get_or_init(|| {
        let pool = ThreadPoolBuilder::new().thread_name(|number| format!("agl-large-{number}"));
        // Whoever waits for it hears of it.
        pool.panic_handler(|_| ())
            .build()
            .inspect_err(|error| tracing::error!(%error, "no threads for large bodies"))
            .ok()
    });
    let Some(pool) = pool else { return tokio::task::spawn_blocking(work).await.ok() };
    let (done, outcome) = oneshot::channel();
    pool.spawn(move || {
        // Who asked may be gone.
        let _gone = done.send(work());
    });
    outcome.await.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_is_done_and_a_panic_concerns_nobody_else() {
        assert_eq!(aside(|| 1 + 1).await, Some(2));
        let panicked = aside(|| -> u32 { panic!("on purpose") }).await;
        assert_eq!(panicked, None);
        assert_eq!(aside(|| 3).await, Some(3));
    }
}
