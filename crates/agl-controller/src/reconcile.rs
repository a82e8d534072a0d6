//! The loop: what changed, what is due, who has ended.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use agl_client::{Change, ChangeKind, ClientError, GatewayClient};
use agl_core::rollout::{Rollout, RolloutState};
use futures_util::StreamExt;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::attempt::{Due, Next, Runner, Stop};
use crate::config::{ControllerConfig, OnShutdown};
use crate::error::ControllerError;
use crate::launch::is_ours;
use crate::work_dir::WorkDir;

/// The controller waits for its gateway as long as it takes: agents go on meanwhile under their supervisors.
const PATIENCE: Duration = Duration::from_secs(365 * 24 * 3600);
/// How long a shutdown waits for reports to the gateway, beyond the time that agents have to end.
const REPORT_GRACE: Duration = Duration::from_secs(5);

/// Runs rollouts until it is told to end.
#[derive(Debug)]
pub struct Controller {
    config: ControllerConfig,
    client: GatewayClient,
}

impl Controller {
    /// A controller of the rollouts of one gateway.
    #[must_use]
    pub fn new(config: ControllerConfig, client: GatewayClient) -> Self {
        Self { config, client: client.with_patience(PATIENCE) }
    }

    /// Runs rollouts until `shutdown` is ready. First takes up what an earlier controller left in the work directory.
    ///
    /// # Errors
    /// [`ControllerError`] where it cannot begin, or the gateway refuses it.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), ControllerError> {
        self.config.check()?;
        if let Some(isolation) = &self.config.isolation {
            isolation.check(self.config.agent_url.as_deref().unwrap_or(self.client.base_url()))?;
        }
        let work_dir = WorkDir::open(&self.config.work_dir)?;
        let fault = |source| ControllerError::WorkDir { path: ".".into(), source };
        let cwd = std::env::current_dir().map_err(fault)?;
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned();
        tracing::info!(
            gateway = self.client.base_url(), work_dir = %self.config.work_dir.display(),
            max_concurrent = self.config.max_concurrent, "controller started"
        );
        let mut changes = self.client.watch(None);
        let mut board = Board::new(Runner {
            config: self.config,
            client: self.client,
            work_dir,
            host,
            cwd,
            leave: Arc::new(AtomicBool::new(false)),
        });
        board.reclaim_strays();
        tokio::pin!(shutdown);
        loop {
            tokio::select! {
                change = changes.next() => match change {
                    Some(Ok(change)) => board.note(change),
                    Some(Err(error @ ClientError::Unreachable { .. })) => tracing::warn!("{error}"),
                    Some(Err(error)) => {
                        board.shut_down().await;
                        return Err(error.into());
                    }
                    None => return Ok(()),
                },
                Some(ended) = board.tasks.join_next_with_id() => board.note_end(ended),
                () = &mut shutdown => break,
            }
            board.start_due();
        }
        board.shut_down().await;
        Ok(())
    }
}

/// Where each rollout stands that we have to do with. Only the loop touches it: no locks.
struct Board {
    runner: Arc<Runner>,
    /// Attempts that wait for a place, oldest rollout first; the second number keeps the order of arrival.
    due: BTreeMap<(u64, u64), Due>,
    arrivals: u64,
    places: HashMap<String, Place>,
    tasks: JoinSet<Outcome>,
    names: HashMap<tokio::task::Id, String>,
    /// How often in a row something went wrong with a rollout that is none of its attempts' failures.
    troubles: HashMap<String, u32>,
}

type Outcome = Result<Next, ClientError>;

/// Where one rollout stands.
enum Place {
    Waiting((u64, u64)),
    Active(watch::Sender<Option<Stop>>),
}

impl Board {
    fn new(runner: Runner) -> Self {
        Self {
            runner: Arc::new(runner),
            due: BTreeMap::new(),
            arrivals: 0,
            places: HashMap::new(),
            tasks: JoinSet::new(),
            names: HashMap::new(),
            troubles: HashMap::new(),
        }
    }

    /// Takes notice of a change. It may be older than what we know: what matters is asked again where it is acted upon.
    fn note(&mut self, change: Change) {
        let rollout_id = change.rollout_id;
        let Some(rollout) = change.rollout.filter(|rollout| !rollout.status.state.is_terminal()) else {
            self.withdraw(&rollout_id);
            return;
        };
        if self.places.contains_key(&rollout_id) || !is_ours(&rollout) {
            return;
        }
        match rollout.status.state {
            RolloutState::Queuing => self.enqueue(Due::first(rollout)),
            // Later than in a snapshot it is the echo of our own doing, or another controller's.
            RolloutState::Running if change.kind == ChangeKind::Snapshot => self.take_up(rollout),
            _ => {}
        }
    }

    fn enqueue(&mut self, due: Due) {
        // Positive floats are ordered as their bits are.
        let key = (due.rollout.status.created_at.max(0.0).to_bits(), self.arrivals);
        self.arrivals += 1;
        self.places.insert(due.rollout.rollout_id.clone(), Place::Waiting(key));
        self.due.insert(key, due);
    }

    /// The rollout was ended or deleted.
    fn withdraw(&mut self, rollout_id: &str) {
        match self.places.get(rollout_id) {
            Some(Place::Waiting(key)) => {
                self.due.remove(key);
                self.places.remove(rollout_id);
            }
            Some(Place::Active(stop)) => {
                stop.send_replace(Some(Stop::Ended));
            }
            None => {}
        }
    }

    fn take_up(&mut self, rollout: Rollout) {
        let runner = self.runner.clone();
        let rollout_id = rollout.rollout_id;
        self.spawn(rollout_id.clone(), async move |_| runner.take_up(&rollout_id).await);
    }

    /// Takes a rollout up again after a while, as the gateway and the work directory then tell that it stands.
    fn take_up_later(&mut self, rollout_id: String) {
        let troubles = self.troubles.entry(rollout_id.clone()).or_default();
        *troubles += 1;
        let (runner, wait) = (self.runner.clone(), self.runner.config.backoff(*troubles));
        self.spawn(rollout_id.clone(), async move |stop| runner.take_up_again(&rollout_id, wait, stop).await);
    }

    /// Looks after supervisors whose rollouts may have ended while no controller ran: no snapshot tells of those.
    fn reclaim_strays(&mut self) {
        for (rollout_id, attempt_id) in self.runner.work_dir.marked() {
            let runner = self.runner.clone();
            self.tasks.spawn(async move { runner.reclaim(&rollout_id, &attempt_id).await });
        }
    }

    /// Starts as many attempts as there are places for.
    fn start_due(&mut self) {
        while self.tasks.len() < self.runner.config.max_concurrent {
            let Some((_, due)) = self.due.pop_first() else { return };
            self.start(due);
        }
    }

    fn start(&mut self, due: Due) {
        let runner = self.runner.clone();
        self.spawn(due.rollout.rollout_id.clone(), async move |stop| runner.attempt(due, stop).await);
    }

    fn spawn<F, T>(&mut self, rollout_id: String, work: F)
    where
        F: FnOnce(watch::Receiver<Option<Stop>>) -> T,
        T: Future<Output = Outcome> + Send + 'static,
    {
        let (stop, stopped) = watch::channel(None);
        let handle = self.tasks.spawn(work(stopped));
        self.names.insert(handle.id(), rollout_id.clone());
        self.places.insert(rollout_id, Place::Active(stop));
    }

    fn note_end(&mut self, ended: Result<(tokio::task::Id, Outcome), tokio::task::JoinError>) {
        let (id, outcome) = match ended {
            Ok((id, outcome)) => (id, Some(outcome)),
            Err(error) => {
                tracing::error!(%error, "a task of the controller broke");
                (error.id(), None)
            }
        };
        let Some(rollout_id) = self.names.remove(&id) else {
            if let Some(Err(error)) = outcome {
                tracing::error!("cannot look after what an earlier controller left: {error}");
            }
            return;
        };
        let ended_from_outside =
            matches!(self.places.remove(&rollout_id), Some(Place::Active(stop)) if stop.borrow().is_some());
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
            Next::Attempt(_) if ended_from_outside => {}
            // It runs already: it needs no place, it has one.
            Next::Attempt(due) if due.found.is_some() => self.start(*due),
            Next::Attempt(due) => self.enqueue(*due),
            Next::Nothing => {}
        }
    }

    /// Ends or leaves what runs, as configured, and waits for it.
    async fn shut_down(mut self) {
        let leave = self.runner.config.on_shutdown == OnShutdown::Leave;
        self.runner.leave.store(leave, Ordering::Release);
        self.due.clear();
        if leave {
            tracing::info!(running = self.tasks.len(), "controller ends; its agents go on under their supervisors");
            self.tasks.abort_all();
            while self.tasks.join_next().await.is_some() {}
            return;
        }
        tracing::info!(running = self.tasks.len(), "controller ends and ends its agents");
        for place in self.places.values() {
            if let Place::Active(stop) = place {
                stop.send_if_modified(|reason| reason.is_none() && reason.replace(Stop::Shutdown).is_none());
            }
        }
        let patience = Duration::from_secs_f64(self.runner.config.kill_grace_seconds) + REPORT_GRACE;
        let ended = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(patience, ended).await.is_err() {
            tracing::warn!(
                unreported = self.tasks.len(),
                "controller ends before all its reports have reached the gateway; the next one reports from the work directory"
            );
        }
    }
}
