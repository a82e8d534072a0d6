//! Settings of the engine, the loss and the optimiser. Key names are those of verl and Hugging Face where they have one.

use agl_core::credit::KlEstimator;
use serde::{Deserialize, Serialize};

use crate::EngineError;
use crate::train::schedule::LrSchedulerType;

/// How the engine samples and how much it computes at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Name under which the server lists the model; the model directory's name if absent.
    pub served_model_name: Option<String>,
    /// Longest prompt plus answer in tokens; the model's `max_position_embeddings` if absent.
    pub max_model_len: Option<usize>,
    /// Sequences decoded together; more wait.
    pub max_batch_size: usize,
    /// Prompts that begin like a finished or a running sequence take its keys and values over instead of computing them again:
    /// the next turn of a rollout, the siblings of a group. What one policy computed is not used under the next.
    pub enable_prefix_caching: bool,
    /// Tokens that finished sequences may take up in the cache. Each takes up as much as the longest sequence needs, and those
    /// longest not of use go first. As many as 1 GiB holds if absent.
    pub prefix_cache_tokens: Option<usize>,
    /// Prompt tokens processed between two decoding steps, so that long prompts do not stall running answers for long.
    pub max_prefill_tokens: usize,
    /// Tokens (padding included) of one training micro-batch; bounds the memory of an update. On a CPU small ones are also
    /// faster: their activations stay in cache and in the allocator's hands.
    pub micro_batch_tokens: usize,
    /// Seed of requests that bring none.
    pub seed: u64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            served_model_name: None,
            max_model_len: None,
            max_batch_size: 64,
            enable_prefix_caching: true,
            prefix_cache_tokens: None,
            max_prefill_tokens: 2048,
            micro_batch_tokens: 1024,
            seed: 0,
        }
    }
}

impl EngineConfig {
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        at_least_one("max_batch_size", self.max_batch_size)?;
        at_least_one("max_prefill_tokens", self.max_prefill_tokens)?;
        at_least_one("micro_batch_tokens", self.micro_batch_tokens)?;
        if let Some(tokens) = self.prefix_cache_tokens {
            at_least_one("prefix_cache_tokens", tokens)?;
        }
        if let Some(len) = self.max_model_len {
            at_least_one("max_model_len", len)?;
        }
        Ok(())
    }

    /// Tokens that finished sequences may take up, 0 for none; a token takes up `bytes`.
    pub(crate) fn prefix_tokens(&self, bytes: usize) -> usize {
        const DEFAULT_BYTES: usize = 1 << 30;
        if self.enable_prefix_caching { self.prefix_cache_tokens.unwrap_or(DEFAULT_BYTES / bytes.max(1)) } else { 0 }
    }
}

fn at_least_one(key: &'static str, value: usize) -> Result<(), EngineError> {
    in_range(key, value as f64, value >= 1, "at least 1")
}

fn in_range(key: &'static str, value: f64, holds: bool, expected: &'static str) -> Result<(), EngineError> {
    if holds { Ok(()) } else { Err(EngineError::Setting { key, value: value.to_string(), expected }) }
}

/// What an update minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// The policy loss of [`LossConfig::loss_mode`].
    #[default]
    PolicyGradient,
    /// Weighted cross-entropy, −Σ w·log p: supervised fine-tuning. Advantages and old log-probs are ignored.
    Sft,
}

/// How the policy loss uses the ratio r = π/π_old. A is the advantage, ε_low and ε_high are the clip ratios; verl's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossMode {
    /// PPO: max(−rA, −clip(r, 1−ε_low, 1+ε_high)A) per token, with dual clip.
    #[default]
    Vanilla,
    /// GSPO (arXiv 2507.18071): the same with one ratio per row, s = exp(mean_t log r_t), and without dual clip. A token's gradient
    /// is that of s·π/sg(π), with sg(·) a constant to the gradient. Its clip ratios are small: 3e-4 and 4e-4.
    Gspo,
    /// CISPO (arXiv 2506.13585): −sg(clip(r, 1−ε_low, 1+ε_high))·A·log π: no token loses its gradient, its weight is bounded. Meant
    /// for ε_low = 1, which is no lower bound, and an ε_high of several.
    Cispo,
}

/// The loss of [`crate::Engine::update`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossConfig {
    /// What is minimised.
    pub kind: LossKind,
    /// Which policy loss.
    pub loss_mode: LossMode,
    /// The ratio's gradient stops below 1 − this (for negative advantages).
    pub clip_ratio_low: f64,
    /// The ratio's gradient stops above 1 + this (for positive advantages).
    pub clip_ratio_high: f64,
    /// Dual clip: with a negative advantage the loss is bounded by this times |advantage|. Greater than 1.
    pub clip_ratio_c: f64,
    /// Weight of the divergence from the reference policy, whose log-probs the rows then bring; 0 turns it off.
    pub kl_loss_coef: f64,
    /// How that divergence is estimated.
    pub kl_loss_type: KlEstimator,
    /// Weight of the entropy bonus.
    pub entropy_coeff: f64,
    /// Log-probs are those of logits / temperature, as they were when the tokens were sampled.
    pub temperature: f32,
}

impl Default for LossConfig {
    fn default() -> Self {
        Self {
            kind: LossKind::PolicyGradient,
            loss_mode: LossMode::Vanilla,
            clip_ratio_low: 0.2,
            clip_ratio_high: 0.2,
            clip_ratio_c: 3.0,
            kl_loss_coef: 0.0,
            kl_loss_type: KlEstimator::K3,
            entropy_coeff: 0.0,
            temperature: 1.0,
        }
    }
}

impl LossConfig {
    /// Names the first value that is out of range.
    ///
    /// # Errors
    /// [`EngineError::Setting`].
    pub fn check(&self) -> Result<(), EngineError> {
        in_range("clip_ratio_low", self.clip_ratio_low, (0.0..=1.0).contains(&self.clip_ratio_low), "in [0, 1]")?;
        in_range("clip_ratio_high", self.clip_ratio_high, self.clip_ratio_high >= 0.0, "0 or more")?;
        in_range("clip_ratio_c", self.clip_ratio_c, self.clip_ratio_c > 1.0, "greater than 1")?;
        let coef = self.kl_loss_coef;
        in_range("kl_loss_coef", coef, coef.is_finite() && coef >= 0.0, "0 or more")?;
        in_range("entropy_coeff", self.entropy_coeff, self.entropy_coeff >= 0.0, "0 or more")?;
        check_training_temperature(self.temperature)
    }
}

pub(crate) fn check_training_temperature(temperature: f32) -> Result<(), EngineError> {
    let holds = temperature.is_finite() && temperature > 0.0;
    in_range("temperature", f64::from(temperature), holds, "greater than 0 (tokens sampled greedily have no gradient)")
}

/// AdamW as in PyTorch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimConfig {
    /// Learning rate, at its highest.
    pub lr: f64,
    /// `"constant"` or `"cosine"`: what it does after the warm-up.
    pub lr_scheduler_type: LrSchedulerType,
    /// Training steps (not updates) over which it rises linearly from 0. Below 0: `lr_warmup_steps_ratio` says how many.
    pub lr_warmup_steps: i64,
    /// Share of the run's steps over which it rises, where `lr_warmup_steps` is below 0.
    pub lr_warmup_steps_ratio: f64,
    /// The share of `lr` that a cosine falls to.
    pub min_lr_ratio: f64,
    /// Decay of the running means of the gradient and of its square.
    pub betas: [f64; 2],
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay, on every parameter.
    pub weight_decay: f64,
    /// The gradient's global norm is scaled down to this; 0 turns it off.
    pub grad_clip: f64,
}

impl Default for OptimConfig {
    fn default() -> Self {
        Self {
            lr: 1e-6,
            lr_scheduler_type: LrSchedulerType::default(),
            lr_warmup_steps: -1,
            lr_warmup_steps_ratio: 0.0,
            min_lr_ratio: 0.0,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            grad_clip: 1.0,
        }
    }
}

impl OptimConfig {
    /// Names the first value that is out of range.
    ///
    /// # Errors
    /// [`EngineError::Setting`].
    pub fn check(&self) -> Result<(), EngineError> {
        in_range("lr", self.lr, self.lr.is_finite() && self.lr >= 0.0, "0 or more")?;
        for beta in self.betas {
            in_range("betas", beta, (0.0..1.0).contains(&beta), "two numbers in [0, 1)")?;
        }
        in_range("eps", self.eps, self.eps > 0.0, "greater than 0")?;
        in_range("weight_decay", self.weight_decay, self.weight_decay >= 0.0, "0 or more")?;
        for (key, ratio) in [("lr_warmup_steps_ratio", self.lr_warmup_steps_ratio), ("min_lr_ratio", self.min_lr_ratio)]
        {
            in_range(key, ratio, (0.0..=1.0).contains(&ratio), "in [0, 1]")?;
        }
        in_range("grad_clip", self.grad_clip, self.grad_clip >= 0.0, "0 or more")
    }
}
