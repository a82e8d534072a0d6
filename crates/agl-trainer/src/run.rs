//! What a run is configured by, what it tells whoever watches it, and what it leaves behind.

use agl_engine::EngineConfig;
use serde::Serialize;

use crate::config::{ActorConfig, AlgorithmConfig, DataConfig, ModelConfig, RolloutSection, TrainerConfig};
use crate::evaluate::Evaluation;
use crate::metrics::StepMetrics;

/// Everything a run is configured by.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `[model]`
    pub model: ModelConfig,
    /// `[engine]`
    pub engine: EngineConfig,
    /// `[data]`
    pub data: DataConfig,
    /// `[rollout]`
    pub rollout: RolloutSection,
    /// `[algorithm]`
    pub algorithm: AlgorithmConfig,
    /// `[actor]`
    pub actor: ActorConfig,
    /// `[trainer]`
    pub trainer: TrainerConfig,
}

/// What a run tells whoever watches it.
#[derive(Clone, Debug)]
pub enum Progress {
    /// The run begins, or goes on after step `done`.
    Started {
        /// The run.
        run_id: String,
        /// Steps done before.
        done: u64,
        /// Steps in all.
        total: u64,
    },
    /// A rollout has ended.
    Rollout {
        /// The step, 0 for the validation before the first.
        step: u64,
        /// Train or validation.
        is_train: bool,
        /// How many of them have ended.
        done: usize,
        /// Of how many.
        of: usize,
    },
    /// All rollouts of the step have ended and the policy is being updated.
    Updating {
        /// The step.
        step: u64,
    },
    /// A step is done.
    Step(StepMetrics),
    /// A validation is done.
    Validation {
        /// After which step.
        step: u64,
        /// What it found.
        evaluation: Box<Evaluation>,
    },
    /// A checkpoint is on disk.
    Checkpoint {
        /// After which step.
        step: u64,
        /// Its folder.
        path: std::path::PathBuf,
    },
}

/// `summary.json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunSummary {
    /// The run.
    pub run_id: String,
    /// Validation reward before the first step.
    pub initial_val_reward: Option<f64>,
    /// Validation reward of the final weights.
    pub final_val_reward: Option<f64>,
    /// Standard error of the final validation reward.
    pub final_val_standard_error: Option<f64>,
    /// Model calls of solved validation rollouts, on average.
    pub calls_per_solved: Option<f64>,
    /// Training steps.
    pub steps: u64,
    /// Training rollouts.
    pub rollouts: u64,
    /// Their model calls.
    pub model_calls: u64,
    /// Training rows per rollout.
    pub rows_per_rollout: f64,
    /// Seconds of the whole run, over all its starts.
    pub wall_seconds: f64,
    /// Tokens sampled per second of waiting for rollouts, agents' own time included.
    pub sampled_tokens_per_second: f64,
    /// Tokens that went through forward and backward, context included, per second of updating.
    pub trained_tokens_per_second: f64,
    /// The final checkpoint.
    pub checkpoint: std::path::PathBuf,
}
