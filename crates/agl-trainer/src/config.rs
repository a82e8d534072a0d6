//! The trainer's part of `run.toml`. Keys are spelt as verl and Hugging Face spell them; where a key counts something else
//! than verl's does, its documentation says so.

use std::path::PathBuf;

use agl_core::credit::{AdvantageLevel, Estimator, KlEstimator, LossAggregation};
use agl_core::rollout::{
    ContainerConfig, EvaluatorConfig, K8sConfig, LocalConfig, ProcessConfig, RewardSource, RolloutConfig,
};
use agl_core::trajectory::Level;
use agl_core::trajectory::sequence::LengthLimits;
use agl_engine::{LossConfig, LossMode, OptimConfig};
use serde::{Deserialize, Serialize};

use crate::TrainerError;
use crate::correction::{OldLogProbs, RolloutCorrectionConfig};

/// `[model]`: the policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// Hugging Face directory of the weights to start from.
    pub path: PathBuf,
    /// The name the gateway asks for; its `gateway.default_proxy.model_name`.
    pub name: String,
    /// Where the policy's model server listens. Port 0 takes a free one.
    pub listen: String,
    /// Base URL under which the gateway reaches that server; from the listening address if absent.
    pub advertise_url: Option<String>,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self { path: PathBuf::from("policy"), name: "policy".into(), listen: "127.0.0.1:0".into(), advertise_url: None }
    }
}

/// `[data]`: the tasks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// Files of training tasks, `.jsonl` or `.parquet`; one row is one rollout's `input`.
    pub train_files: Vec<PathBuf>,
    /// Files of validation tasks.
    pub val_files: Vec<PathBuf>,
    /// Prompt groups per step. Each is sampled `rollout.n` times.
    pub train_batch_size: usize,
    /// Validation tasks per validation, from the front of the files; all if absent.
    pub val_batch_size: Option<usize>,
    /// Take the training tasks in a new order every epoch, from `trainer.seed`.
    pub shuffle: bool,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            train_files: Vec::new(),
            val_files: Vec::new(),
            train_batch_size: 8,
            val_batch_size: None,
            shuffle: true,
        }
    }
}

/// `[rollout]`: how a task is tried, and by which agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RolloutSection {
    /// Rollouts per training prompt: the size of a group.
    pub n: usize,
    /// Rollouts per validation prompt.
    pub val_n: usize,
    /// Sampling temperature of training calls; the gateway sets it on every call.
    pub temperature: f64,
    /// Sampling temperature of validation calls.
    pub val_temperature: f64,
    /// Wall-clock limit of the agent, in seconds.
    pub timeout_seconds: u64,
    /// The agent as a command. Strings are Jinja templates over `input`.
    pub process: Option<ProcessConfig>,
    /// The agent in a container, where `controller.runner = "container"`.
    pub container: Option<ContainerConfig>,
    /// The agent as a Python class, as Agent Lightning v1.0 starts it.
    pub local: Option<LocalConfig>,
    /// The agent as a Kubernetes Job.
    pub k8s: Option<K8sSection>,
    /// The command that judges the result and posts the reward.
    pub evaluator: Option<EvaluatorConfig>,
    /// `"evaluator"`: the agent may not post its own reward.
    pub reward_source: Option<RewardSource>,
    /// Attempts that infrastructure failures may cost.
    pub max_attempts: Option<u32>,
}

impl Default for RolloutSection {
    fn default() -> Self {
        Self {
            n: 8,
            val_n: 1,
            temperature: 1.0,
            val_temperature: 0.7,
            timeout_seconds: 3600,
            process: None,
            container: None,
            local: None,
            k8s: None,
            evaluator: None,
            reward_source: None,
            max_attempts: None,
        }
    }
}

/// `[rollout.k8s]`: the template of a Job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct K8sSection {
    /// The template itself, Jinja that renders one Job; it travels in each rollout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job_template: Option<String>,
    /// The file it stands in; read when the run file is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job_template_path: Option<PathBuf>,
}

impl RolloutSection {
    /// What each rollout carries for the controller.
    #[must_use]
    pub fn for_controller(&self) -> RolloutConfig {
        RolloutConfig {
            timeout_seconds: self.timeout_seconds,
            process: self.process.clone(),
            container: self.container.clone(),
            local: self.local.clone(),
            k8s: self.k8s.as_ref().map(|k8s| K8sConfig { job_template: k8s.job_template.clone() }),
            evaluator: self.evaluator.clone(),
            reward_source: self.reward_source,
            max_attempts: self.max_attempts,
            ..RolloutConfig::default()
        }
    }
}

/// `[algorithm]`: from calls and rewards to credit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AlgorithmConfig {
    /// `"grpo"`, `"grpo_no_std"` (or `"dr_grpo"`), `"rloo"`, `"reinforce_plus_plus"`, `"reinforce_plus_plus_baseline"`.
    pub adv_estimator: Estimator,
    /// `"rollout"`; `"row"` for ablations only.
    pub advantage_level: AdvantageLevel,
    /// `"trajectory"` merges calls into rows, `"transition"` makes every call a row.
    pub level: Level,
    /// A row whose initial prompt is longer is dropped.
    pub trajectory_max_prompt_length: usize,
    /// What stands further behind the initial prompt is cut off.
    pub trajectory_max_response_length: usize,
    /// Reward of a rollout that ended without one by the agent's own fault or by its time limit.
    pub reward_fillna_value: f64,
    /// Whether a rollout without a reward counts `reward_fillna_value` or is left out of its group.
    pub on_missing_reward: OnMissingReward,
    /// Take the divergence from the reference policy, the one the run started from, off each rollout's reward: the sum over its
    /// trained tokens, times `kl_ctrl.kl_coef`, before baselines are taken.
    pub use_kl_in_reward: bool,
    /// How it is estimated: `"k1"` (`"kl"`), `"k2"` (`"mse"`) or `"k3"` (`"low_var_kl"`).
    pub kl_penalty: KlEstimator,
    /// Its weight.
    pub kl_ctrl: KlCtrl,
    /// `"recorded"` or `"recompute"`.
    pub old_logprobs: OldLogProbs,
    /// Acts where `old_logprobs = "recompute"`.
    pub rollout_correction: RolloutCorrectionConfig,
}

/// `[algorithm.kl_ctrl]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KlCtrl {
    /// Reward per unit of divergence.
    pub kl_coef: f64,
}

impl Default for KlCtrl {
    fn default() -> Self {
        Self { kl_coef: 0.001 }
    }
}

impl Default for AlgorithmConfig {
    fn default() -> Self {
        Self {
            adv_estimator: Estimator::Grpo,
            advantage_level: AdvantageLevel::Rollout,
            level: Level::Trajectory,
            trajectory_max_prompt_length: 1 << 20,
            trajectory_max_response_length: 1 << 20,
            reward_fillna_value: 0.0,
            on_missing_reward: OnMissingReward::default(),
            use_kl_in_reward: false,
            kl_penalty: KlEstimator::K1,
            kl_ctrl: KlCtrl::default(),
            old_logprobs: OldLogProbs::default(),
            rollout_correction: RolloutCorrectionConfig::default(),
        }
    }
}

impl AlgorithmConfig {
    /// The limits on a row.
    #[must_use]
    pub fn limits(&self) -> LengthLimits {
        LengthLimits {
            max_prompt_length: self.trajectory_max_prompt_length,
            max_response_length: self.trajectory_max_response_length,
        }
    }
}

/// What a rollout without a reward counts, by whose fault it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OnMissingReward {
    /// The agent failed, ended without a reward, or ran out of time.
    pub agent: MissingReward,
    /// Its infrastructure stayed dead.
    pub infrastructure: MissingReward,
}

impl Default for OnMissingReward {
    fn default() -> Self {
        Self { agent: MissingReward::Fill, infrastructure: MissingReward::Exclude }
    }
}

/// See [`OnMissingReward`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MissingReward {
    /// `reward_fillna_value`.
    Fill,
    /// Left out of its group, and counted.
    Exclude,
}

/// `[actor]`: the update of the policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ActorConfig {
    /// Rollouts per optimiser update (verl counts prompts here); the whole batch if absent.
    pub ppo_mini_batch_size: Option<usize>,
    /// Passes over the batch.
    pub ppo_epochs: usize,
    /// At most this many updates per step and epoch; what does not fit is dropped, zero-variance groups first.
    pub max_ppo_update_times: Option<usize>,
    /// `"rollout-mean"` (Eq. 16), `"token-mean"` (Eq. 14), `"seq-mean-token-mean"` (Eq. 15) or `"seq-mean-token-sum-norm"` (Dr. GRPO).
    pub loss_agg_mode: LossAggregation,
    /// The constant that `"seq-mean-token-sum-norm"` divides by; verl's default is the response length it pads to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale_factor: Option<f64>,
    /// See [`LossConfig::clip_ratio_low`].
    pub clip_ratio_low: f64,
    /// See [`LossConfig::clip_ratio_high`].
    pub clip_ratio_high: f64,
    /// See [`LossConfig::clip_ratio_c`].
    pub clip_ratio_c: f64,
    /// See [`LossConfig::entropy_coeff`].
    pub entropy_coeff: f64,
    /// Add the divergence from the reference policy, the one the run started from, to the loss.
    pub use_kl_loss: bool,
    /// Its weight.
    pub kl_loss_coef: f64,
    /// How it is estimated: `"k1"` (`"kl"`), `"k2"` (`"mse"`) or `"k3"` (`"low_var_kl"`).
    pub kl_loss_type: KlEstimator,
    /// Which policy loss.
    pub policy_loss: PolicyLossConfig,
    /// The optimiser.
    pub optim: OptimConfig,
}

/// `[actor.policy_loss]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyLossConfig {
    /// `"vanilla"`, `"gspo"` or `"cispo"`: see [`LossMode`].
    pub loss_mode: LossMode,
}

impl Default for ActorConfig {
    fn default() -> Self {
        let loss = LossConfig::default();
        Self {
            ppo_mini_batch_size: None,
            ppo_epochs: 1,
            max_ppo_update_times: None,
            loss_agg_mode: LossAggregation::RolloutMean,
            loss_scale_factor: None,
            clip_ratio_low: loss.clip_ratio_low,
            clip_ratio_high: loss.clip_ratio_high,
            clip_ratio_c: loss.clip_ratio_c,
            entropy_coeff: loss.entropy_coeff,
            use_kl_loss: false,
            kl_loss_coef: 0.001,
            kl_loss_type: loss.kl_loss_type,
            policy_loss: PolicyLossConfig::default(),
            optim: OptimConfig::default(),
        }
    }
}

impl ActorConfig {
    /// The engine's loss for tokens sampled at `temperature`.
    #[must_use]
    pub fn loss(&self, temperature: f64) -> LossConfig {
        LossConfig {
            clip_ratio_low: self.clip_ratio_low,
            clip_ratio_high: self.clip_ratio_high,
            clip_ratio_c: self.clip_ratio_c,
            entropy_coeff: self.entropy_coeff,
            loss_mode: self.policy_loss.loss_mode,
            kl_loss_coef: if self.use_kl_loss { self.kl_loss_coef } else { 0.0 },
            kl_loss_type: self.kl_loss_type,
            temperature: temperature as f32,
            ..LossConfig::default()
        }
    }
}

/// `[trainer]`: the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainerConfig {
    /// Folder of checkpoints, metrics and pictures.
    pub default_local_dir: PathBuf,
    /// Training steps of the whole run.
    pub total_training_steps: u64,
    /// A checkpoint every so many steps, and after the last; 0 for only the last.
    pub save_freq: u64,
    /// A validation every so many steps, and after the last; 0 for only the last.
    pub test_freq: u64,
    /// A validation before the first step.
    pub val_before_train: bool,
    /// Checkpoints kept, the newest; all if absent.
    pub max_actor_ckpt_to_keep: Option<usize>,
    /// Seed of the order of tasks, of the batch plan and, with a task's id and sample index, of every model call.
    pub seed: u64,
    /// `"sync"`: as many groups in flight as a step consumes.
    pub mode: Mode,
    /// How long a rollout may be waited for beyond its own time limits before the step fails, in seconds.
    pub wait_limit_seconds: u64,
}

impl Default for TrainerConfig {
    fn default() -> Self {
        Self {
            default_local_dir: PathBuf::from("out"),
            total_training_steps: 100,
            save_freq: 10,
            test_freq: 10,
            val_before_train: true,
            max_actor_ckpt_to_keep: None,
            seed: 1,
            mode: Mode::Sync,
            wait_limit_seconds: 3600,
        }
    }
}

/// How sampling and training share time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Sample a batch, train on it, and so on.
    #[default]
    Sync,
}

/// Refuses values that cannot work, and warns of those the literature advises against.
///
/// # Errors
/// [`TrainerError::Config`] naming the key.
pub fn check(
    data: &DataConfig,
    rollout: &RolloutSection,
    algorithm: &AlgorithmConfig,
    actor: &ActorConfig,
    trainer: &TrainerConfig,
) -> Result<(), TrainerError> {
    let refuse = |key: &'static str, what: &str| Err(TrainerError::Config { key, what: what.to_owned() });
    if data.train_batch_size == 0 {
        return refuse("data.train_batch_size", "is 0; a step needs at least one prompt group");
    }
    if rollout.n == 0 {
        return refuse("rollout.n", "is 0; use at least 1");
    }
    if rollout.n < 2 && algorithm.adv_estimator.compares_siblings() {
        return refuse(
            "rollout.n",
            "is below 2; this algorithm.adv_estimator compares the rollouts of one prompt, so a group needs two",
        );
    }
    if rollout.val_n == 0 {
        return refuse("rollout.val_n", "is 0; use at least 1");
    }
    let agents = [
        ("rollout.process", rollout.process.is_some()),
        ("rollout.local", rollout.local.is_some()),
        ("rollout.container", rollout.container.is_some()),
        ("rollout.k8s", rollout.k8s.is_some()),
    ];
    let mut given = agents.iter().filter(|(_, given)| *given);
    if given.next().is_none() {
        return refuse(
            "rollout.process",
            "is missing; say which agent to run, e.g. argv = [\"python3\", \"agent.py\"]",
        );
    }
    if let Some((key, _)) = given.next() {
        return refuse(
            key,
            "is not the only agent given; a rollout runs one: rollout.process, rollout.local, rollout.container or rollout.k8s",
        );
    }
    if rollout.k8s.as_ref().is_some_and(|k8s| k8s.job_template.is_none()) {
        return refuse("rollout.k8s", "has no job_template and no job_template_path");
    }
    if actor.ppo_mini_batch_size == Some(0) {
        return refuse("actor.ppo_mini_batch_size", "is 0; leave it out to train on the whole batch at once");
    }
    if actor.max_ppo_update_times == Some(0) {
        return refuse("actor.max_ppo_update_times", "is 0: nothing would ever be trained; leave it out for no limit");
    }
    if data.val_batch_size == Some(0) {
        return refuse("data.val_batch_size", "is 0; leave val_files empty to validate nothing");
    }
    if trainer.total_training_steps == 0 {
        return refuse("trainer.total_training_steps", "is 0; use `agl eval` for rollouts without training");
    }
    if actor.ppo_epochs == 0 {
        return refuse("actor.ppo_epochs", "is 0; use at least 1");
    }
    actor.optim.check()?;
    actor.loss(rollout.temperature).check()?;
    check_losses(algorithm, actor)?;
    // The paper's ablation: rollout-level advantages alone scored below the baseline (33.1 % against 35.0 %).
    let rollout_advantage = algorithm.advantage_level == AdvantageLevel::Rollout;
    let rollout_loss = actor.loss_agg_mode == LossAggregation::RolloutMean;
    if rollout_advantage != rollout_loss {
        tracing::warn!(
            "algorithm.advantage_level and actor.loss_agg_mode count differently: only one of the two is at rollout level, \
             which scored below both and neither in the paper's ablation; set \"rollout\" and \"rollout-mean\""
        );
    }
    Ok(())
}

fn check_losses(algorithm: &AlgorithmConfig, actor: &ActorConfig) -> Result<(), TrainerError> {
    let refuse = |key: &'static str, what: &str| Err(TrainerError::Config { key, what: what.to_owned() });
    match (actor.loss_agg_mode, actor.loss_scale_factor) {
        (LossAggregation::SeqMeanTokenSumNorm, None) => {
            return refuse(
                "actor.loss_scale_factor",
                "is missing; actor.loss_agg_mode = \"seq-mean-token-sum-norm\" divides by it: take the tokens a row may have",
            );
        }
        (_, Some(factor)) if !(factor.is_finite() && factor > 0.0) => {
            return refuse("actor.loss_scale_factor", "must be greater than 0");
        }
        _ => {}
    }
    if !(algorithm.kl_ctrl.kl_coef.is_finite() && algorithm.kl_ctrl.kl_coef >= 0.0) {
        return refuse("algorithm.kl_ctrl.kl_coef", "must be 0 or more");
    }
    let correction = algorithm.rollout_correction.correction()?;
    if algorithm.old_logprobs == OldLogProbs::Recorded && !correction.rejections.is_empty() {
        return refuse(
            "algorithm.rollout_correction.rollout_rs",
            "has nothing to compare with the recorded log-probs; set algorithm.old_logprobs = \"recompute\"",
        );
    }
    if actor.use_kl_loss && actor.kl_loss_type == KlEstimator::K1 {
        tracing::warn!(
            "actor.kl_loss_type = \"k1\" has a gradient of 0 in expectation and holds nothing back; set \"k3\" or \"k2\""
        );
    }
    if actor.policy_loss.loss_mode == LossMode::Gspo && actor.clip_ratio_high > 0.05 {
        tracing::warn!(
            actor.clip_ratio_high,
            "actor.policy_loss.loss_mode = \"gspo\" clips the mean ratio of a row, which hardly moves: with a clip ratio meant for \
             tokens nothing is ever clipped; set actor.clip_ratio_low = 3e-4 and actor.clip_ratio_high = 4e-4"
        );
    }
    Ok(())
}
