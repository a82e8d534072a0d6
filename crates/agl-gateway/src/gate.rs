//! The gate before the upstream: closed by a pause, it holds calls and lets them go on at the resume.
//!
//! A call passes the gate once per try, and counts as in flight from there until its answer has been read. Whether the gate is
//! open and the count of calls in flight change under one lock: a pause that reports `inflight: 0` has none behind it.
//!
//! Where several gateways share a store ([`crate::peers`]), a gateway that the others no longer count as alive is fenced: it
//! lets no call through, as it would not hear of a pause.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use agl_store::Pause;
use tokio::sync::watch;

use crate::clock;

/// Shared by everything that sends calls and everything that pauses them.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<State>,
    /// Told of every change that may let a held call go on.
    changed: watch::Sender<()>,
    max_hold: Duration,
    max_held: usize,
}

#[derive(Debug, Default)]
struct State {
    pause: Option<Pause>,
    inflight: usize,
    held: usize,
    closing: bool,
    /// From then on the other gateways may take this one for dead. `None` where there are no others.
    fenced_from: Option<Instant>,
}

/// What keeps a call from passing.
enum Bar {
    Paused(Pause),
    Fenced,
}

/// What `/proxy/state` tells.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GateView {
    pub(crate) pause: Option<Pause>,
    pub(crate) inflight: usize,
    pub(crate) held: usize,
}

/// Why a call was not let through.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Refused {
    /// Too many calls are held, or this one was held too long.
    Paused {
        /// From the pause.
        retry_after_seconds: u64,
        /// From the pause.
        reason: Option<String>,
    },
    /// The gateway cannot reach its store, and this call was held for too long, or too many are.
    Fenced,
    /// The gateway stops.
    Closing,
}

/// A call at the upstream. Dropping it ends the call's part in `inflight`.
#[derive(Debug)]
pub(crate) struct Passage(Arc<Gate>);

impl Drop for Passage {
    fn drop(&mut self) {
        self.0.state().inflight -= 1;
    }
}

struct Held<'a>(&'a Gate);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.state().held -= 1;
    }
}

impl Gate {
    pub(crate) fn new(pause: Option<Pause>, max_hold: Duration, max_held: usize) -> Arc<Self> {
        let state = State { pause, ..State::default() };
        Arc::new(Self { state: Mutex::new(state), changed: watch::Sender::new(()), max_hold, max_held })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Counters and an option: whole after every statement.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes at once while the gate is open; else waits for the resume, the end of the lease, or its own limit.
    pub(crate) async fn pass(self: &Arc<Self>) -> Result<Passage, Refused> {
        let deadline = Instant::now() + self.max_hold;
        let mut changed = self.changed.subscribe();
        let mut held = None;
        loop {
            let lease_left = {
                let mut state = self.state();
                if state.closing {
                    return Err(Refused::Closing);
                }
                let Some(bar) = state.bar() else {
                    state.inflight += 1;
                    return Ok(Passage(Arc::clone(self)));
                };
                if (held.is_none() && state.held >= self.max_held) || Instant::now() >= deadline {
                    return Err(bar.refusal());
                }
                if held.is_none() {
                    state.held += 1;
                    held = Some(Held(self));
                }
                bar.lease_left()
            };
            let limit = deadline
                .saturating_duration_since(Instant::now())
                .min(lease_left.saturating_add(Duration::from_millis(1)));
            // Either way the state is looked at again: the timeout is the end of the lease or of our patience.
            let _woken = tokio::time::timeout(limit, changed.changed()).await;
        }
    }

    /// Closes the gate, or renews the pause that closed it.
    pub(crate) fn pause(&self, pause: Pause) {
        self.state().pause = Some(pause);
        self.changed.send_replace(());
    }

    /// Opens the gate; held calls go on.
    pub(crate) fn resume(&self) {
        self.state().pause = None;
        self.changed.send_replace(());
    }

    /// This gateway counts as alive until then.
    pub(crate) fn fence_from(&self, until: Instant) {
        let was_fenced = {
            let mut state = self.state();
            let was_fenced = state.is_fenced();
            state.fenced_from = Some(until);
            was_fenced
        };
        if was_fenced {
            self.changed.send_replace(());
        }
    }

    /// Resolves once this gateway is fenced: what it has under way then must end.
    pub(crate) async fn fenced(&self) {
        loop {
            let Some(from) = self.state().fenced_from else { return std::future::pending().await };
            if from <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(from.into()).await;
        }
    }

    /// Refuses held calls and every later one: the gateway stops.
    pub(crate) fn close(&self) {
        self.state().closing = true;
        self.changed.send_replace(());
    }

    pub(crate) fn view(&self) -> GateView {
        let mut state = self.state();
        GateView { pause: state.live_pause().cloned(), inflight: state.inflight, held: state.held }
    }
}

impl State {
    fn bar(&mut self) -> Option<Bar> {
        if self.is_fenced() {
            return Some(Bar::Fenced);
        }
        self.live_pause().cloned().map(Bar::Paused)
    }

    fn is_fenced(&self) -> bool {
        self.fenced_from.is_some_and(|from| from <= Instant::now())
    }

    /// The pause, unless its lease has lapsed: then it ends here.
    fn live_pause(&mut self) -> Option<&Pause> {
        if let Some(lapsed) = self.pause.take_if(|pause| pause.lease_expires_at <= clock::now()) {
            let owner = lapsed.owner.as_deref().unwrap_or("nobody in particular");
            tracing::warn!(owner, "the lease of the pause has lapsed: calls go on. Did the trainer die?");
        }
        self.pause.as_ref()
    }
}

impl Bar {
    fn refusal(self) -> Refused {
        match self {
            Self::Paused(Pause { retry_after_seconds, reason, .. }) => Refused::Paused { retry_after_seconds, reason },
            Self::Fenced => Refused::Fenced,
        }
    }

    /// After so long it ends by itself.
    fn lease_left(&self) -> Duration {
        match self {
            Self::Paused(pause) => Duration::from_secs_f64((pause.lease_expires_at - clock::now()).max(0.0)),
            Self::Fenced => Duration::MAX,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paused_for(seconds: f64) -> Pause {
        Pause { retry_after_seconds: 5, reason: None, owner: None, lease_expires_at: clock::now() + seconds }
    }

    fn gate(max_hold: Duration, max_held: usize) -> Arc<Gate> {
        Gate::new(None, max_hold, max_held)
    }

    #[tokio::test]
    async fn a_held_call_goes_on_at_the_resume() {
        let gate = gate(Duration::from_secs(9), 10);
        gate.pause(paused_for(60.0));
        let waiting = tokio::spawn({
            let gate = Arc::clone(&gate);
            async move { gate.pass().await }
        });
        while gate.view().held == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(gate.view().inflight, 0);
        gate.resume();
        let passage = waiting.await.unwrap().unwrap();
        assert_eq!((gate.view().held, gate.view().inflight), (0, 1));
        drop(passage);
        assert_eq!(gate.view().inflight, 0);
    }

    #[tokio::test]
    async fn a_lapsed_lease_opens_the_gate_by_itself() {
        let gate = gate(Duration::from_secs(9), 10);
        gate.pause(paused_for(0.05));
        gate.pass().await.unwrap();
        assert_eq!(gate.view().pause, None);
    }

    #[tokio::test]
    async fn a_call_is_refused_when_it_was_held_too_long_or_too_many_are() {
        let patient = gate(Duration::from_millis(20), 10);
        patient.pause(paused_for(60.0));
        assert_eq!(patient.pass().await.unwrap_err(), Refused::Paused { retry_after_seconds: 5, reason: None });
        assert_eq!(patient.view().held, 0);

        let full = gate(Duration::from_secs(9), 0);
        full.pause(paused_for(60.0));
        assert!(matches!(full.pass().await.unwrap_err(), Refused::Paused { .. }));
    }

    #[tokio::test]
    async fn a_caller_that_gives_up_is_no_longer_held() {
        let gate = gate(Duration::from_secs(9), 10);
        gate.pause(paused_for(60.0));
        let gave_up = tokio::time::timeout(Duration::from_millis(10), gate.pass()).await;
        assert!(gave_up.is_err());
        assert_eq!(gate.view().held, 0);
    }

    #[tokio::test]
    async fn a_fenced_gate_holds_calls_until_it_is_heard_of_again_and_tells_those_that_are_under_way() {
        let gate = gate(Duration::from_secs(9), 10);
        gate.fence_from(Instant::now() + Duration::from_millis(30));
        let under_way = gate.pass().await.unwrap();
        gate.fenced().await;
        drop(under_way);
        let (passage, ()) = tokio::join!(gate.pass(), async {
            while gate.view().held == 0 {
                tokio::task::yield_now().await;
            }
            gate.fence_from(Instant::now() + Duration::from_secs(60));
        });
        assert!(passage.is_ok());
        gate.fence_from(Instant::now());
        let impatient = Gate::new(None, Duration::ZERO, 10);
        impatient.fence_from(Instant::now());
        assert_eq!(impatient.pass().await.unwrap_err(), Refused::Fenced);
    }

    #[tokio::test]
    async fn a_closing_gate_refuses_what_it_holds() {
        let gate = gate(Duration::from_secs(9), 10);
        gate.pause(paused_for(60.0));
        let (refused, ()) = tokio::join!(gate.pass(), async { gate.close() });
        assert_eq!(refused.unwrap_err(), Refused::Closing);
    }
}
