//! Metrics of a step that a person should look at, each with its likely cause and what to do next.

use crate::metrics::StepMetrics;

/// A metric outside of the range in which training can be trusted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alarm {
    /// Its name.
    pub metric: &'static str,
    /// Its value.
    pub value: f64,
    /// What it means, why it is likely so, and what to do.
    pub advice: &'static str,
}

/// The alarms of a step. The bounds are those the field uses for off-policy training: mean importance weight in [0.5, 2],
/// effective sample size at least 0.3, divergence at most 0.1 per token.
#[must_use]
pub fn alarms(metrics: &StepMetrics) -> Vec<Alarm> {
    type Bad = fn(f64) -> bool;
    const CHECKS: [(&str, Bad, &str); 3] = [
        (
            "rollout_corr/rollout_is_mean",
            |mean| !(0.5..=2.0).contains(&mean),
            "the importance weights of this step are not near 1 on average: the policy that sampled is not the one that is trained. \
             Likely the gateway or an agent sets a temperature, top-p or top-k that rollout.temperature does not say, or the sampler \
             serves other weights. Compare rollout.temperature with the recorded requests, and the policy_version of the calls",
        ),
        (
            "rollout_corr/rollout_is_eff_sample_size",
            |size| size < 0.3,
            "a few tokens carry most of this step's weight: its gradient is noise. Likely the rollouts are of much older policies, or \
             long rows are weighted as sequences. Lower actor.optim.lr or the updates per step (actor.ppo_epochs, a larger \
             actor.ppo_mini_batch_size), or set algorithm.rollout_correction.rollout_is = \"token\"",
        ),
        (
            "rollout_corr/k3_kl",
            |kl| kl > 0.1,
            "sampler and trainer disagree about the sampled tokens: more than 0.1 nats per token. Likely they apply another \
             temperature, top-p or chat template, or other numerics. Set algorithm.old_logprobs = \"recompute\", and \
             algorithm.rollout_correction.rollout_rs = \"token_k1\" with a rollout_rs_threshold such as \"0.5_2.0\" until it is found",
        ),
    ];
    CHECKS
        .iter()
        .filter_map(|&(metric, is_bad, advice)| {
            let value = metrics.get(metric)?;
            is_bad(value).then_some(Alarm { metric, value, advice })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_on_its_own_policy_is_quiet_and_one_far_off_is_not() {
        let mut metrics = StepMetrics::new(1);
        assert!(alarms(&metrics).is_empty(), "what was not measured is no alarm");
        metrics.set("rollout_corr/rollout_is_mean", 1.01);
        metrics.set("rollout_corr/rollout_is_eff_sample_size", 0.98);
        metrics.set("rollout_corr/k3_kl", 0.001);
        assert!(alarms(&metrics).is_empty());
        metrics.set("rollout_corr/rollout_is_mean", 0.4);
        metrics.set("rollout_corr/rollout_is_eff_sample_size", 0.2);
        metrics.set("rollout_corr/k3_kl", 0.2);
        let found: Vec<&str> = alarms(&metrics).iter().map(|alarm| alarm.metric).collect();
        assert_eq!(
            found,
            ["rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_eff_sample_size", "rollout_corr/k3_kl"]
        );
    }
}
