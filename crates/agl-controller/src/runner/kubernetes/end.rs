//! A Job and its pods are ended, however often that has to be asked for.

use std::time::Duration;

use kube::api::DeleteParams;

use super::Shared;
use super::refusal::Refusal;

/// Between two tries at a request that failed.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// How long the end of a Job's pods is waited for, once the API server has heard of it, before it is left to the cluster.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// How often pods that belong to nobody are asked to end.
const AGAIN: Duration = Duration::from_secs(5);

impl Shared {
    /// Ends a Job and its pods, and waits until they are gone.
    pub(super) async fn end(&self, name: &str) {
        let mut changed = self.observed.subscribe(name);
        self.delete(name).await;
        let gone = async {
            while !self.observed.is_over(name) {
                self.end_left_pods(name).await;
                let _ = tokio::time::timeout(AGAIN, changed.changed()).await;
            }
        };
        if tokio::time::timeout(PATIENCE, gone).await.is_err() {
            tracing::warn!(job = name, "it is being deleted, and the cluster has not ended it yet");
        }
    }

    /// Asks for a Job's end, and its pods' with it. Tried until the API server hears it.
    pub(super) async fn delete(&self, name: &str) {
        let mut retry = Retry::new();
        while let Err(error) = self.jobs.delete(name, &DeleteParams::foreground()).await {
            match Refusal::of(&error) {
                Refusal::NotFound(_) => return,
                other => retry.wait(&format!("{other:?}"), name).await,
            }
        }
    }

    /// Ends pods whose Job is gone or over. A Job may be deleted without its pods; and one that reaches its deadline in the
    /// moment when its pod is made has been seen to forget that pod.
    pub(super) async fn end_left_pods(&self, name: &str) {
        if self.observed.job(name).is_some_and(|job| job.ended.is_none()) {
            return;
        }
        for pod in self.observed.pods(name).iter().filter(|pod| !pod.deleting) {
            if let Err(error) = self.pods.delete(&pod.name, &DeleteParams::default()).await {
                tracing::warn!(pod = pod.name, "cannot delete it: {error}");
            }
        }
    }
}

/// Waits longer with each failure of a request.
pub(super) struct Retry(Duration);

impl Retry {
    pub(super) fn new() -> Self {
        Self(RETRY.0)
    }

    pub(super) async fn wait(&mut self, why: &str, job: &str) {
        if self.0 < RETRY.1 {
            tracing::debug!(job, wait = ?self.0, "trying again: {why}");
        } else {
            tracing::warn!(job, "still trying: {why}");
        }
        tokio::time::sleep(self.0).await;
        self.0 = (self.0 * 2).min(RETRY.1);
    }
}
