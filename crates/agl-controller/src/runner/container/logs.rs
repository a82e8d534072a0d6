//! What a container writes, kept as it is written: its engine keeps only the end of it.

use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bollard::container::LogOutput;
use bollard::query_parameters::LogsOptionsBuilder;
use futures_util::StreamExt;
use tokio::task::JoinHandle;

use super::engine::Engine;
use super::refusal::Refusal;
use crate::supervisor::log::LimitedLog;

/// Before a stream that broke is asked for again.
const RETRY: Duration = Duration::from_millis(200);
/// How long the rest of a log is waited for once its container has ended.
const REST: Duration = Duration::from_secs(10);

/// Where the two streams of a container go.
#[derive(Clone, Debug)]
pub(super) struct LogFiles {
    pub(super) stdout: PathBuf,
    pub(super) stderr: PathBuf,
    pub(super) limit: u64,
}

/// Reads a container's output until it ends. Dropped before, it stops.
pub(super) struct Follower(JoinHandle<()>);

impl Follower {
    pub(super) fn start(engine: Arc<Engine>, name: String, files: LogFiles) -> Self {
        Self(tokio::spawn(async move {
            while !follow(&engine, &name, &files).await {
                tokio::time::sleep(RETRY).await;
            }
        }))
    }

    /// Waits until all is kept that the container wrote.
    pub(super) async fn finished(&mut self) {
        if tokio::time::timeout(REST, &mut self.0).await.is_err() {
            tracing::warn!("the rest of a container's log does not come; it is left out");
            self.0.abort();
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Keeps the output from its beginning, or what the engine still has of it. False where the stream broke before its end.
async fn follow(engine: &Engine, name: &str, files: &LogFiles) -> bool {
    let kept = async {
        let mut out = LimitedLog::create(&files.stdout, files.limit)?;
        let mut err = LimitedLog::create(&files.stderr, files.limit)?;
        let options = LogsOptionsBuilder::default().follow(true).stdout(true).stderr(true).tail("all").build();
        let mut stream = pin!(engine.docker().logs(name, Some(options)));
        let mut broken = false;
        while let Some(output) = stream.next().await {
            match output {
                Ok(LogOutput::StdErr { message }) => err.write(&message)?,
                Ok(output) => out.write(&output.into_bytes())?,
                Err(error) => {
                    let refusal = Refusal::of(&error);
                    if let Refusal::Away(message) = &refusal {
                        engine.note_absence(message);
                        broken = true;
                    }
                    tracing::debug!(name, broken, "its log breaks off: {}", refusal.message());
                    break;
                }
            }
        }
        out.finish()?;
        err.finish()?;
        io::Result::Ok(!broken)
    };
    kept.await.unwrap_or_else(|error| {
        tracing::warn!(name, "its log cannot be kept: {error}");
        true
    })
}
