//! Calls under way, and whoever waits for their answers. A harness that hangs up and asks the same again does not cost a second
//! answer: it takes its seat in the call that still runs, once the connection of the first is gone. Equal calls that are made
//! beside each other stay apart.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;

use super::live::Words;
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
    taken: Option<Taken>,
    /// What has been told already, for whoever takes the seat in the middle of a stream.
    told: BytesMut,
    /// Since when nobody has it.
    free_since: Option<Instant>,
}

/// Who has a seat.
pub(crate) enum Taken {
    /// Waits for the answer.
    Waiting(Taker),
    /// Is being told it.
    Listening(mpsc::UnboundedSender<Words>),
}

impl Taken {
    fn is_gone(&self) -> bool {
        match self {
            Self::Waiting(taker) => taker.is_closed(),
            Self::Listening(listener) => listener.is_closed(),
        }
    }

    async fn gone(&mut self) {
        match self {
            Self::Waiting(taker) => taker.closed().await,
            Self::Listening(listener) => listener.closed().await,
        }
    }
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
        let taken = Some(Taken::Waiting(taker));
        Seat { flights: Arc::clone(self), question, flight, taken, told: BytesMut::new(), free_since: None }
    }
}

impl Seat {
    /// Resolves once the connection is gone and no other has come for as long as `grace` says; nobody can join any more then.
    /// May be dropped and asked again: the time counts from when the seat became free.
    pub(crate) async fn is_abandoned(&mut self, grace: impl Fn() -> Duration) {
        loop {
            if self.is_taken() {
                self.catch_up();
                if let Some(taken) = &mut self.taken {
                    taken.gone().await;
                }
                continue;
            }
            let free_since = *self.free_since.get_or_insert_with(Instant::now);
            tokio::select! {
                () = self.flight.changed.notified() => {}
                () = tokio::time::sleep_until(free_since + grace()) => {
                    if self.leave() {
                        return;
                    }
                }
            }
        }
    }

    /// Tells whoever has the seat, and whoever will have it, a piece of the answer.
    pub(crate) fn tell(&mut self, words: Bytes) {
        self.told.extend_from_slice(&words);
        match &self.taken {
            Some(Taken::Listening(listener)) if !listener.is_closed() => {
                let _gone = listener.send(Words::More(words));
            }
            _ => {
                if self.is_taken() {
                    self.catch_up();
                }
            }
        }
    }

    /// Begins to tell a connection that only waits what has been told so far.
    fn catch_up(&mut self) {
        if self.told.is_empty() || !matches!(self.taken, Some(Taken::Waiting(_))) {
            return;
        }
        if let Some(Taken::Waiting(taker)) = self.taken.take() {
            let (listener, line) = mpsc::unbounded_channel();
            let _held = listener.send(Words::More(self.told.clone().freeze()));
            // A connection that is gone has dropped the line with the reply.
            let _gone = taker.send(Ok(Reply::live(line)));
            self.taken = Some(Taken::Listening(listener));
        }
    }

    /// True while somebody waits for the answer. Otherwise the seat is free from now on.
    pub(crate) fn is_taken(&mut self) -> bool {
        let _order = self.flights.known();
        let mut state = self.flight.state();
        if let Some(newcomer) = state.newcomer.take() {
            self.taken = Some(Taken::Waiting(newcomer));
        }
        let taken = self.taken.as_ref().is_some_and(|taken| !taken.is_gone());
        if taken {
            self.free_since = None;
        } else {
            self.taken = None;
        }
        state.orphaned = !taken;
        taken
    }

    /// Ends the flight: nobody can join any more. Gives whoever waits or listens.
    pub(crate) fn land(mut self) -> Option<Taken> {
        self.forget();
        let is_taken = self.is_taken();
        self.catch_up();
        is_taken.then(|| self.taken.take()).flatten()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn words_that_nobody_hears_do_not_keep_a_call_alive() {
        let key = AttemptKey { rollout_id: "r".to_owned(), attempt_id: "0".to_owned() };
        let (taker, connection) = oneshot::channel();
        let mut seat = Arc::new(Flights::default()).board(&key, [0; 32], "call-1", taker);
        drop(connection);
        let mut told = 0;
        loop {
            tokio::select! {
                () = seat.is_abandoned(|| Duration::from_millis(50)) => break,
                () = tokio::time::sleep(Duration::from_millis(5)) => seat.tell(Bytes::from_static(b"word ")),
            }
            told += 1;
            assert!(told < 1000, "the grace begins anew with every word");
        }
    }
}
