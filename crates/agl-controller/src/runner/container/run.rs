//! One attempt in containers: the agent's, then the evaluator's.

use std::path::Path;
use std::sync::Arc;

use agl_core::rollout::ContainerMount;
use async_trait::async_trait;
use serde_json::json;

use super::contained::{Contained, News, Past};
use super::logs::LogFiles;
use super::spec::{Draft, agent_name, evaluator_name};
use super::{Shared, open_up};
use crate::launch::LaunchError;
use crate::runner::supervised::tail;
use crate::runner::{Leave, Order, Outcome, Run, Step, fields};
use crate::supervisor::record::{Answer, End, ExitRecord, NotStarted};
use crate::work_dir::{AttemptDir, write_record};

/// One attempt in containers.
pub(super) struct ContainerRun {
    shared: Arc<Shared>,
    order: Order,
    dir: AttemptDir,
    phase: Phase,
    record: ExitRecord,
    /// The agent is to go on when this is dropped.
    leave: Leave,
}

/// Where it is.
enum Phase {
    /// The agent's container is to be made, or joined.
    Beginning,
    /// It is made or watched.
    Agent(Box<Contained>),
    /// The agent has ended; that is to be told where there is an evaluator.
    AgentEnded,
    /// The evaluator waits for a word.
    Asking,
    /// The evaluator's container is made or watched.
    Evaluator(Box<Contained>),
    /// All is over.
    Over(Option<Box<Outcome>>),
}

impl ContainerRun {
    /// An attempt whose container may have to be made.
    pub(super) fn making(shared: Arc<Shared>, order: Order) -> Self {
        Self::new(shared, order, Phase::Beginning, End::default())
    }

    /// An attempt whose agent has ended and whose evaluator may have.
    pub(super) fn judging(shared: Arc<Shared>, order: Order, end: End) -> Self {
        Self::new(shared, order, Phase::AgentEnded, end)
    }

    /// An attempt that has ended.
    pub(super) fn ended(shared: Arc<Shared>, order: Order, record: ExitRecord) -> Self {
        let mut run = Self::new(shared, order, Phase::Over(None), End::default());
        run.record = record;
        run.phase = Phase::Over(Some(Box::new(run.outcome_of_record())));
        run
    }

    fn new(shared: Arc<Shared>, order: Order, phase: Phase, agent: End) -> Self {
        Self {
            dir: shared.work_dir.attempt(&order.rollout.rollout_id, &order.attempt_id),
            leave: shared.leave.clone(),
            shared,
            order,
            phase,
            record: ExitRecord { agent, evaluator: None },
        }
    }

    /// Lays out the attempt's folder and puts up the relay.
    async fn draft(&self) -> Result<Draft<'_>, String> {
        let dir = &self.dir;
        let laid_out = dir.create().and_then(|()| open_up(dir.path(), &dir.work())).and_then(|()| {
            // The evaluator sees these files, whether the agent wrote anything or not.
            for path in [dir.stdout(), dir.stderr()].iter().filter(|path| !path.exists()) {
                std::fs::File::create(path)?;
            }
            std::fs::write(dir.input(), self.order.rollout.input.to_string())
        });
        laid_out.map_err(|error| format!("its folder {} cannot be used: {error}", dir.path().display()))?;
        let way = match &self.shared.relay {
            Some(relay) => {
                Some(relay.ready().await.map_err(|error| format!("its way to the gateway cannot be put up: {error}"))?)
            }
            None => None,
        };
        Ok(Draft {
            config: &self.shared.config,
            instance: self.shared.instance(),
            host: &self.shared.host,
            order: &self.order,
            inside_url: &self.shared.inside_url,
            dir,
            way,
        })
    }

    async fn agent(&self) -> Result<Contained, Outcome> {
        self.shared.end_earlier(&self.order.rollout.rollout_id, &self.order.attempt_id).await;
        let draft = self.draft().await.map_err(Outcome::Lost)?;
        let plan = draft.agent().map_err(|error| Outcome::Misconfigured(error.to_string()))?;
        // Podman makes an empty folder of a source that is not there, and takes a comma for the end of one.
        let here = self.shared.config.container.is_relayed();
        let unusable = |mount: &&ContainerMount| {
            let comma = mount.source.contains(',') || mount.target.contains(',');
            // Our own are made by us.
            let source = Path::new(&mount.source);
            comma || (here && !source.starts_with(self.dir.path()) && !source.exists())
        };
        if let Some(mount) = plan.mounts.iter().find(unusable) {
            let message = format!("config.container.mounts: {} does not exist, or has a comma", mount.source);
            return Err(Outcome::Misconfigured(message));
        }
        let files = self.files(self.dir.stdout(), self.dir.stderr());
        Ok(Contained::new(self.shared.clone(), plan, files))
    }

    /// The evaluator's container; `None` where there is no evaluator.
    async fn evaluator(&self) -> Result<Option<Contained>, NotStarted> {
        let passing = |message| NotStarted { message, permanent: false };
        let wrong = |error: LaunchError| NotStarted { message: error.to_string(), permanent: true };
        let draft = self.draft().await.map_err(passing)?;
        let name = agent_name(&self.order.rollout.rollout_id, &self.order.attempt_id);
        let image = match self.shared.engine.container(&name).await {
            Ok(Some(agent)) => agent.image,
            _ => None,
        };
        let plan = draft.evaluator(self.record.agent.exit_code(), image).map_err(wrong)?;
        let files = self.files(self.dir.evaluator_stdout(), self.dir.evaluator_stderr());
        Ok(plan.map(|plan| Contained::new(self.shared.clone(), plan, files)))
    }

    fn files(&self, stdout: std::path::PathBuf, stderr: std::path::PathBuf) -> LogFiles {
        LogFiles { stdout, stderr, limit: self.shared.config.log_limit_bytes }
    }

    fn has_evaluator(&self) -> bool {
        self.shared.config.evaluator_of(&self.order.rollout.config).is_some()
    }

    /// The agent's container is over.
    async fn agent_over(&mut self, past: Past) {
        let outcome = match past {
            Past::Ended(_) if self.dir.stopped().exists() => {
                Outcome::Lost("a controller that ended stopped it, and could not say so".to_owned())
            }
            Past::Ended(end) => {
                self.record.agent = end;
                match write_record(&self.dir.agent_end(), &self.record.agent) {
                    Ok(()) => {
                        self.phase = Phase::AgentEnded;
                        return;
                    }
                    Err(error) => Outcome::Lost(format!("its end cannot be written down: {error}")),
                }
            }
            Past::NotStarted(reason) if reason.permanent => Outcome::Misconfigured(reason.message),
            Past::NotStarted(reason) => Outcome::Lost(reason.message),
            Past::Lost(message) => Outcome::Lost(message),
        };
        self.over(outcome).await;
    }

    /// The evaluator is over, or never ran.
    async fn evaluator_over(&mut self, past: Past) {
        self.record.evaluator = Some(match past {
            Past::Ended(end) => end,
            Past::NotStarted(reason) => End { not_started: Some(reason), ..End::default() },
            Past::Lost(message) => {
                End { not_started: Some(NotStarted { message, permanent: false }), ..End::default() }
            }
        });
        self.all_over().await;
    }

    /// Writes down how it ended, and clears up.
    async fn all_over(&mut self) {
        if let Err(error) = write_record(&self.dir.exit(), &self.record) {
            tracing::warn!(dir = %self.dir.path().display(), "how it ended cannot be written down: {error}");
        }
        let outcome = self.outcome_of_record();
        self.over(outcome).await;
    }

    async fn over(&mut self, outcome: Outcome) {
        self.phase = Phase::Over(Some(Box::new(outcome)));
        self.shared.clear(&self.names()).await;
    }

    fn names(&self) -> Vec<String> {
        let (rollout_id, attempt_id) = (&self.order.rollout.rollout_id, &self.order.attempt_id);
        let mut names = vec![agent_name(rollout_id, attempt_id)];
        if self.has_evaluator() {
            names.push(evaluator_name(rollout_id, attempt_id));
        }
        names
    }

    fn outcome_of_record(&self) -> Outcome {
        Outcome::Ended {
            record: self.record.clone(),
            stderr_tail: tail(&self.dir.stderr()),
            evaluator_tail: tail(&self.dir.evaluator_stderr()),
        }
    }

    fn started(&self, id: &str) -> Step {
        Step::Started {
            about: fields(json!({
                "kind": "container", "controller": self.shared.instance(), "host": self.shared.host.name,
                "engine": self.shared.engine.host, "container_id": id, "dir": self.dir.path().to_string_lossy(),
                "container": agent_name(&self.order.rollout.rollout_id, &self.order.attempt_id),
            })),
        }
    }
}

#[async_trait]
impl Run for ContainerRun {
    fn is_ours(&self) -> bool {
        true
    }

    async fn next(&mut self) -> Step {
        loop {
            match &mut self.phase {
                Phase::Beginning => match self.agent().await {
                    Ok(contained) => self.phase = Phase::Agent(Box::new(contained)),
                    Err(outcome) => self.over(outcome).await,
                },
                Phase::Agent(contained) => match contained.next().await {
                    News::Started { id } => return self.started(&id),
                    News::Over(past) => self.agent_over(past).await,
                },
                Phase::AgentEnded => {
                    if self.has_evaluator() {
                        self.phase = Phase::Asking;
                        return Step::AgentEnded(self.record.agent.clone());
                    }
                    self.all_over().await;
                }
                Phase::Asking => std::future::pending().await,
                Phase::Evaluator(contained) => match contained.next().await {
                    News::Started { id } => tracing::debug!(id, "evaluator started"),
                    News::Over(past) => self.evaluator_over(past).await,
                },
                Phase::Over(_) => return Step::Exited,
            }
        }
    }

    async fn answer(&mut self, answer: Answer) {
        let evaluator = match answer {
            Answer::Go => self.evaluator().await,
            Answer::Skip => Ok(None),
        };
        match evaluator {
            Ok(Some(contained)) => self.phase = Phase::Evaluator(Box::new(contained)),
            Ok(None) => self.all_over().await,
            Err(reason) => self.evaluator_over(Past::NotStarted(reason)).await,
        }
    }

    async fn end(&mut self) {
        match &mut self.phase {
            Phase::Over(_) => {
                self.shared.clear(&self.names()).await;
                return;
            }
            Phase::Evaluator(contained) => {
                contained.stop().await;
                self.record.evaluator = Some(End { stopped: true, ..End::default() });
            }
            Phase::Agent(contained) => {
                // A controller that dies now leaves an end that is not the agent's own.
                if let Err(error) = std::fs::write(self.dir.stopped(), "") {
                    tracing::warn!(dir = %self.dir.path().display(), "that it was stopped cannot be written down: {error}");
                }
                contained.stop().await;
                self.record.agent = End { stopped: true, ..End::default() };
            }
            Phase::Beginning => self.record.agent = End { stopped: true, ..End::default() },
            Phase::AgentEnded | Phase::Asking => {
                self.record.evaluator = Some(End { stopped: true, ..End::default() });
            }
        }
        // Nothing of this is written down: the next controller shall not take it for the agent's own end.
        let outcome = self.outcome_of_record();
        self.over(outcome).await;
    }

    fn let_go(&mut self) {
        self.leave = Leave::always();
    }

    async fn outcome(&mut self) -> Outcome {
        let unknown = || Outcome::Lost("it was let go before its end was known".to_owned());
        match &mut self.phase {
            Phase::Over(outcome) => outcome.take().map_or_else(unknown, |outcome| *outcome),
            _ => unknown(),
        }
    }
}

impl Drop for ContainerRun {
    fn drop(&mut self) {
        if matches!(self.phase, Phase::Over(_)) || self.leave.is_set() {
            return;
        }
        // What cannot be ended now the next controller ends.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let (shared, names) = (self.shared.clone(), self.names());
            runtime.spawn(async move {
                shared.end(&names).await;
            });
        }
    }
}
