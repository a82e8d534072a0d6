//! The Job of an attempt and its Secret are made, or joined where they are there already.

use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{DynamicObject, PostParams};

use super::KubernetesRun;
use crate::runner::Outcome;
use crate::runner::kubernetes::end::Retry;
use crate::runner::kubernetes::facts::JobFacts;
use crate::runner::kubernetes::job::{CREATED_AT, created_at, job, secret};
use crate::runner::kubernetes::refusal::Refusal;
use crate::runner::names::{ATTEMPT_ID, INSTANCE, ROLLOUT_ID};

/// How long the API server may refuse what we have a right to.
const FORBIDDEN_PATIENCE: Duration = Duration::from_secs(30);

impl KubernetesRun {
    /// Makes the Job, then the Secret that it owns: what is made after a crash in between has no key, so that it never
    /// starts. Whatever is there already is taken as it is.
    pub(super) async fn make(&mut self) -> Result<(), Outcome> {
        let uid = self.make_job().await?;
        let made = match self.is_wanted().await {
            true => self.make_secret(&uid).await,
            false => Err(Outcome::Lost("it was given up before it began".to_owned())),
        };
        if made.is_err() {
            self.shared.end(&self.name).await;
        }
        made
    }

    /// A controller that was asleep for long may not be the one that leads any more, and its attempt not one that counts.
    async fn is_wanted(&self) -> bool {
        let attempts = self.shared.client.list_attempts(&self.order.rollout.rollout_id).await;
        match attempts {
            Ok(attempts) => attempts.iter().any(|detail| {
                detail.attempt.attempt_id == self.order.attempt_id && !detail.attempt.state.is_terminal()
            }),
            Err(error) => !error.is_not_found(),
        }
    }

    /// Makes the Job and gives its uid.
    async fn make_job(&mut self) -> Result<String, Outcome> {
        let config = &self.shared.config.kubernetes;
        let manifest = job(&self.order, config, self.shared.config.sdk_environment)
            .map_err(|error| Outcome::Misconfigured(error.to_string()))?;
        let manifest: DynamicObject =
            serde_json::from_value(manifest).map_err(|error| Outcome::Misconfigured(error.to_string()))?;
        let mut retry = Retry::new();
        loop {
            match self.shared.dynamic_jobs.create(&PostParams::default(), &manifest).await {
                Ok(made) => {
                    let uid = made.uid().unwrap_or_default();
                    let facts = JobFacts {
                        uid: uid.clone(),
                        rollout_id: self.order.rollout.rollout_id.clone(),
                        attempt_id: self.order.attempt_id.clone(),
                        deleting: false,
                        ended: None,
                    };
                    self.shared.observed.note_created(&self.name, facts);
                    return Ok(uid);
                }
                Err(error) => match Refusal::of(&error) {
                    Refusal::Exists => match self.existing().await? {
                        Some(uid) => return Ok(uid),
                        None => retry.wait("there is an older one of this name", &self.name).await,
                    },
                    other => self.bear(other, "its Job cannot be made", &mut retry).await?,
                },
            }
        }
    }

    async fn make_secret(&self, uid: &str) -> Result<(), Outcome> {
        let mut retry = Retry::new();
        let wanted: Secret = serde_json::from_value(secret(&self.order, &self.shared.config.kubernetes, uid))
            .map_err(|error| Outcome::Misconfigured(error.to_string()))?;
        loop {
            let Err(error) = self.shared.secrets.create(&PostParams::default(), &wanted).await else { return Ok(()) };
            match Refusal::of(&error) {
                // Of this very Job, or of one that was deleted and is soon collected with it.
                Refusal::Exists => match self.shared.secrets.get_metadata_opt(&self.name).await {
                    Ok(Some(there)) if there.owner_references().iter().any(|owner| owner.uid == uid) => return Ok(()),
                    _ => retry.wait("there is an older Secret of this name", &self.name).await,
                },
                other => self.bear(other, "the Secret of its Job cannot be made", &mut retry).await?,
            }
        }
    }

    /// Waits where a request may go well later.
    async fn bear(&self, refusal: Refusal, what: &str, retry: &mut Retry) -> Result<(), Outcome> {
        match refusal {
            Refusal::Overloaded(wait, message) => {
                self.shared.hold(wait, &message);
                tokio::time::sleep(wait).await;
            }
            Refusal::Transient(message) => retry.wait(&message, &self.name).await,
            Refusal::Exists | Refusal::Conflict => retry.wait("it was changed by somebody else", &self.name).await,
            Refusal::Invalid(message) => {
                return Err(Outcome::Misconfigured(format!("{what}: the API server refuses it: {message}")));
            }
            // An API server that has just started may not know its rules yet.
            Refusal::Forbidden(message) | Refusal::NotFound(message)
                if self.waiting_since.elapsed() < FORBIDDEN_PATIENCE =>
            {
                retry.wait(&message, &self.name).await;
            }
            Refusal::Forbidden(message) | Refusal::NotFound(message) => {
                return Err(Outcome::Lost(format!("{what}: {message}")));
            }
        }
        Ok(())
    }

    /// The Job of our name that is there already, if it is ours; `None` while an older one is going.
    async fn existing(&self) -> Result<Option<String>, Outcome> {
        let there = match self.shared.jobs.get_opt(&self.name).await {
            Ok(Some(there)) => there,
            Ok(None) => return Ok(None),
            Err(error) => {
                tracing::debug!(job = self.name, "cannot look at it: {error}");
                return Ok(None);
            }
        };
        let annotation = |name: &str| there.annotations().get(name).map(String::as_str);
        let of_this_id = annotation(ROLLOUT_ID) == Some(&self.order.rollout.rollout_id)
            && annotation(ATTEMPT_ID) == Some(&self.order.attempt_id)
            && there.labels().get(INSTANCE) == Some(&self.shared.config.kubernetes.instance);
        let ours = of_this_id && annotation(CREATED_AT) == Some(&created_at(&self.order.rollout));
        match JobFacts::of(&there) {
            // Of a rollout that was deleted, and whose id is used again.
            Some(facts) if of_this_id && !ours && facts.ended.is_some() => {
                self.shared.delete(&self.name).await;
                Ok(None)
            }
            Some(facts) if ours && !facts.deleting => {
                let uid = facts.uid.clone();
                self.shared.observed.note_created(&self.name, facts);
                Ok(Some(uid))
            }
            _ if there.metadata.deletion_timestamp.is_some() => Ok(None),
            _ => Err(Outcome::Misconfigured(format!(
                "there is another Job {} in namespace {}; it is not ours: delete it, or use another namespace",
                self.name, self.shared.config.kubernetes.namespace
            ))),
        }
    }
}
