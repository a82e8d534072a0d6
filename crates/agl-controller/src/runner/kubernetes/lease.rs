//! Who leads where several controllers stand by: a Lease that its holder renews.
//!
//! As client-go does it: a candidate takes the Lease when it has seen it unchanged for a whole lease duration on its own
//! monotonic clock, so that no two clocks are compared. A leader that cannot renew in time stops leading before another one
//! may begin. Two that lead for a moment all the same do no harm: Jobs have fixed names, and the gateway's state machine
//! lets one of them claim a rollout.

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
}

/// What a try at the Lease gave.
enum Try {
    Held,
    Elsewhere(String),
}

impl Election {
    pub(super) fn new(api: Api<Lease>, name: &str, identity: String) -> Self {
        Self { api, name: name.to_owned(), identity, seen: Mutex::new(None) }
    }

    /// Waits until the Lease is ours.
    pub(super) async fn won(&self) {
        let mut standing_by = None;
        let mut complained = false;
        loop {
            match self.try_hold().await {
                Ok(Try::Held) => {
                    tracing::info!(lease = self.name, identity = self.identity, "this controller leads");
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

    /// Renews the Lease until that fails for too long or another one holds it.
    pub(super) async fn lost(&self) {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(PERIOD).await;
            match tokio::time::timeout_at(renewed + RENEW_DEADLINE, self.try_hold()).await {
                Ok(Ok(Try::Held)) => renewed = Instant::now(),
                Ok(Ok(Try::Elsewhere(holder))) => {
                    tracing::warn!(lease = self.name, holder, "the lease went to another controller");
                    return;
                }
                Ok(Err(error)) => {
                    tracing::warn!(lease = self.name, "cannot renew the lease: {error}");
                    if renewed.elapsed() >= RENEW_DEADLINE {
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
