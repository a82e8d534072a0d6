//! How the gateways that share a store keep in touch: each checks in again and again, says how many calls it has under way, and
//! hears what all of them keep to.

use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::StoreError;
use crate::record::Pause;

/// What a store offers that several gateways can use at once.
#[async_trait]
pub trait Peers: Send + Sync {
    /// How long after its last check-in a gateway counts as alive. One that has not checked in for so long must not have calls
    /// under way: the others do not wait for it any more.
    fn lease(&self) -> Duration;
    /// Told of every change of the agreement, this gateway's own and those of others, once it can be read. The numbers are
    /// those of [`Agreement::epoch`].
    fn newest_agreement(&self) -> watch::Receiver<u64>;
    /// Says that this gateway lives and how it is doing, and hears what is agreed on. A change of the agreement comes either
    /// before this, and is heard, or after it, and finds this gateway among the living.
    async fn check_in(&self, presence: Presence) -> Result<Agreement, StoreError>;
    /// The gateways that live, this one among them, as they last checked in.
    async fn roll_call(&self) -> Result<Vec<Peer>, StoreError>;
}

/// What a gateway says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Presence {
    /// Calls at servers. During a pause that the gateway keeps this can only fall.
    pub inflight: u64,
    /// Calls that it holds.
    pub held: u64,
    /// The agreement that it keeps.
    pub epoch: u64,
}

/// What all gateways keep to: the pause, and the registered models.
#[derive(Clone, Debug, PartialEq)]
pub struct Agreement {
    /// Rises with every change of pause or models.
    pub epoch: u64,
    /// The pause, lapsed or not.
    pub pause: Option<Pause>,
    /// When a gateway last came or went, in seconds since the epoch: calls that were under way then may have been lost.
    pub last_upheaval: f64,
}

/// A gateway that lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Counts up with every start of a gateway on this store.
    pub number: u64,
    /// It is the one that asks.
    pub is_me: bool,
    /// What it said last.
    pub presence: Presence,
}
