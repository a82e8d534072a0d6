//! Calls under way, and whoever waits for their answers. A harness that hangs up and asks the same again does not cost a second
//! answer: it takes its seat in the call that still runs.
//!
//! An equal call joins where the connection of the first is gone, or where it says that it is a retry. Equal calls that are
//! made beside each other on purpose stay apart.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::recorder::AttemptKey;
use super::reply::Reply;
use crate::error::ApiError;

/// What comes of a call.
pub(crate) type Outcome = Result<Reply, ApiError>;

/// A connection that waits for an answer.
pub(crate) struct Taker {
    pub(crate) answer: oneshot::Sender<Outcome>,
    /// Ends with the connection; nothing is ever sent.
    pub(crate) gone: oneshot::Receiver<()>,
}

/// A connection's end of a [`Taker`].
pub(crate) struct Waiter {
    pub(crate) answered: oneshot::Receiver<Outcome>,
    /// Dropped with the connection.
    pub(crate) present: oneshot::Sender<()>,
}

/// The two ends of a wait.
pub(crate) fn wait() -> (Taker, Waiter) {
    let (answer, answered) = oneshot::channel();
    let (present, gone) = oneshot::channel();
    (Taker { answer, gone }, Waiter { answered, present })
}

/// What makes calls equal: the attempt, and the digest of the request.
type Question = (AttemptKey, [u8; 32]);

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Flights(Mutex<HashMap<Question, Vec<Arc<Flight>>>>);

struct Flight {
    call_id: String,
    /// Its connection is gone.
    orphaned: AtomicBool,
    takers: mpsc::UnboundedSender<Taker>,
}

/// A call's place among the flights, and whoever waits for it now.
pub(crate) struct Seat {
    flights: Arc<Flights>,
    question: Question,
    flight: Arc<Flight>,
    taker: Option<Taker>,
    newcomers: mpsc::UnboundedReceiver<Taker>,
}

impl Flights {
    fn known(&self) -> MutexGuard<'_, HashMap<Question, Vec<Arc<Flight>>>> {
        // A map of handles: whole after every statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins an equal call under way, whose id is given back; or gives the taker back where there is none to join.
    pub(crate) fn join(
        &self,
        key: &AttemptKey,
        digest: [u8; 32],
        is_retry: bool,
        taker: Taker,
    ) -> Result<String, Taker> {
        let known = self.known();
        let equal = known.get(&(key.clone(), digest)).map_or(&[][..], Vec::as_slice);
        let Some(flight) = equal.iter().find(|flight| is_retry || flight.orphaned.load(Ordering::SeqCst)) else {
            return Err(taker);
        };
        flight.orphaned.store(false, Ordering::SeqCst);
        // The seat stays open as long as the flight is known.
        flight.takers.send(taker).map(|()| flight.call_id.clone()).map_err(|refused| refused.0)
    }

    /// Begins a flight.
    pub(crate) fn board(self: &Arc<Self>, key: &AttemptKey, digest: [u8; 32], call_id: &str, taker: Taker) -> Seat {
        let (takers, newcomers) = mpsc::unbounded_channel();
        let flight = Arc::new(Flight { call_id: call_id.to_owned(), orphaned: AtomicBool::new(false), takers });
        let question = (key.clone(), digest);
        self.known().entry(question.clone()).or_default().push(Arc::clone(&flight));
        Seat { flights: Arc::clone(self), question, flight, taker: Some(taker), newcomers }
    }
}

impl Seat {
    /// Resolves once the connection is gone and no other has come for as long as `grace` says.
    pub(crate) async fn is_abandoned(&mut self, grace: impl Fn() -> Duration) {
        loop {
            let is_taken = self.is_taken();
            let gone = async {
                match &mut self.taker {
                    // Resolves with an error: the other end is only ever dropped.
                    Some(taker) if is_taken => drop((&mut taker.gone).await),
                    _ => tokio::time::sleep(grace()).await,
                }
            };
            tokio::select! {
                biased;
                newcomer = self.newcomers.recv() => self.taker = newcomer.or(self.taker.take()),
                () = gone => {
                    if !is_taken {
                        return;
                    }
                    self.taker = None;
                    self.flight.orphaned.store(true, Ordering::SeqCst);
                }
            }
        }
    }

    /// True while somebody waits for the answer.
    pub(crate) fn is_taken(&mut self) -> bool {
        self.welcome();
        let is_there = |taker: &mut Taker| matches!(taker.gone.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        self.taker.as_mut().is_some_and(is_there)
    }

    /// Ends the flight: nobody can join any more. Gives whoever waits.
    pub(crate) fn land(mut self) -> Option<oneshot::Sender<Outcome>> {
        self.leave();
        self.is_taken().then(|| self.taker.take()).flatten().map(|taker| taker.answer)
    }

    /// The newest to come waits in place of the others.
    fn welcome(&mut self) {
        while let Ok(newcomer) = self.newcomers.try_recv() {
            self.taker = Some(newcomer);
        }
    }

    fn leave(&self) {
        let mut known = self.flights.known();
        if let Some(equal) = known.get_mut(&self.question) {
            equal.retain(|flight| !Arc::ptr_eq(flight, &self.flight));
            if equal.is_empty() {
                known.remove(&self.question);
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.leave();
    }
}
