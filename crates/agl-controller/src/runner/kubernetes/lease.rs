//! Who leads where several controllers stand by: a Lease that its holder renews.
//!
//! As client-go does it: a candidate takes the Lease when it has seen it unchanged for a whole lease duration on its own
//! monotonic clock, so that no two clocks are compared. A leader that cannot renew in time stops leading before another one
//! may begin. One that was stopped and wakes up as a leader of the past does no harm: it asks the gateway before it gives a
//! Job its Secret, without which no pod starts.

use std::sync::Mutex;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Error};
use tokio::time::Instant;

use super::refusal::Refusal;

/// How long a Lease that nobody renews stands.
const DURATION: Duration = Duration::from_secs(15);
/// A leader that could not renew for so long stops leading.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// How often it is renewed, or looked at.
const PERIOD: Duration = Duration::from_secs(2);

/// One candidate for one Lease.
#[derive(Debug)]
pub(super) struct Election {
    api: Api<Lease>,
    name: String,
    identity: String,
    /// The Lease as it was last seen to change, and when that was.
    seen: Mutex<Option<(Option<String>, Instant)>>,
    /// When we last asked for the Lease and got it.
    renewed: Mutex<Instant>,
}

/// What a try at the Lease gave.
enum Try {
    Held,
    Elsewhere(String),
}

impl Election {
    pub(super) fn new(api: Api<Lease>, name: &str, identity: String) -> Self {
        Self { api, name: name.to_owned(), identity, seen: Mutex::new(None), renewed: Mutex::new(Instant::now()) }
    }

    /// Waits until the Lease is ours.
    pub(super) async fn won(&self) {
        let mut standing_by = None;
        let mut complained = false;
        loop {
            let asked = Instant::now();
            let tried = tokio::time::timeout(RENEW_DEADLINE, self.try_hold()).await;
            match tried.unwrap_or_else(|late| Err(Error::Service(late.into()))) {
                Ok(Try::Held) => {
                    tracing::info!(lease = self.name, identity = self.identity, "this controller leads");
                    self.note_renewed(asked);
                    return;
                }
                Ok(Try::Elsewhere(holder)) => {
                    if standing_by.as_ref() != Some(&holder) {
                        tracing::info!(lease = self.name, holder, "another controller leads; this one stands by");
                    }
                    standing_by = Some(holder);
                }
                Err(error) => {
                    if !std::mem::replace(&mut complained, true) {
                        tracing::warn!(lease = self.name, "cannot take the lease, trying again: {error}");
                    }
                }
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Renews the Lease until that fails for too long or another one holds it. May be dropped and called again.
    pub(super) async fn lost(&self) {
        loop {
            // Counted from the question: the others count from the answer to it.
            let deadline = self.renewed() + RENEW_DEADLINE;
            tokio::time::sleep_until(deadline.min(Instant::now() + PERIOD)).await;
            let asked = Instant::now();
            match tokio::time::timeout_at(deadline, self.try_hold()).await {
                Ok(Ok(Try::Held)) => self.note_renewed(asked),
                Ok(Ok(Try::Elsewhere(holder))) => {
                    tracing::warn!(lease = self.name, holder, "the lease went to another controller");
                    return;
                }
                Ok(Err(error)) => {
                    tracing::warn!(lease = self.name, "cannot renew the lease: {error}");
                    if Instant::now() >= deadline {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    }

    /// Gives the Lease back, so that another candidate need not wait.
    pub(super) async fn release(&self) {
        let released = async {
            let mut lease = self.api.get(&self.name).await?;
            let spec = lease.spec.get_or_insert_default();
            if spec.holder_identity.as_deref() == Some(&self.identity) {
                spec.holder_identity = None;
                self.api.replace(&self.name, &PostParams::default(), &lease).await?;
            }
            Ok::<_, Error>(())
        };
        if let Err(error) = released.await {
            tracing::debug!(lease = self.name, "the lease was not given back: {error}");
        }
    }

    fn renewed(&self) -> Instant {
        *self.renewed.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn note_renewed(&self, asked: Instant) {
        *self.renewed.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = asked;
    }

    async fn try_hold(&self) -> Result<Try, Error> {
        let parameters = PostParams::default();
        let Some(mut lease) = self.api.get_opt(&self.name).await? else {
            let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.ours(&LeaseSpec::default())) };
            return match self.api.create(&parameters, &lease).await {
                Ok(_) => Ok(Try::Held),
                Err(error) if Refusal::of(&error) == Refusal::Exists => Ok(Try::Elsewhere("another".to_owned())),
                Err(error) => Err(error),
            };
        };
        let spec = lease.spec.take().unwrap_or_default();
        let holder = spec.holder_identity.clone().filter(|holder| !holder.is_empty());
        let ours = holder.as_deref() == Some(&self.identity);
        if let Some(holder) = holder.filter(|_| !ours)
            && !self.has_expired(lease.metadata.resource_version.clone())
        {
            return Ok(Try::Elsewhere(holder));
        }
        lease.spec = Some(self.ours(&spec));
        match self.api.replace(&self.name, &parameters, &lease).await {
            Ok(_) => Ok(Try::Held),
            Err(error) if Refusal::of(&error) == Refusal::Conflict => Ok(Try::Elsewhere("another".to_owned())),
            Err(error) => Err(error),
        }
    }

    /// True once the Lease has been seen unchanged for its whole duration.
    fn has_expired(&self, version: Option<String>) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match &*seen {
            Some((known, since)) if *known == version => since.elapsed() >= DURATION,
            _ => {
                *seen = Some((version, Instant::now()));
                false
            }
        }
    }

    /// The Lease as we hold it after `before`. The times are for people: nobody compares them.
    fn ours(&self, before: &LeaseSpec) -> LeaseSpec {
        let now = MicroTime(k8s_openapi::jiff::Timestamp::now());
        let already = before.holder_identity.as_deref() == Some(&self.identity);
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            acquire_time: if already { before.acquire_time.clone() } else { Some(now.clone()) },
            renew_time: Some(now),
            lease_transitions: Some(before.lease_transitions.unwrap_or(0) + i32::from(!already)),
            ..before.clone()
        }
    }
}
