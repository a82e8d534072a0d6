//! One attempt as a Job: made, watched, its logs kept, its evaluator run beside the controller.
//!
//! * [`make`] — the Job and its Secret.

mod make;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::AsyncReadExt;
use kube::api::{ListParams, LogParams};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::Shared;
use super::facts::{Over, Patience, PodFacts, Seen};
use super::observe::Subscription;
use crate::launch::Launch;
use crate::runner::names::job_name;
use crate::runner::supervised::{Supervised, tail};
use crate::runner::{Order, Outcome, Run, Step, fields};
use crate::supervisor::log::LimitedLog;
use crate::supervisor::record::{Answer, End, Event, ExitRecord};
use crate::work_dir::AttemptDir;

/// How long the cluster gets to end the pods of a Job that is gone or over, before we ask for it.
const END_GRACE: Duration = Duration::from_secs(2);
/// Between two looks at what does not move.
const AGAIN: Duration = Duration::from_secs(2);
/// How long a log may take to be read.
const LOG_PATIENCE: Duration = Duration::from_secs(60);
/// A pod that is being deleted and does not end within this time is on a node that is gone: it is waited for no longer.
const END_PATIENCE: Duration = Duration::from_secs(300);

/// One attempt as a Job.
pub(super) struct KubernetesRun {
    shared: Arc<Shared>,
    order: Order,
    name: String,
    dir: AttemptDir,
    changed: Subscription,
    phase: Phase,
    started_told: bool,
    /// Since when it has not started.
    waiting_since: Instant,
    /// Since when its image cannot be had.
    no_image_since: Option<Instant>,
    /// Since when it is being ended.
    ending_since: Option<Instant>,
    /// The pod to take logs from.
    pod: Option<String>,
    record: ExitRecord,
}

/// Where it is.
enum Phase {
    /// The Job or its Secret may have to be made.
    Making,
    /// Both are there.
    Watching,
    /// The agent has ended; the evaluator waits for a word.
    AgentEnded,
    /// The evaluator runs.
    Evaluating(Supervised),
    /// All is over.
    Over(Option<Outcome>),
}

impl KubernetesRun {
    /// An attempt whose Job or Secret may have to be made.
    pub(super) fn making(shared: Arc<Shared>, order: Order) -> Self {
        Self::new(shared, order, Phase::Making)
    }

    /// An attempt whose Job and Secret are there, or were; `reported` where the gateway has it as running.
    pub(super) fn watching(shared: Arc<Shared>, order: Order, reported: bool) -> Self {
        let mut run = Self::new(shared, order, Phase::Watching);
        run.started_told = reported;
        run
    }

    fn new(shared: Arc<Shared>, order: Order, phase: Phase) -> Self {
        let name = job_name(&order.rollout.rollout_id, &order.attempt_id);
        Self {
            changed: shared.observed.subscribe(&name),
            dir: shared.work_dir.attempt(&order.rollout.rollout_id, &order.attempt_id),
            shared,
            name,
            order,
            phase,
            started_told: false,
            waiting_since: Instant::now(),
            no_image_since: None,
            ending_since: None,
            pod: None,
            record: ExitRecord { agent: End::default(), evaluator: None },
        }
    }

    /// Waits for the next thing that is worth telling.
    async fn watch(&mut self) -> Step {
        loop {
            self.changed.mark_unchanged();
            let given_up = self.ending_since.is_some_and(|since| since.elapsed() >= END_PATIENCE);
            match self.shared.observed.look(&self.name, &[], self.started_told, given_up) {
                Seen::Running { pod, node } => {
                    self.pod = Some(pod.clone());
                    if !std::mem::replace(&mut self.started_told, true) {
                        return Step::Started { about: self.about(&pod, node) };
                    }
                }
                Seen::Waiting(waiting) => {
                    let (patience, why) = match waiting {
                        Some(waiting) => (self.deadline(waiting.patience), waiting.why),
                        None => (self.deadline(Patience::Start), "its pod has not been made or started".to_owned()),
                    };
                    if Instant::now() >= patience {
                        self.shared.end(&self.name).await;
                        let lost = format!("it did not start: {why}");
                        return self.over(Outcome::Lost(lost));
                    }
                    tokio::select! {
                        () = self.changed.changed() => {}
                        () = tokio::time::sleep_until(patience) => {}
                    }
                    continue;
                }
                Seen::Ending => {
                    let since = *self.ending_since.get_or_insert_with(Instant::now);
                    // Its Job's controller is about to end it, or has; what it forgets is ours.
                    let due = since + END_GRACE;
                    if Instant::now() >= due {
                        self.shared.end_left_pods(&self.name).await;
                    }
                    let until = if Instant::now() < due { due } else { Instant::now() + AGAIN };
                    let _ = tokio::time::timeout_at(until, self.changed.changed()).await;
                    continue;
                }
                Seen::Over(over) => {
                    let Some(over) = self.ask_pods(over).await else {
                        // The watch of pods is slower than that of Jobs, or the API server does not answer.
                        let _ = tokio::time::timeout(AGAIN, self.changed.changed()).await;
                        continue;
                    };
                    let pod = self.shared.observed.pods(&self.name).into_iter().next();
                    if let Some(pod) =
                        pod.filter(|pod| pod.has_started() && !std::mem::replace(&mut self.started_told, true))
                    {
                        // It ended before it was seen to run: what is asked next sees the same end.
                        return Step::Started { about: self.about(&pod.name, pod.node.clone()) };
                    }
                    return self.agent_over(over).await;
                }
            }
            self.changed.changed().await;
        }
    }

    /// When a reason not to start has gone on for too long.
    fn deadline(&mut self, patience: Patience) -> Instant {
        let config = &self.shared.config.kubernetes;
        let after = |since: Instant, seconds: f64| {
            let patience = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
            since.checked_add(patience).unwrap_or_else(|| since + Duration::from_secs(365 * 24 * 3600))
        };
        let start = after(self.waiting_since, config.start_timeout_seconds);
        match patience {
            Patience::None => Instant::now(),
            Patience::Start => start,
            Patience::Image => {
                let since = *self.no_image_since.get_or_insert_with(Instant::now);
                after(since, config.image_pull_grace_seconds).min(start)
            }
        }
    }

    /// The watch of pods may be slower than that of Jobs, and a pod tells more than its Job. `None`: it is not over.
    async fn ask_pods(&mut self, over: Over) -> Option<Over> {
        if !self.shared.observed.pods(&self.name).is_empty() {
            return Some(over);
        }
        let parameters = ListParams::default().labels(&format!("job-name={}", self.name));
        let pods: Vec<PodFacts> = match self.shared.pods.list(&parameters).await {
            Ok(pods) => pods.items.iter().map(PodFacts::of).collect(),
            Err(error) => {
                tracing::debug!(job = self.name, "cannot ask for its pods: {error}");
                return None;
            }
        };
        self.pod = self.pod.take().or_else(|| pods.first().map(|pod| pod.name.clone()));
        match self.shared.observed.look(&self.name, &pods, self.started_told, false) {
            Seen::Over(over) => Some(over),
            _ => None,
        }
    }

    async fn agent_over(&mut self, over: Over) -> Step {
        self.keep_logs().await;
        let end = match over {
            Over::Exited { code, note } => End { code: Some(code), note, ..End::default() },
            Over::TimedOut => End { timed_out: true, ..End::default() },
            Over::Lost(message) => return self.over(Outcome::Lost(message)),
            Over::Misconfigured(message) => return self.over(Outcome::Misconfigured(message)),
        };
        self.record.agent = end.clone();
        if self.shared.config.evaluator_of(&self.order.rollout.config).is_some() {
            self.phase = Phase::AgentEnded;
            return Step::AgentEnded(end);
        }
        self.over(self.ended())
    }

    fn ended(&self) -> Outcome {
        Outcome::Ended {
            record: self.record.clone(),
            stderr_tail: tail(&self.dir.stdout()),
            evaluator_tail: tail(&self.dir.evaluation().stderr()),
        }
    }

    fn over(&mut self, outcome: Outcome) -> Step {
        self.phase = Phase::Over(Some(outcome));
        Step::Exited
    }

    fn about(&self, pod: &str, node: Option<String>) -> serde_json::Map<String, Value> {
        fields(json!({
            "kind": "kubernetes", "controller": self.shared.owner, "namespace": self.shared.config.kubernetes.namespace,
            "job": self.name, "pod": pod, "node": node, "dir": self.dir.path().to_string_lossy(),
        }))
    }

    /// Keeps what the agent wrote, head and tail. A log that cannot be had is no failure of the attempt.
    async fn keep_logs(&mut self) {
        let pods = self.shared.observed.pods(&self.name);
        let Some(pod) = pods.first().map(|pod| pod.name.clone()).or_else(|| self.pod.clone()) else { return };
        let containers: Vec<String> = match pods.first() {
            Some(pod) => pod.containers.iter().map(|container| container.name.clone()).collect(),
            None => Vec::new(),
        };
        if let Err(error) = self.dir.create() {
            tracing::warn!(dir = %self.dir.path().display(), "cannot keep logs: {error}");
            return;
        }
        let containers = if containers.is_empty() { vec![None] } else { containers.into_iter().map(Some).collect() };
        for (index, container) in containers.into_iter().enumerate() {
            let path = match (&container, index) {
                (Some(name), 1..) => self.dir.path().join(format!("stdout.{name}.log")),
                _ => self.dir.stdout(),
            };
            let parameters = LogParams { container, ..LogParams::default() };
            let kept = async {
                let mut stream = self.shared.pods.log_stream(&pod, &parameters).await.map_err(std::io::Error::other)?;
                let mut log = LimitedLog::create(&path, self.shared.config.log_limit_bytes)?;
                let mut buffer = vec![0; 32 * 1024];
                loop {
                    match stream.read(&mut buffer).await? {
                        0 => return log.finish(),
                        read => log.write(&buffer[..read])?,
                    }
                }
            };
            let kept = tokio::time::timeout(LOG_PATIENCE, kept).await;
            if let Err(error) = kept.unwrap_or_else(|late| Err(late.into())) {
                tracing::debug!(pod, "its log cannot be kept: {error}");
            }
        }
    }

    /// Starts the evaluator, unless an earlier controller's still runs or has ended.
    async fn evaluate(&mut self) -> Phase {
        let dir = self.dir.evaluation();
        let leave = self.shared.leave.clone();
        if let Some(found) = Supervised::find(&dir, leave.clone()) {
            return Phase::Evaluating(found);
        }
        let exit_code = self.record.agent.exit_code();
        let spec =
            match Launch::new(&self.order, &self.dir, &self.shared.host).evaluation(&self.shared.config, exit_code) {
                Ok(Some(spec)) => spec,
                Ok(None) => return Phase::Over(Some(self.ended())),
                Err(error) => return Phase::Over(Some(Outcome::Misconfigured(error.to_string()))),
            };
        // What it marked as given up when it looked for an earlier one is given up no more.
        let started = match dir.begin_anew().and_then(|()| self.dir.create()) {
            Ok(()) => Supervised::start(self.shared.config.supervisor.as_deref(), &dir, &spec, leave, None).await,
            Err(error) => Err(error),
        };
        match started {
            Ok(supervised) => Phase::Evaluating(supervised),
            Err(error) => {
                let message =
                    format!("the supervisor of its evaluator cannot be started in {}: {error}", dir.path().display());
                Phase::Over(Some(Outcome::Lost(message)))
            }
        }
    }
}

#[async_trait]
impl Run for KubernetesRun {
    fn is_ours(&self) -> bool {
        true
    }

    async fn next(&mut self) -> Step {
        loop {
            match &mut self.phase {
                Phase::Making => match self.make().await {
                    Ok(()) => {
                        self.waiting_since = Instant::now();
                        self.phase = Phase::Watching;
                    }
                    Err(outcome) => return self.over(outcome),
                },
                Phase::Watching => return self.watch().await,
                Phase::AgentEnded => std::future::pending().await,
                Phase::Evaluating(supervised) => {
                    while let Some(event) = supervised.next().await {
                        if let Event::Started { pid } = event {
                            tracing::debug!(job = self.name, pid, "evaluator started");
                        }
                    }
                    let outcome = match supervised.record() {
                        Ok(record) => {
                            self.record.evaluator = Some(record.agent);
                            self.ended()
                        }
                        Err(message) => Outcome::Lost(message),
                    };
                    return self.over(outcome);
                }
                Phase::Over(_) => return Step::Exited,
            }
        }
    }

    async fn answer(&mut self, answer: Answer) {
        self.phase = match answer {
            Answer::Go => self.evaluate().await,
            Answer::Skip => Phase::Over(Some(self.ended())),
        };
    }

    async fn end(&mut self) {
        match &self.phase {
            Phase::Evaluating(supervised) => supervised.terminate(),
            // A request for the Job may be under way that we have stopped waiting for.
            Phase::Making => tokio::time::sleep(END_GRACE).await,
            _ => {}
        }
        self.shared.end(&self.name).await;
    }

    /// What runs in the cluster goes on anyway.
    fn let_go(&mut self) {
        if let Phase::Evaluating(supervised) = &mut self.phase {
            supervised.let_go();
        }
    }

    async fn outcome(&mut self) -> Outcome {
        let unknown = || Outcome::Lost("it was let go before its end was known".to_owned());
        match &mut self.phase {
            Phase::Over(outcome) => outcome.take().unwrap_or_else(unknown),
            _ => unknown(),
        }
    }
}
