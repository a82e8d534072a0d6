//! Who runs attempts, and where: processes of this host, containers, Kubernetes Jobs.
//!
//! [`crate::attempt`] tells the life of an attempt in the same words for all of them. A runner starts things and sees what
//! became of them; it judges nothing and reports nothing. Starting is safe to repeat: what has been started under the name
//! of an attempt is joined, not started again.
//!
//! * [`container`] — a container of this host's engine for each attempt.
//! * [`kubernetes`] — a Job of a cluster for each attempt.
//! * [`names`] — what an attempt is called elsewhere, and its labels. Pure.
//! * [`process`] — a supervisor process of this host for each attempt.
//! * [`supervised`] — the controller's end of a supervisor, its own or one that it found.

pub mod container;
pub mod kubernetes;
mod names;
pub mod process;
pub mod supervised;

use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use agl_client::{AttemptDetail, AttemptGrant, ClientError};
use agl_core::rollout::Rollout;
use async_trait::async_trait;
use serde_json::{Map, Value};
use tokio::time::Instant;

use crate::launch::LaunchError;
use crate::supervisor::record::{Answer, End, ExitRecord};
use crate::verdict::Verdict;

/// An attempt that is to be started.
#[derive(Clone, Debug)]
pub struct Order {
    /// The rollout.
    pub rollout: Rollout,
    /// Its attempt.
    pub attempt_id: String,
    /// The agent's own key.
    pub key: String,
    /// The evaluator's key.
    pub reward_key: String,
    /// The gateway as agents reach it, without a trailing slash.
    pub agent_url: String,
}

impl Order {
    /// One for the attempt that `grant` made; `agent_url` is the gateway as agents reach it.
    #[must_use]
    pub fn new(rollout: Rollout, grant: AttemptGrant, agent_url: &str) -> Self {
        Self {
            rollout,
            attempt_id: grant.detail.attempt.attempt_id,
            key: grant.key,
            reward_key: grant.reward_key,
            agent_url: agent_url.trim_end_matches('/').to_owned(),
        }
    }
}

/// Runs attempts.
#[async_trait]
pub trait Runner: Debug + Send + Sync {
    /// Its name in `controller.runner` and in an attempt's `runner.kind`.
    fn kind(&self) -> &'static str;

    /// Who its attempts belong to, across restarts of the controller.
    fn owner(&self) -> &str;

    /// True for rollouts that it can run; others are left to other controllers.
    fn takes(&self, rollout: &Rollout) -> bool;

    /// How many attempts at once where `controller.max_concurrent` does not say. On one host twice the number of its cores:
    /// agents mostly wait for the model.
    fn capacity(&self) -> usize {
        2 * std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
    }

    /// Takes one of the starts that the runner's pace allows.
    ///
    /// # Errors
    /// The instant at which to ask again.
    fn may_start(&self, _now: Instant) -> Result<(), Instant> {
        Ok(())
    }

    /// True where agents go on without their controller as a matter of course.
    fn outlives_us(&self) -> bool {
        false
    }

    /// Waits until this controller is the one that acts, where several stand by.
    async fn elected(&self) {}

    /// Begins to see what there is, and waits until all of it has been seen once.
    async fn observe(&self) {}

    /// Waits until another controller acts in our place.
    async fn deposed(&self) {
        std::future::pending().await
    }

    /// Nothing more will be started: what a start may be waiting for is given up.
    fn wind_down(&self) {}

    /// Lets another controller act at once.
    async fn resign(&self) {}

    /// What the rollout's `status.k8s_job_name` becomes.
    fn job_name(&self, _rollout_id: &str, _attempt_id: &str) -> Option<String> {
        None
    }

    /// What [`Runner::start`] would start: a command, or a manifest.
    ///
    /// # Errors
    /// [`LaunchError`] where it cannot be run as it is configured.
    fn preview(&self, order: &Order) -> Result<Value, LaunchError>;

    /// Starts an attempt.
    ///
    /// # Errors
    /// The verdict on an attempt that cannot be started.
    async fn start(&self, order: Order) -> Result<Box<dyn Run>, Verdict>;

    /// What there is of an attempt that an earlier controller began. `None`: nothing is left that runs, nor a record of
    /// how it ended, and nothing will begin any more.
    ///
    /// # Errors
    /// Where the gateway does not tell what is needed for it.
    async fn find(&self, rollout: &Rollout, attempt: &AttemptDetail) -> Result<Option<Box<dyn Run>>, ClientError>;

    /// Attempts of which something may be left: `(rollout_id, attempt_id)`.
    fn held(&self) -> Vec<(String, String)>;

    /// The attempt's end has reached the gateway: nothing of it need be remembered.
    fn release(&self, rollout_id: &str, attempt_id: &str);

    /// Ends what is left of an attempt that does not count any more. True where there was something.
    async fn reclaim(&self, rollout_id: &str, attempt_id: &str) -> bool;

    /// Says for a message where [`Runner::find`] looked in vain.
    fn nothing_at(&self, rollout_id: &str, attempt_id: &str) -> String;
}

/// One attempt under way. Dropped before it has ended, it ends the agent, unless the runner's [`Leave`] is set by then; what
/// runs in a cluster goes on.
#[async_trait]
pub trait Run: Send + Sync {
    /// True where this controller started it, so that nobody else can have stopped it on our behalf.
    fn is_ours(&self) -> bool;

    /// Waits for what happens next. May be dropped and called again.
    async fn next(&mut self) -> Step;

    /// Answers [`Step::AgentEnded`].
    async fn answer(&mut self, answer: Answer);

    /// Ends what runs: asks, waits, kills. Returns when it is gone, or cannot be ended for now.
    async fn end(&mut self);

    /// Makes the agent go on when this is dropped.
    fn let_go(&mut self);

    /// How it ended; asked after [`Step::Exited`].
    async fn outcome(&mut self) -> Outcome;
}

/// What an attempt does next.
#[derive(Debug)]
pub enum Step {
    /// The agent runs.
    Started {
        /// What is worth keeping in the attempt's `runner`, so that a person or a later controller finds it.
        about: Map<String, Value>,
    },
    /// The agent has ended, and there is an evaluator to run.
    AgentEnded(End),
    /// All is over; see [`Run::outcome`].
    Exited,
}

/// How an attempt ended, before anybody has judged it.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Its processes ended and we know how.
    Ended {
        /// How.
        record: ExitRecord,
        /// What the agent last wrote to its standard error.
        stderr_tail: String,
        /// The same of the evaluator.
        evaluator_tail: String,
    },
    /// It is gone and nobody knows how it ended, or something that is not the agent's ended it.
    Lost(String),
    /// It cannot be started as it is configured; no further attempt would change that.
    Misconfigured(String),
}

/// What running attempts do when the controller ends. Read at that moment.
#[derive(Clone, Debug, Default)]
pub struct Leave(Arc<AtomicBool>);

impl Leave {
    /// Agents go on, or do not, from now on.
    pub fn set(&self, leave: bool) {
        self.0.store(leave, Ordering::Release);
    }

    /// True where agents go on.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// One that is set for good.
    #[must_use]
    pub fn always() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }
}

/// Where a controller stands on its host; what runners need to tell.
#[derive(Clone, Debug)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// The controller's working directory, from which Python classes are imported.
    pub cwd: PathBuf,
}

impl Host {
    /// This one.
    ///
    /// # Errors
    /// Where there is no working directory any more.
    pub fn here() -> std::io::Result<Self> {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned();
        Ok(Self { name, cwd: std::env::current_dir()? })
    }
}

/// The fields of a JSON object written in place.
pub(crate) fn fields(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}
