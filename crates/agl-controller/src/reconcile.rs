//! The loop: what changed, what is due, who has ended.
//!
//! What is wanted comes from the gateway, as a stream of changes and again, whole, with every resync; what there is comes
//! from the runner. The difference decides. A change that was missed, or seen twice, costs time and nothing else.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use agl_client::{Change, ChangeKind, ClientError, GatewayClient};
use agl_core::rollout::{Rollout, RolloutState};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::attempt::{Attempts, Due, Next, Stop};
use crate::config::OnShutdown;

/// How many rollouts a resync asks for at once.
const PAGE: usize = 500;
/// How long a shutdown waits for reports to the gateway, beyond the time that agents have to end.
const REPORT_GRACE: Duration = Duration::from_secs(5);
/// When there is nothing to wait for.
const LONG: Duration = Duration::from_secs(3600);

/// Where each rollout stands that we have to do with. Only the loop touches it: no locks.
pub(crate) struct Board {
    attempts: Arc<Attempts>,
    max_concurrent: usize,
    /// Attempts that wait for a place, oldest rollout first; the second number keeps the order of arrival.
    due: BTreeMap<(u64, u64), Due>,
    /// Attempts that give infrastructure time to recover. They hold no place meanwhile.
    resting: BTreeMap<(Instant, u64), Due>,
    arrivals: u64,
    places: HashMap<String, Place>,
    tasks: JoinSet<Outcome>,
    names: HashMap<tokio::task::Id, String>,
    /// How often in a row something went wrong with a rollout that is none of its attempts' failures.
    troubles: HashMap<String, u32>,
    /// What is looked after beside the rollouts: strays, and places that the gateway did not list.
    chores: JoinSet<Chore>,
    resync: Resync,
}

type Outcome = Result<Next, ClientError>;

/// What became of a chore.
enum Chore {
    Done(Result<(), ClientError>),
    /// This rollout has ended or is gone, as the gateway says.
    Ended(String),
    /// A page of all that has not ended; another follows where it is full.
    Page(Result<Vec<Rollout>, ClientError>),
}

/// Where one rollout stands.
enum Place {
    Waiting((u64, u64)),
    Resting((Instant, u64)),
    /// A task has to do with it: with this attempt, or it is about to find out with which.
    Active(watch::Sender<Option<Stop>>, Option<u32>),
}

/// The comparison of all that the gateway has with all that we have.
struct Resync {
    every: Option<Duration>,
    next: Instant,
    under_way: Option<Pass>,
}

/// One such comparison, page by page.
struct Pass {
    /// Who was here when it began and has not been listed yet.
    unseen: HashSet<String>,
}

impl Board {
    pub(crate) fn new(attempts: Attempts) -> Self {
        let every = Some(attempts.config.resync_seconds).filter(|seconds| *seconds > 0.0);
        let every = every.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let mut board = Self {
            max_concurrent: attempts.config.max_concurrent.unwrap_or_else(|| attempts.runner.capacity()),
            attempts: Arc::new(attempts),
            due: BTreeMap::new(),
            resting: BTreeMap::new(),
            arrivals: 0,
            places: HashMap::new(),
            tasks: JoinSet::new(),
            names: HashMap::new(),
            troubles: HashMap::new(),
            chores: JoinSet::new(),
            resync: Resync { every, next: Instant::now() + every.unwrap_or(LONG), under_way: None },
        };
        // Their rollouts may have ended while no controller ran: no snapshot tells of those.
        board.reclaim_strays();
        board
    }

    /// The gateway.
    pub(crate) fn client(&self) -> GatewayClient {
        self.attempts.client.clone()
    }

    /// Waits for one thing to happen and takes note of it. May be dropped and called again.
    pub(crate) async fn turn(&mut self) {
        let wake = self.start_due();
        tokio::select! {
            Some(ended) = self.tasks.join_next_with_id() => self.note_end(ended),
            Some(chore) = self.chores.join_next() => match chore {
                Ok(chore) => self.note_chore(chore),
                Err(error) => tracing::error!(%error, "a task of the controller broke"),
            },
            () = tokio::time::sleep_until(wake) => {}
        }
    }

    /// Takes notice of a change. It may be older than what we know: what matters is asked again where it is acted upon.
    pub(crate) fn note(&mut self, change: Change) {
        let rollout_id = change.rollout_id;
        let Some(rollout) = change.rollout.filter(|rollout| !rollout.status.state.is_terminal()) else {
            self.withdraw(&rollout_id);
            return;
        };
        if let Some(Place::Active(stop, Some(number))) = self.places.get(&rollout_id)
            && rollout.current_attempt().parse().is_ok_and(|current: u32| current > *number)
        {
            stop.send_if_modified(|reason| reason.is_none() && reason.replace(Stop::Superseded).is_none());
            return;
        }
        // Later than in a snapshot `running` is the echo of our own doing, or another controller's.
        if rollout.status.state == RolloutState::Queuing || change.kind == ChangeKind::Snapshot {
            self.note_wanted(rollout);
        }
    }

    /// The gateway wants this rollout run.
    fn note_wanted(&mut self, rollout: Rollout) {
        if self.places.contains_key(&rollout.rollout_id) || !self.attempts.runner.takes(&rollout) {
            return;
        }
        match rollout.status.state {
            RolloutState::Queuing => self.enqueue(Due::first(rollout)),
            RolloutState::Running => self.take_up(rollout),
            RolloutState::Succeeded | RolloutState::Failed => {}
        }
    }

    fn enqueue(&mut self, due: Due) {
        // Positive floats are ordered as their bits are.
        let key = (due.rollout.status.created_at.max(0.0).to_bits(), self.arrivals);
        self.arrivals += 1;
        self.places.insert(due.rollout.rollout_id.clone(), Place::Waiting(key));
        self.due.insert(key, due);
    }

    fn rest(&mut self, due: Due) {
        let key = (Instant::now() + due.wait, self.arrivals);
        self.arrivals += 1;
        self.places.insert(due.rollout.rollout_id.clone(), Place::Resting(key));
        self.resting.insert(key, due);
    }

    /// The rollout was ended or deleted.
    fn withdraw(&mut self, rollout_id: &str) {
        match self.places.get(rollout_id) {
            Some(Place::Waiting(key)) => drop(self.due.remove(key)),
            Some(Place::Resting(key)) => drop(self.resting.remove(key)),
            Some(Place::Active(stop, _)) => {
                stop.send_replace(Some(Stop::Ended));
                return;
            }
            None => return,
        }
        self.places.remove(rollout_id);
    }

    fn take_up(&mut self, rollout: Rollout) {
        let attempts = self.attempts.clone();
        let rollout_id = rollout.rollout_id;
        let now = Duration::ZERO;
        self.spawn(rollout_id.clone(), None, async move |stop| attempts.take_up_again(&rollout_id, now, stop).await);
    }

    /// Takes a rollout up again after a while, as the gateway and the runner then tell that it stands.
    fn take_up_later(&mut self, rollout_id: String) {
        let troubles = self.troubles.entry(rollout_id.clone()).or_default();
        *troubles += 1;
        let (attempts, wait) = (self.attempts.clone(), self.attempts.config.backoff(*troubles));
        self.spawn(rollout_id.clone(), None, async move |stop| attempts.take_up_again(&rollout_id, wait, stop).await);
    }

    /// Looks after what the runner still holds of rollouts that nobody here has to do with.
    fn reclaim_strays(&mut self) {
        for (rollout_id, attempt_id) in self.attempts.runner.held() {
            if !self.places.contains_key(&rollout_id) {
                self.reclaim(rollout_id, attempt_id);
            }
        }
    }

    fn reclaim(&mut self, rollout_id: String, attempt_id: String) {
        let attempts = self.attempts.clone();
        self.chores.spawn(async move { Chore::Done(attempts.reclaim(&rollout_id, &attempt_id).await) });
    }

    /// Starts as many attempts as there are places for and the pace allows. Says when there is more to do.
    fn start_due(&mut self) -> Instant {
        let now = Instant::now();
        while let Some(entry) = self.resting.first_entry().filter(|entry| entry.key().0 <= now) {
            let due = entry.remove();
            self.enqueue(due);
        }
        let mut wake = now + LONG;
        while !self.due.is_empty() && self.tasks.len() < self.max_concurrent {
            if let Err(later) = self.attempts.runner.may_start(now) {
                wake = wake.min(later);
                break;
            }
            let Some((_, due)) = self.due.pop_first() else { break };
            self.start(due);
        }
        if let Some(((until, _), _)) = self.resting.first_key_value() {
            wake = wake.min(*until);
        }
        if self.resync.every.is_some() && self.resync.under_way.is_none() {
            if self.resync.next <= now {
                self.begin_resync();
            } else {
                wake = wake.min(self.resync.next);
            }
        }
        wake
    }

    fn start(&mut self, due: Due) {
        let attempts = self.attempts.clone();
        let (rollout_id, number) = (due.rollout.rollout_id.clone(), due.number);
        self.spawn(rollout_id, Some(number), async move |stop| attempts.attempt(due, stop).await);
    }

    fn spawn<F, T>(&mut self, rollout_id: String, attempt: Option<u32>, work: F)
    where
        F: FnOnce(watch::Receiver<Option<Stop>>) -> T,
        T: Future<Output = Outcome> + Send + 'static,
    {
        let (stop, stopped) = watch::channel(None);
        let handle = self.tasks.spawn(work(stopped));
        self.names.insert(handle.id(), rollout_id.clone());
        self.places.insert(rollout_id, Place::Active(stop, attempt));
    }

    fn note_end(&mut self, ended: Result<(tokio::task::Id, Outcome), tokio::task::JoinError>) {
        let (id, outcome) = match ended {
            Ok((id, outcome)) => (id, Some(outcome)),
            Err(error) => {
                tracing::error!(%error, "a task of the controller broke");
                (error.id(), None)
            }
        };
        let Some(rollout_id) = self.names.remove(&id) else { return };
        let stopped = match self.places.remove(&rollout_id) {
            Some(Place::Active(stop, _)) => *stop.borrow(),
            _ => None,
        };
        let ended_from_outside = matches!(stopped, Some(Stop::Ended | Stop::Shutdown));
        let outcome = match outcome {
            Some(Ok(next)) => Some(next),
            Some(Err(error)) if error.is_not_found() => Some(Next::Nothing),
            Some(Err(error)) => {
                tracing::error!(rollout_id, "cannot go on with this rollout now, trying again later: {error}");
                None
            }
            None => None,
        };
        let Some(next) = outcome else {
            self.take_up_later(rollout_id);
            return;
        };
        if ended_from_outside || matches!(next, Next::Nothing) {
            self.troubles.remove(&rollout_id);
        }
        match next {
            Next::Attempt(due) if ended_from_outside => self.reclaim(rollout_id, due.number.to_string()),
            // It runs already: it needs no place, it has one.
            Next::Attempt(due) if due.found.is_some() => self.start(*due),
            Next::Attempt(due) if due.wait.is_zero() => self.enqueue(*due),
            Next::Attempt(due) => self.rest(*due),
            Next::Nothing => {}
        }
    }

    fn begin_resync(&mut self) {
        self.resync.under_way = Some(Pass { unseen: self.places.keys().cloned().collect() });
        self.ask_for_page(None);
    }

    fn ask_for_page(&mut self, after: Option<String>) {
        let client = self.attempts.client.clone();
        self.chores.spawn(async move {
            let states = [RolloutState::Queuing, RolloutState::Running];
            Chore::Page(client.list_rollouts(&states, PAGE, after.as_deref(), None).await)
        });
    }

    fn note_chore(&mut self, chore: Chore) {
        match chore {
            Chore::Done(Ok(())) => {}
            Chore::Done(Err(error)) => tracing::error!("cannot look after what is left of an attempt: {error}"),
            Chore::Ended(rollout_id) => self.withdraw(&rollout_id),
            Chore::Page(Ok(page)) => {
                let last = page.last().filter(|_| page.len() == PAGE).map(|rollout| rollout.rollout_id.clone());
                for rollout in page {
                    if let Some(pass) = &mut self.resync.under_way {
                        pass.unseen.remove(&rollout.rollout_id);
                    }
                    let rollout_id = rollout.rollout_id.clone();
                    self.note(Change { cursor: 0, kind: ChangeKind::Snapshot, rollout_id, rollout: Some(rollout) });
                }
                match last {
                    Some(last) => self.ask_for_page(Some(last)),
                    None => self.end_resync(),
                }
            }
            // Also where the last rollout of the page before has been deleted since: the next pass begins anew.
            Chore::Page(Err(error)) => {
                tracing::debug!("a resync broke off: {error}");
                self.resync.under_way = None;
                self.resync.next = Instant::now() + self.resync.every.unwrap_or(LONG);
            }
        }
    }

    /// All pages are there: what was not listed has ended, and the change that said so was missed.
    fn end_resync(&mut self) {
        let unseen = self.resync.under_way.take().map(|pass| pass.unseen).unwrap_or_default();
        self.resync.next = Instant::now() + self.resync.every.unwrap_or(LONG);
        for rollout_id in unseen.into_iter().filter(|id| self.places.contains_key(id)) {
            let client = self.attempts.client.clone();
            self.chores.spawn(async move {
                match client.get_rollout(&rollout_id).await {
                    Ok(detail) if !detail.rollout.status.state.is_terminal() => Chore::Done(Ok(())),
                    Err(error) if !error.is_not_found() => Chore::Done(Err(error)),
                    Ok(_) | Err(_) => Chore::Ended(rollout_id),
                }
            });
        }
        self.reclaim_strays();
        self.prune();
    }

    fn prune(&mut self) {
        let keep_for =
            self.attempts.config.keep_folders_seconds.and_then(|keep| Duration::try_from_secs_f64(keep).ok());
        let Some(before) = keep_for.and_then(|keep| SystemTime::now().checked_sub(keep)) else { return };
        let (work_dir, keep) = (self.attempts.work_dir.clone(), self.places.keys().cloned().collect());
        self.chores.spawn_blocking(move || {
            let pruned = work_dir.prune(&keep, before);
            if pruned > 0 {
                tracing::info!(pruned, "deleted the folders of rollouts that ended long ago");
            }
            Chore::Done(Ok(()))
        });
    }

    /// Ends or leaves what runs, as configured, and waits for it.
    pub(crate) async fn shut_down(self) {
        self.attempts.runner.wind_down();
        if self.attempts.config.on_shutdown == OnShutdown::Leave || self.attempts.runner.outlives_us() {
            tracing::info!(running = self.tasks.len(), "controller ends; its agents go on");
            self.leave().await;
        } else {
            self.end_all().await;
        }
    }

    /// Lets everything go on without us.
    pub(crate) async fn leave(mut self) {
        self.attempts.leave.set(true);
        self.chores.abort_all();
        self.tasks.abort_all();
        while self.tasks.join_next().await.is_some() {}
    }

    async fn end_all(mut self) {
        self.due.clear();
        tracing::info!(running = self.tasks.len(), "controller ends and ends its agents");
        for place in self.places.values() {
            if let Place::Active(stop, _) = place {
                stop.send_if_modified(|reason| reason.is_none() && reason.replace(Stop::Shutdown).is_none());
            }
        }
        let patience = Duration::from_secs_f64(self.attempts.config.kill_grace_seconds) + REPORT_GRACE;
        let ended = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(patience, ended).await.is_err() {
            tracing::warn!(
                unreported = self.tasks.len(),
                "controller ends before all its reports have reached the gateway; the next one reports them"
            );
        }
    }
}
