//! Calls under way, and whoever waits for their answers. A harness that hangs up and asks the same again does not cost a second
//! answer: it takes its seat in the call that still runs, once the connection of the first is gone. Equal calls that are made
//! beside each other stay apart.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};

use super::recorder::AttemptKey;
use super::reply::Reply;
use crate::error::ApiError;

/// What comes of a call.
pub(crate) type Outcome = Result<Reply, ApiError>;

/// A connection that waits for an answer. It is gone once it has dropped its end.
pub(crate) type Taker = oneshot::Sender<Outcome>;

/// What makes calls equal: the attempt, and the digest of the request.
type Question = (AttemptKey, [u8; 32]);

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Flights(Mutex<HashMap<Question, Vec<Arc<Flight>>>>);

struct Flight {
    call_id: String,
    /// Guarded by the map's lock: who joins and who leaves see one order.
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// Its connection is gone: somebody may take the seat.
    orphaned: bool,
    newcomer: Option<Taker>,
}

/// A call's place among the flights, and whoever waits for it now.
pub(crate) struct Seat {
    flights: Arc<Flights>,
    question: Question,
    flight: Arc<Flight>,
    taker: Option<Taker>,
}

impl Flight {
    fn state(&self) -> MutexGuard<'_, State> {
        // Two fields that are set together: whole after every statement.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flights {
    fn known(&self) -> MutexGuard<'_, HashMap<Question, Vec<Arc<Flight>>>> {
        // A map of handles: whole after every statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins an equal call whose connection is gone, and gives its id; or gives the taker back where there is none.
    pub(crate) fn join(&self, key: &AttemptKey, digest: [u8; 32], taker: Taker) -> Result<String, Taker> {
        let known = self.known();
        let equal = known.get(&(key.clone(), digest)).map_or(&[][..], Vec::as_slice);
        let Some(flight) = equal.iter().find(|flight| flight.state().orphaned) else { return Err(taker) };
        *flight.state() = State { orphaned: false, newcomer: Some(taker) };
        flight.changed.notify_one();
        Ok(flight.call_id.clone())
    }

    /// True while an equal call is under way.
    pub(crate) fn has_equal(&self, key: &AttemptKey, digest: [u8; 32]) -> bool {
        self.known().contains_key(&(key.clone(), digest))
    }

    /// Begins a flight.
    pub(crate) fn board(self: &Arc<Self>, key: &AttemptKey, digest: [u8; 32], call_id: &str, taker: Taker) -> Seat {
        let flight = Arc::new(Flight { call_id: call_id.to_owned(), state: Mutex::default(), changed: Notify::new() });
        let question = (key.clone(), digest);
        self.known().entry(question.clone()).or_default().push(Arc::clone(&flight));
        Seat { flights: Arc::clone(self), question, flight, taker: Some(taker) }
    }
}

impl Seat {
    /// Resolves once the connection is gone and no other has come for as long as `grace` says; nobody can join any more then.
    pub(crate) async fn is_abandoned(&mut self, grace: impl Fn() -> Duration) {
        loop {
            if self.is_taken() {
                if let Some(taker) = &mut self.taker {
                    taker.closed().await;
                }
                continue;
            }
            tokio::select! {
                () = self.flight.changed.notified() => {}
                () = tokio::time::sleep(grace()) => {
                    if self.leave() {
                        return;
                    }
                }
            }
        }
    }

    /// True while somebody waits for the answer. Otherwise the seat is free from now on.
    pub(crate) fn is_taken(&mut self) -> bool {
        let _order = self.flights.known();
        let mut state = self.flight.state();
        if let Some(newcomer) = state.newcomer.take() {
            self.taker = Some(newcomer);
        }
        let taken = self.taker.as_ref().is_some_and(|taker| !taker.is_closed());
        if !taken {
            self.taker = None;
        }
        state.orphaned = !taken;
        taken
    }

    /// Ends the flight: nobody can join any more. Gives whoever waits.
    pub(crate) fn land(mut self) -> Option<Taker> {
        self.forget();
        self.is_taken().then(|| self.taker.take()).flatten()
    }

    /// Leaves the flights unless somebody has just come.
    fn leave(&self) -> bool {
        let mut known = self.flights.known();
        if self.flight.state().newcomer.is_some() {
            return false;
        }
        remove(&mut known, &self.question, &self.flight);
        true
    }

    fn forget(&self) {
        remove(&mut self.flights.known(), &self.question, &self.flight);
    }
}

fn remove(known: &mut HashMap<Question, Vec<Arc<Flight>>>, question: &Question, gone: &Arc<Flight>) {
    if let Some(equal) = known.get_mut(question) {
        equal.retain(|flight| !Arc::ptr_eq(flight, gone));
        if equal.is_empty() {
            known.remove(question);
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.forget();
    }
}
