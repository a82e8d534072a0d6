//! From a step's rollouts, credit and updates to its metrics.

use agl_core::credit::Advantages;
use agl_core::trajectory::{BreakClass, TokenDecoder};
use agl_engine::{ChatTokenizer, Engine, SamplerTotals, UpdateStats};

use crate::collect::Collected;
use crate::config::{ActorConfig, AlgorithmConfig};
use crate::measure::Measurement;
use crate::metrics::StepMetrics;
use crate::update::Samples;

/// The policy's tokenizer, as `agl-core` wants to be handed one.
struct Decoder<'a>(&'a ChatTokenizer);

impl TokenDecoder for Decoder<'_> {
    fn decode(&self, tokens: &[u32]) -> String {
        // What cannot be decoded has no text to compare.
        self.0.decode(tokens, false).unwrap_or_default()
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0_usize), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / count as f64)
}

/// What the rollouts of a step were like.
pub(crate) fn rollouts(metrics: &mut StepMetrics, collected: &[Collected], engine: &Engine) {
    let rows: usize = collected.iter().map(|rollout| rollout.sequences.len()).sum();
    let sum = |count: fn(&Collected) -> usize| collected.iter().map(count).sum::<usize>() as f64;
    metrics.set("rollouts/total", collected.len() as f64);
    metrics.set("rollouts/rows_per_rollout", rows as f64 / collected.len().max(1) as f64);
    metrics.set("rollouts/calls_per_rollout", sum(|rollout| rollout.counts.calls) / collected.len().max(1) as f64);
    metrics.set("rollouts/failed_calls", sum(|rollout| rollout.counts.failed));
    metrics.set("rollouts/superseded_calls", sum(|rollout| rollout.counts.superseded));
    metrics.set("rollouts/undelivered_calls", sum(|rollout| rollout.counts.undelivered));
    metrics.set("tokens/sampled", sum(|rollout| rollout.sequences.iter().map(|row| row.trained_tokens()).sum()));
    for class in ["retokenisation", "chat_template", "rewritten_history"] {
        metrics.set(&format!("breaks/{class}"), 0.0);
    }
    for found in collected.iter().flat_map(|rollout| &rollout.breaks).filter(|found| !found.new_conversation) {
        let name = match found.classify(&Decoder(engine.tokenizer())) {
            BreakClass::Retokenisation => "breaks/retokenisation",
            BreakClass::ChatTemplate => "breaks/chat_template",
            BreakClass::RewrittenHistory => "breaks/rewritten_history",
            BreakClass::NewConversation => continue,
        };
        let before = metrics.get(name).unwrap_or(0.0);
        metrics.set(name, before + 1.0);
    }
}

/// What the sampler did between two readings of its totals.
pub(crate) fn sampler(metrics: &mut StepMetrics, before: SamplerTotals, after: SamplerTotals) {
    let processed = (after.prompt_tokens - before.prompt_tokens) as f64;
    let cached = (after.cached_prompt_tokens - before.cached_prompt_tokens) as f64;
    metrics.set("engine/prompt_tokens", processed);
    metrics.set("engine/cached_prompt_tokens", cached);
    if processed + cached > 0.0 {
        metrics.set("engine/prefix_cache_hit_rate", cached / (processed + cached));
    }
}

/// Rewards, groups, and what was left out.
pub(crate) fn credit(metrics: &mut StepMetrics, samples: &Samples, advantages: &Advantages) {
    let rewards = || samples.samples.iter().filter_map(|sample| sample.verdict.reward());
    if let Some(average) = mean(rewards()) {
        metrics.set("reward/mean", average);
        metrics.set("reward/std", mean(rewards().map(|reward| (reward - average).powi(2))).unwrap_or(0.0).sqrt());
    }
    metrics.set("groups/dropped", advantages.dropped_groups.len() as f64);
    metrics.set("groups/zero_variance", advantages.zero_variance_groups.len() as f64);
    for (why, count) in samples.exclusions() {
        metrics.set(&format!("excluded/{}", why.as_str()), count as f64);
        tracing::warn!(count, reason = why.as_str(), "rollouts left out: {}", why.remedy());
    }
    metrics.set("limits/dropped_rows", samples.limits.dropped_rows as f64);
    metrics.set("limits/truncated_rows", samples.limits.truncated_rows as f64);
    metrics.set("limits/lost_tokens", samples.limits.lost_tokens as f64);
}

/// How far the sampling policy is from the one before the update, and both from the reference; verl's names.
pub(crate) fn measurement(metrics: &mut StepMetrics, measured: &Measurement, algorithm: &AlgorithmConfig) {
    metrics.set("timing/measure_seconds", measured.seconds);
    if let Some(drift) = measured.drift {
        let share = |rejected: usize, of: usize| rejected as f64 / of.max(1) as f64;
        metrics.set("rollout_corr/rollout_is_mean", drift.weight_mean);
        metrics.set("rollout_corr/rollout_is_max", drift.weight_max);
        metrics.set("rollout_corr/rollout_is_eff_sample_size", drift.effective_sample_size);
        metrics.set("rollout_corr/kl", drift.kl);
        metrics.set("rollout_corr/k3_kl", drift.k3_kl);
        metrics.set("rollout_corr/rollout_rs_masked_fraction", share(drift.rejected_tokens, drift.tokens));
        metrics.set("rollout_corr/rollout_rs_seq_masked_fraction", share(drift.rejected_rows, drift.rows));
    }
    if let Some(kl) = measured.reward_kl {
        metrics.set("actor/reward_kl_penalty", kl);
        metrics.set("actor/reward_kl_penalty_coeff", algorithm.kl_ctrl.kl_coef);
    }
}

/// Means over the updates of a step.
pub(crate) fn updates(metrics: &mut StepMetrics, stats: &[UpdateStats], actor: &ActorConfig) {
    type Column = fn(&UpdateStats) -> f64;
    metrics.set("actor/updates", stats.len() as f64);
    let columns: [(&str, Column); 8] = [
        ("actor/loss", |update| update.loss),
        ("actor/grad_norm", |update| update.grad_norm),
        ("actor/clip_fraction", |update| update.clip_fraction),
        ("actor/clip_fraction_lower", |update| update.clip_fraction_lower),
        ("actor/approx_kl", |update| update.approx_kl),
        ("actor/ratio_mean", |update| update.ratio_mean),
        ("actor/ratio_max", |update| update.ratio_max),
        ("actor/entropy", |update| update.entropy),
    ];
    for (name, column) in columns {
        if let Some(value) = mean(stats.iter().map(column)) {
            metrics.set(name, value);
        }
    }
    if let (true, Some(kl)) = (actor.use_kl_loss, mean(stats.iter().map(|update| update.ref_kl))) {
        metrics.set("actor/kl_loss", kl);
        metrics.set("actor/kl_coef", actor.kl_loss_coef);
    }
    // With recorded log-probs, the ratios of the first update are those of the policy before it to the one that sampled.
    if let (None, Some(first)) = (metrics.get("rollout_corr/rollout_is_mean"), stats.first()) {
        metrics.set("rollout_corr/rollout_is_mean", first.ratio_mean);
        metrics.set("rollout_corr/rollout_is_max", first.ratio_max);
        metrics.set("rollout_corr/rollout_is_eff_sample_size", first.ratio_ess);
        metrics.set("rollout_corr/k3_kl", first.approx_kl);
    }
    metrics.set("tokens/updated", stats.iter().map(|update| update.tokens as f64).sum());
    metrics.set("tokens/trained", stats.iter().map(|update| update.trained_tokens as f64).sum());
}
