//! Attempts as processes of this host, each under a supervisor of its own.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use agl_client::{AttemptDetail, ClientError};
use agl_core::rollout::Rollout;
use async_trait::async_trait;
use serde_json::{Map, Value, json};

use super::supervised::{Supervised, tail};
use super::{Host, Leave, Order, Outcome, Run, Runner, Step};
use crate::config::ControllerConfig;
use crate::launch::{Launch, LaunchError};
use crate::supervisor::record::{Answer, Event, Spec};
use crate::verdict::Verdict;
use crate::work_dir::{AttemptDir, WorkDir};
use crate::zygote::Zygote;

/// Beyond its grace a supervisor gets this long before it is killed itself.
const SUPERVISOR_GRACE: Duration = Duration::from_secs(10);

/// Runs attempts as processes of this host.
#[derive(Debug)]
pub struct ProcessRunner {
    config: ControllerConfig,
    work_dir: Arc<WorkDir>,
    host: Host,
    leave: Leave,
    /// For warm starts, from the moment when this controller acts.
    zygote: OnceLock<Option<Zygote>>,
}

impl ProcessRunner {
    /// One that keeps what it knows in `work_dir`.
    #[must_use]
    pub fn new(config: ControllerConfig, work_dir: Arc<WorkDir>, host: Host, leave: Leave) -> Self {
        Self { config, work_dir, host, leave, zygote: OnceLock::new() }
    }

    fn zygote(&self) -> Option<&Zygote> {
        self.zygote.get().and_then(Option::as_ref)
    }

    fn run(&self, supervised: Supervised, dir: AttemptDir) -> ProcessRun {
        let about = json!({
            "kind": "process",
            "controller": self.work_dir.controller_id(),
            "host": self.host.name,
            "dir": dir.path().to_string_lossy(),
        });
        let patience = Duration::from_secs_f64(self.config.kill_grace_seconds) + SUPERVISOR_GRACE;
        ProcessRun { supervised, dir, patience, about: super::fields(about) }
    }
}

#[async_trait]
impl Runner for ProcessRunner {
    fn kind(&self) -> &'static str {
        "process"
    }

    fn owner(&self) -> &str {
        self.work_dir.controller_id()
    }

    fn takes(&self, rollout: &Rollout) -> bool {
        let config = &rollout.config;
        let elsewhere = config.k8s.is_some() || config.container.is_some();
        config.process.is_some() || config.local.is_some() || !elsewhere
    }

    /// Begins with the imports: by the first attempt they are done.
    async fn elected(&self) {
        self.zygote.get_or_init(|| {
            let zygote = self.config.zygote.as_ref()?;
            Zygote::start(zygote, &self.config.python, &self.host.cwd)
        });
    }

    fn wind_down(&self) {
        if let Some(zygote) = self.zygote() {
            zygote.end();
        }
    }

    fn preview(&self, order: &Order) -> Result<Value, LaunchError> {
        let dir = self.work_dir.attempt(&order.rollout.rollout_id, &order.attempt_id);
        let Spec { agent, evaluator, .. } = Launch::new(order, &dir, &self.host).spec(&self.config)?;
        Ok(json!({"agent": agent, "evaluator": evaluator}))
    }

    async fn start(&self, order: Order) -> Result<Box<dyn Run>, Verdict> {
        let Order { rollout, attempt_id, .. } = &order;
        let dir = self.work_dir.attempt(&rollout.rollout_id, attempt_id);
        let spec = Launch::new(&order, &dir, &self.host).spec(&self.config);
        let spec = spec.map_err(|error| Verdict::misconfigured(error.to_string()))?;
        let started = match self.work_dir.mark(&rollout.rollout_id, attempt_id) {
            Ok(()) => {
                let program = self.config.supervisor.as_deref();
                Supervised::start(program, &dir, &spec, self.leave.clone(), self.zygote()).await
            }
            Err(error) => Err(error),
        };
        match started {
            Ok(supervised) => Ok(Box::new(self.run(supervised, dir))),
            Err(error) => {
                Err(Verdict::lost(format!("its supervisor cannot be started in {}: {error}", dir.path().display())))
            }
        }
    }

    async fn find(&self, rollout: &Rollout, attempt: &AttemptDetail) -> Result<Option<Box<dyn Run>>, ClientError> {
        let dir = self.work_dir.attempt(&rollout.rollout_id, &attempt.attempt.attempt_id);
        let found = Supervised::find(&dir, self.leave.clone());
        Ok(found.map(|supervised| Box::new(self.run(supervised, dir)) as Box<dyn Run>))
    }

    fn held(&self) -> Vec<(String, String)> {
        self.work_dir.marked()
    }

    fn release(&self, rollout_id: &str, attempt_id: &str) {
        self.work_dir.unmark(rollout_id, attempt_id);
    }

    async fn reclaim(&self, rollout_id: &str, attempt_id: &str) -> bool {
        let dir = self.work_dir.attempt(rollout_id, attempt_id);
        let Some(supervised) = Supervised::find(&dir, self.leave.clone()) else { return false };
        self.run(supervised, dir).end().await;
        true
    }

    fn nothing_at(&self, rollout_id: &str, attempt_id: &str) -> String {
        let dir = self.work_dir.attempt(rollout_id, attempt_id);
        format!("{} holds neither a running supervisor nor a record of this attempt", dir.path().display())
    }
}

/// A supervisor and the folder of its attempt.
struct ProcessRun {
    supervised: Supervised,
    dir: AttemptDir,
    patience: Duration,
    about: Map<String, Value>,
}

#[async_trait]
impl Run for ProcessRun {
    fn is_ours(&self) -> bool {
        self.supervised.is_ours()
    }

    async fn next(&mut self) -> Step {
        match self.supervised.next().await {
            Some(Event::Started { pid }) => {
                tracing::info!(dir = %self.dir.path().display(), pid, "agent started");
                let mut about = self.about.clone();
                about.insert("supervisor_pid".to_owned(), self.supervised.pid().into());
                about.insert("agent_pid".to_owned(), pid.into());
                Step::Started { about }
            }
            Some(Event::AgentEnded { end }) => Step::AgentEnded(end),
            Some(Event::Note { .. } | Event::Failed { .. }) | None => Step::Exited,
        }
    }

    async fn answer(&mut self, answer: Answer) {
        self.supervised.answer(answer).await;
    }

    async fn end(&mut self) {
        self.supervised.terminate();
        let exited = async {
            while let Some(event) = self.supervised.next().await {
                if matches!(event, Event::AgentEnded { .. }) {
                    self.supervised.answer(Answer::Skip).await;
                }
            }
        };
        if tokio::time::timeout(self.patience, exited).await.is_err() {
            self.supervised.kill();
        }
    }

    fn let_go(&mut self) {
        self.supervised.let_go();
    }

    async fn outcome(&mut self) -> Outcome {
        match self.supervised.record() {
            Ok(record) => Outcome::Ended {
                record,
                stderr_tail: tail(&self.dir.stderr()),
                evaluator_tail: tail(&self.dir.evaluator_stderr()),
            },
            Err(message) => Outcome::Lost(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rollouts_for_containers_or_kubernetes_are_left_to_others() {
        let folder = tempfile::tempdir().unwrap();
        let work_dir = Arc::new(WorkDir::open(folder.path()).unwrap());
        let runner = ProcessRunner::new(ControllerConfig::default(), work_dir, Host::here().unwrap(), Leave::default());
        for (config, takes) in [
            (json!({"k8s": {"job_template": "x"}}), false),
            (json!({"container": {"image": "x"}}), false),
            (json!({"process": {"argv": ["a"]}, "k8s": {"job_template": "x"}}), true),
            // Nothing to run at all: somebody has to say so.
            (json!({}), true),
        ] {
            let create = serde_json::from_value(json!({"input": {}, "config": config})).unwrap();
            assert_eq!(runner.takes(&Rollout::new(create, "r".to_owned(), 0.0)), takes, "{config}");
        }
    }
}
