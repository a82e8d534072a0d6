//! Rollouts without training: the trainer's validation, and `agl eval`.

use agl_client::GatewayClient;
use agl_core::rollout::{RolloutConfig, RolloutState};
use serde::Serialize;
use serde_json::Value;

use crate::TrainerError;
use crate::collect::{Collected, Collector, Launch, Verdict, exclusions, reasons};
use crate::data::Task;

/// What an evaluation found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Mean reward over the rollouts that count.
    pub reward: f64,
    /// Standard error of that mean: its sampling noise.
    pub standard_error: f64,
    /// Rollouts that count.
    pub rollouts: usize,
    /// Rollouts left out: dead infrastructure, no captured call.
    pub excluded: usize,
    /// Mean number of model calls of rollouts with the highest reward seen (those that solved their task).
    pub calls_per_solved: f64,
    /// Model calls in all.
    pub model_calls: usize,
    /// Sampled tokens in all.
    pub sampled_tokens: usize,
    /// One entry per rollout, in the order of the tasks.
    pub tasks: Vec<TaskResult>,
}

/// What one rollout of an evaluation came to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskResult {
    /// The task.
    pub data_id: String,
    /// The rollout.
    pub rollout_id: String,
    /// The row of the data file.
    pub input: Value,
    /// How it ended.
    pub state: RolloutState,
    /// `None` where it was left out.
    pub reward: Option<f64>,
    /// Why it was left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub excluded: Option<&'static str>,
    /// Answered model calls.
    pub calls: usize,
    /// Training rows that its calls would make.
    pub rows: usize,
    /// Tokens sampled.
    pub sampled_tokens: usize,
}

/// Which rollouts an evaluation makes.
#[derive(Clone, Debug)]
pub struct EvaluationPlan<'a> {
    /// The run they belong to.
    pub run_id: &'a str,
    /// Begins each rollout id.
    pub prefix: String,
    /// The training step, 0 before the first.
    pub step: u64,
    /// Rollouts per task.
    pub n: usize,
    /// Seeds every model call, with the task's id and the sample index.
    pub seed: u64,
    /// What the controller runs.
    pub config: &'a RolloutConfig,
}

impl EvaluationPlan<'_> {
    /// Runs every task `n` times in validation mode. `progress` hears of each rollout that has ended.
    ///
    /// # Errors
    /// Where the gateway stays away or rollouts do not end.
    pub async fn run(
        &self,
        tasks: &[Task],
        collector: &mut Collector,
        progress: impl FnMut(&Collected),
    ) -> Result<Evaluation, TrainerError> {
        let launch = Launch {
            run_id: self.run_id,
            prefix: self.prefix.clone(),
            step: self.step,
            is_train: false,
            n: self.n,
            seed: self.seed,
            config: self.config,
        };
        let collected = collector.run(&launch.rollouts(tasks), progress).await?;
        if collected.iter().all(|rollout| rollout.verdict.reward().is_none()) {
            let (step, rollouts) = (self.step, collected.len());
            return Err(TrainerError::NothingEvaluated { step, rollouts, why: reasons(&exclusions(&collected)) });
        }
        Ok(Evaluation::of(&collected))
    }
}

impl Evaluation {
    fn of(collected: &[Collected]) -> Self {
        let rewards: Vec<f64> = collected.iter().filter_map(|rollout| rollout.verdict.reward()).collect();
        let count = rewards.len() as f64;
        let reward = rewards.iter().sum::<f64>() / count.max(1.0);
        let variance = rewards.iter().map(|value| (value - reward).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
        let best = rewards.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let solved: Vec<usize> = collected
            .iter()
            .filter(|rollout| best > 0.0 && rollout.verdict.reward() == Some(best))
            .map(|rollout| rollout.counts.live)
            .collect();
        let tasks: Vec<TaskResult> = collected.iter().map(TaskResult::of).collect();
        Self {
            reward,
            standard_error: (variance / count.max(1.0)).sqrt(),
            rollouts: rewards.len(),
            excluded: collected.len() - rewards.len(),
            calls_per_solved: solved.iter().sum::<usize>() as f64 / solved.len().max(1) as f64,
            model_calls: tasks.iter().map(|task| task.calls).sum(),
            sampled_tokens: tasks.iter().map(|task| task.sampled_tokens).sum(),
            tasks,
        }
    }
}

impl TaskResult {
    fn of(rollout: &Collected) -> Self {
        let data_id = rollout.rollout.metadata.get("data_id").and_then(Value::as_str);
        Self {
            data_id: data_id.map_or_else(|| rollout.rollout.data_id(), str::to_owned),
            rollout_id: rollout.rollout.rollout_id.clone(),
            input: rollout.rollout.input.clone(),
            state: rollout.rollout.status.state,
            reward: rollout.verdict.reward(),
            excluded: match rollout.verdict {
                Verdict::Reward(_) => None,
                Verdict::Excluded(why) => Some(why.as_str()),
            },
            calls: rollout.counts.live,
            rows: rollout.sequences.len(),
            sampled_tokens: rollout.sequences.iter().map(|row| row.trained_tokens()).sum(),
        }
    }
}

/// The run id under which evaluations outside a run create their rollouts.
#[must_use]
pub fn fresh_run_id() -> String {
    let id = uuid::Uuid::now_v7().simple().to_string();
    format!("eval-{}", &id[..12])
}

/// Cancels every rollout of a run that has not ended.
///
/// # Errors
/// Where the gateway stays away.
pub async fn cancel_open(client: &GatewayClient, run_id: &str) -> Result<usize, TrainerError> {
    const PAGE: usize = 500;
    let states = [RolloutState::Queuing, RolloutState::Running];
    let mut cancelled = 0;
    loop {
        // Each page is what is still open, so the first page is asked for again until it is empty.
        let open = client.list_rollouts(&states, PAGE, None, Some(run_id)).await?;
        if open.is_empty() {
            return Ok(cancelled);
        }
        for rollout in &open {
            client.cancel(&rollout.rollout_id).await?;
            cancelled += 1;
        }
    }
}
