//! The other gateways on the same store, where there can be any.
//!
//! Each gateway checks in with the store again and again: it says how many calls it has under way, and hears what all keep to,
//! the pause and the models. A change of these is told to it at once. Whoever pauses waits until every gateway that lives has
//! said that it keeps the pause: what is counted as in flight then can only end.
//!
//! A gateway that cannot check in is taken for dead after a lease, and its calls are not waited for any more. It is fenced a
//! little earlier by its own clock ([`Gate::fenced`]), so that it has none under way then.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use agl_store::{Presence, SharedStore, StoreError};
use axum::http::StatusCode;

use crate::clock;
use crate::error::ApiError;
use crate::gate::{Gate, GateView};
use crate::proxy::servers::Servers;

/// Between two check-ins where nothing happens.
const CHECK_IN_EVERY: Duration = Duration::from_secs(1);
/// While others wait for this gateway's calls to end.
const DRAIN_EVERY: Duration = Duration::from_millis(25);
/// After a check-in that failed.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(250);
/// Between two looks whether the others have heard.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// See the [module](self).
pub(crate) struct Peers {
    store: SharedStore,
    gate: Arc<Gate>,
    servers: Arc<Servers>,
    /// The epoch of the agreement that this gateway keeps. One check-in at a time: what is heard is applied in its order.
    kept: tokio::sync::Mutex<u64>,
    last_upheaval: Mutex<f64>,
}

impl Peers {
    /// Checks in for the first time, and goes on with it until this is dropped.
    pub(crate) async fn join(
        store: SharedStore,
        gate: Arc<Gate>,
        servers: Arc<Servers>,
    ) -> Result<Arc<Self>, StoreError> {
        let (kept, last_upheaval) = (tokio::sync::Mutex::new(0), Mutex::new(clock::now()));
        let peers = Arc::new(Self { store, gate, servers, kept, last_upheaval });
        if let Some(shared) = peers.store.peers() {
            let news = shared.newest_agreement();
            peers.check_in().await?;
            tokio::spawn(keep_in_touch(Arc::downgrade(&peers), news));
        }
        Ok(peers)
    }

    /// When this gateway started, or where there are others, when one last came or went: in seconds since the epoch. Calls that
    /// were under way then may have been lost.
    pub(crate) fn last_upheaval(&self) -> f64 {
        *self.last_upheaval.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns once every gateway that lives keeps what is agreed on now.
    pub(crate) async fn agree(&self) -> Result<(), ApiError> {
        let Some(shared) = self.store.peers() else { return Ok(()) };
        let epoch = self.check_in().await?;
        // One that does not check in any more is out of the roll call by then.
        let deadline = Instant::now() + 2 * shared.lease();
        loop {
            let alive = shared.roll_call().await?;
            let Some(behind) = alive.iter().find(|peer| !peer.is_me && peer.presence.epoch < epoch) else {
                return Ok(());
            };
            if Instant::now() >= deadline {
                return Err(ApiError::new(
                    StatusCode::SERVICE_UNAVAILABLE,
                    format!(
                        "Gateway {} on this store lives but has not followed within {} seconds; ask again, and restart it if that does not help",
                        behind.number,
                        (2 * shared.lease()).as_secs()
                    ),
                ));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// The pause, and the calls of all gateways together. During a pause one that has not heard of it counts as having a call in
    /// flight.
    pub(crate) async fn view(&self) -> Result<GateView, StoreError> {
        let Some(shared) = self.store.peers() else { return Ok(self.gate.view()) };
        let epoch = self.check_in().await?;
        let mut view = self.gate.view();
        for peer in shared.roll_call().await?.into_iter().filter(|peer| !peer.is_me) {
            let Presence { inflight, held, epoch: keeps } = peer.presence;
            let may_have_one = view.pause.is_some() && keeps < epoch;
            view.inflight += count(inflight).max(usize::from(may_have_one));
            view.held += count(held);
        }
        Ok(view)
    }

    /// Checks in until this gateway keeps what is agreed on, and has said so. Gives the epoch of that.
    async fn check_in(&self) -> Result<u64, StoreError> {
        let Some(shared) = self.store.peers() else { return Ok(0) };
        let mut kept = self.kept.lock().await;
        loop {
            let asked = Instant::now();
            let GateView { inflight, held, .. } = self.gate.view();
            let presence = Presence { inflight: inflight as u64, held: held as u64, epoch: *kept };
            let agreed = shared.check_in(presence).await?;
            *self.last_upheaval.lock().unwrap_or_else(PoisonError::into_inner) = agreed.last_upheaval;
            if agreed.epoch == *kept {
                // The lease runs from when the store heard of us, which was not before we asked.
                self.gate.fence_from(asked + shared.lease() * 4 / 5);
                return Ok(*kept);
            }
            // First the models: a call that the end of a pause lets go on finds the newest.
            self.servers.refresh().await?;
            match agreed.pause {
                Some(pause) => self.gate.pause(pause),
                None => self.gate.resume(),
            }
            *kept = agreed.epoch;
        }
    }
}

fn count(calls: u64) -> usize {
    usize::try_from(calls).unwrap_or(usize::MAX)
}

async fn keep_in_touch(peers: Weak<Peers>, mut news: tokio::sync::watch::Receiver<u64>) {
    let mut failing = false;
    loop {
        let Some(peers) = peers.upgrade() else { return };
        news.mark_unchanged();
        let wait = match peers.check_in().await {
            Ok(_) => {
                if std::mem::take(&mut failing) {
                    tracing::info!("this gateway is in touch with its store again");
                }
                let GateView { pause, inflight, .. } = peers.gate.view();
                if pause.is_some() && inflight > 0 { DRAIN_EVERY } else { CHECK_IN_EVERY }
            }
            Err(StoreError::Closed) => return,
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::error!(%error, "this gateway is out of touch with its store: soon it holds all calls until it is back");
                }
                TRY_AGAIN_AFTER
            }
        };
        drop(peers);
        if let Ok(Err(_)) = tokio::time::timeout(wait, news.changed()).await {
            return;
        }
    }
}
