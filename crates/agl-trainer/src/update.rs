//! From collected rollouts to the rows of the optimiser's updates: advantages, the batch plan, the weight of every token.

use std::collections::BTreeMap;

use agl_core::batch::{BatchPlan, BatchRules, Candidate, plan};
use agl_core::credit::{Advantages, RowTokens, Scored, advantages, token_weights};
use agl_core::trajectory::Sequence;
use agl_core::trajectory::sequence::LimitCounts;
use agl_engine::{MaskedRow, TrainRow};
use rand::Rng;

use crate::collect::{Collected, Exclusion, Verdict, count};
use crate::config::{ActorConfig, AlgorithmConfig};
use crate::measure::Measured;

/// A rollout that may be trained on: its rows after the length limits, and its place in its group.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Which rollout.
    pub rollout_id: String,
    /// Its siblings share it.
    pub group: String,
    /// What it counts.
    pub verdict: Verdict,
    /// Taken off its reward for the distance from the reference policy.
    pub kl_penalty: f64,
    /// Its rows.
    pub rows: Vec<SampleRow>,
}

/// A row, and what was measured of it.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleRow {
    /// As it was sampled.
    pub sequence: Sequence,
    /// As the policies of the update see it.
    pub measured: Measured,
}

impl SampleRow {
    /// Its trained tokens, for the engine to compute log-probs of.
    pub(crate) fn masked(&self) -> MaskedRow {
        MaskedRow {
            ids: self.sequence.token_ids.clone(),
            mask: self.sequence.mask.iter().map(|&bit| bit == 1).collect(),
        }
    }

    /// log π_old: computed before the update, or else as recorded.
    pub(crate) fn old_log_probs(&self) -> Option<&Vec<f32>> {
        self.measured.old_log_probs.as_ref().or(self.sequence.log_probs.as_ref())
    }

    /// The row for the engine, each token with this weight and advantage; `None` if nothing of it is trained.
    fn train_row(&self, weight: f64, advantage: f64) -> Option<TrainRow> {
        let MaskedRow { ids, mut mask } = self.masked();
        let corrected = self.measured.corrected.as_ref();
        if let Some(corrected) = corrected {
            mask.iter_mut().zip(&corrected.rejected).for_each(|(trained, rejected)| *trained &= !rejected);
        }
        if !mask.contains(&true) {
            return None;
        }
        let len = ids.len();
        Some(TrainRow {
            ids,
            mask,
            weights: vec![weight as f32; len],
            advantages: vec![advantage as f32; len],
            old_log_probs: self.old_log_probs()?.clone(),
            importance_weights: corrected.map(|corrected| corrected.weights.clone()),
            ref_log_probs: self.measured.ref_log_probs.clone(),
        })
    }
}

/// The samples of a step, and what the limits cost.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    /// One per rollout.
    pub samples: Vec<Sample>,
    /// Over all rollouts.
    pub limits: LimitCounts,
}

impl Samples {
    /// Applies the length limits, and leaves out what has no log-probs to train with.
    #[must_use]
    pub fn of(collected: Vec<Collected>, algorithm: &AlgorithmConfig) -> Self {
        let mut result = Self::default();
        for rollout in collected {
            let (rows, limits) = algorithm.limits().apply(rollout.sequences);
            result.limits.dropped_rows += limits.dropped_rows;
            result.limits.truncated_rows += limits.truncated_rows;
            result.limits.emptied_rows += limits.emptied_rows;
            result.limits.lost_tokens += limits.lost_tokens;
            let verdict = match rollout.verdict {
                Verdict::Reward(_) if rows.iter().any(|row| row.log_probs.is_none()) => {
                    Verdict::Excluded(Exclusion::NoLogProbs)
                }
                verdict => verdict,
            };
            let group = rollout.rollout.metadata.get("group").and_then(|group| group.as_str());
            let group = group.map_or_else(|| rollout.rollout.rollout_id.clone(), str::to_owned);
            let rows = rows.into_iter().map(|sequence| SampleRow { sequence, measured: Measured::default() }).collect();
            let rollout_id = rollout.rollout.rollout_id;
            result.samples.push(Sample { rollout_id, group, verdict, kl_penalty: 0.0, rows });
        }
        result
    }

    /// How many rollouts were left out, by reason.
    #[must_use]
    pub fn exclusions(&self) -> BTreeMap<Exclusion, usize> {
        count(self.samples.iter().map(|sample| sample.verdict))
    }

    /// One advantage per rollout, from its group.
    #[must_use]
    pub fn advantages(&self, algorithm: &AlgorithmConfig) -> Advantages {
        let scored: Vec<_> = self
            .samples
            .iter()
            .map(|sample| Scored {
                group: sample.group.clone(),
                reward: sample.verdict.reward().map(|reward| reward - sample.kl_penalty),
                rows: sample.rows.len().max(1),
                tokens: sample.rows.iter().map(|row| row.sequence.trained_tokens()).sum(),
            })
            .collect();
        advantages(&scored, algorithm.adv_estimator, algorithm.advantage_level)
    }

    /// Which rollouts go into which update. Indexes are those of `samples`.
    #[must_use]
    pub fn plan(&self, advantages: &Advantages, actor: &ActorConfig, rng: &mut impl Rng) -> BatchPlan {
        let usable: Vec<usize> = (0..self.samples.len())
            .filter(|&index| advantages.values[index].is_some() && !self.samples[index].rows.is_empty())
            .collect();
        let candidates: Vec<_> = usable
            .iter()
            .map(|&index| Candidate {
                zero_variance: advantages.zero_variance_groups.contains(&self.samples[index].group),
            })
            .collect();
        let rules = BatchRules {
            mini_batch_size: actor.ppo_mini_batch_size.unwrap_or(usable.len().max(1)),
            full_batches_only: false,
            max_updates: actor.max_ppo_update_times,
        };
        let mut plan = plan(&candidates, rules, rng);
        let lists = plan.updates.iter_mut().chain([&mut plan.dropped_zero_variance, &mut plan.dropped_others]);
        for index in lists.flatten() {
            *index = usable[*index];
        }
        plan
    }

    /// The rows of one update. Weights count every rollout of the update and every sampled token, rejected ones too. Rows that
    /// cannot have a gradient are not computed: those whose advantage is 0, unless the loss has terms beside the policy loss,
    /// and those whose tokens are all rejected.
    #[must_use]
    pub fn rows(&self, update: &[usize], advantages: &Advantages, actor: &ActorConfig) -> Vec<TrainRow> {
        let rows: Vec<(usize, &SampleRow)> =
            update.iter().flat_map(|&index| self.samples[index].rows.iter().map(move |row| (index, row))).collect();
        let counted: Vec<_> =
            rows.iter().map(|&(rollout, row)| RowTokens { rollout, trained: row.sequence.trained_tokens() }).collect();
        let weights = token_weights(&counted, actor.loss_agg_mode, actor.loss_scale_factor.unwrap_or(1.0));
        let other_terms = actor.use_kl_loss || actor.entropy_coeff > 0.0;
        rows.into_iter()
            .zip(weights)
            .filter_map(|((index, row), weight)| {
                let advantage = advantages.values[index].filter(|&advantage| advantage != 0.0 || other_terms)?;
                row.train_row(weight, advantage)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use agl_core::credit::off_policy::CorrectedRow;
    use agl_core::trajectory::CallSpan;
    use rand::SeedableRng;

    fn row(trained: usize) -> Sequence {
        let mask: Vec<u8> = std::iter::once(0).chain(std::iter::repeat_n(1, trained)).collect();
        Sequence {
            token_ids: vec![5; trained + 1],
            log_probs: Some(vec![-0.5; trained + 1]),
            policy_versions: vec![1; trained + 1],
            prompt_length: 1,
            calls: vec![CallSpan { seq: 0, call_id: "c".into(), start: 1, end: trained + 1, trainable: true }],
            mask,
        }
    }

    fn sample(id: &str, group: &str, reward: f64, rows: &[usize]) -> Sample {
        Sample {
            rollout_id: id.into(),
            group: group.into(),
            verdict: Verdict::Reward(reward),
            kl_penalty: 0.0,
            rows: rows
                .iter()
                .map(|&trained| SampleRow { sequence: row(trained), measured: Measured::default() })
                .collect(),
        }
    }

    #[test]
    fn a_rollout_in_three_rows_weighs_as_much_as_its_sibling_in_one() {
        let samples = Samples {
            samples: vec![sample("a", "g", 1.0, &[10, 20, 30]), sample("b", "g", 0.0, &[4])],
            limits: LimitCounts::default(),
        };
        let algorithm = AlgorithmConfig { adv_estimator: agl_core::credit::Estimator::GrpoNoStd, ..Default::default() };
        let actor = ActorConfig::default();
        let advantages = samples.advantages(&algorithm);
        let plan = samples.plan(&advantages, &actor, &mut rand_chacha::ChaCha8Rng::seed_from_u64(1));
        assert_eq!(plan.updates.len(), 1, "the whole batch is one update unless ppo_mini_batch_size says otherwise");
        let rows = samples.rows(&[0, 1], &advantages, &actor);
        let gradient = |rows: &[TrainRow]| -> f32 {
            rows.iter()
                .flat_map(|row| row.mask.iter().zip(&row.weights).zip(&row.advantages))
                .map(|((&mask, weight), advantage)| if mask { weight * advantage } else { 0.0 })
                .sum()
        };
        assert!((gradient(&rows[..3]) - 0.25).abs() < 1e-6, "half the weight times an advantage of one half");
        assert!((gradient(&rows[3..]) + 0.25).abs() < 1e-6);
    }

    #[test]
    fn a_group_of_equals_is_counted_in_the_mean_but_not_computed() {
        let samples = Samples {
            samples: vec![
                sample("a", "g", 1.0, &[10]),
                sample("b", "g", 0.0, &[10]),
                sample("c", "h", 1.0, &[10]),
                sample("d", "h", 1.0, &[10]),
            ],
            limits: LimitCounts::default(),
        };
        let actor = ActorConfig::default();
        let advantages = samples.advantages(&AlgorithmConfig::default());
        let rows = samples.rows(&[0, 1, 2, 3], &advantages, &actor);
        assert_eq!(rows.len(), 2);
        assert!((rows[0].weights[1] - 1.0 / (4.0 * 10.0)).abs() < 1e-7, "R is 4, the rollouts of the update");
    }

    #[test]
    fn rows_of_equals_are_computed_where_the_loss_has_more_than_the_policy_loss() {
        let samples = Samples {
            samples: vec![sample("a", "g", 1.0, &[10]), sample("b", "g", 1.0, &[10])],
            limits: LimitCounts::default(),
        };
        let advantages = samples.advantages(&AlgorithmConfig::default());
        let rows = |actor: ActorConfig| samples.rows(&[0, 1], &advantages, &actor).len();
        assert_eq!(rows(ActorConfig::default()), 0);
        assert_eq!(rows(ActorConfig { use_kl_loss: true, ..ActorConfig::default() }), 2);
        assert_eq!(rows(ActorConfig { entropy_coeff: 0.01, ..ActorConfig::default() }), 2);
    }

    #[test]
    fn a_rejected_token_is_not_trained_and_makes_no_other_heavier() {
        let mut samples = Samples {
            samples: vec![sample("a", "g", 1.0, &[2]), sample("b", "g", 0.0, &[2])],
            limits: LimitCounts::default(),
        };
        let corrected = |rejected: [bool; 3]| Measured {
            old_log_probs: Some(vec![0.0, -0.7, -0.6]),
            ref_log_probs: None,
            corrected: Some(CorrectedRow { weights: vec![1.0, 0.8, 0.9], rejected: rejected.to_vec() }),
        };
        samples.samples[0].rows[0].measured = corrected([false, true, false]);
        samples.samples[1].rows[0].measured = corrected([false, true, true]);
        let advantages = samples.advantages(&AlgorithmConfig::default());
        let rows = samples.rows(&[0, 1], &advantages, &ActorConfig::default());
        assert_eq!(rows.len(), 1, "a row of which nothing is left is not computed");
        assert_eq!(rows[0].mask, [false, false, true]);
        assert!((rows[0].weights[2] - 0.25).abs() < 1e-7, "two rollouts of two tokens");
        assert_eq!(rows[0].old_log_probs, [0.0, -0.7, -0.6]);
        assert_eq!(rows[0].importance_weights, Some(vec![1.0, 0.8, 0.9]));
    }

    #[test]
    fn what_a_rollout_pays_for_its_distance_comes_off_its_reward_before_the_baseline() {
        let mut samples = Samples {
            samples: vec![sample("a", "g", 1.0, &[2]), sample("b", "g", 0.0, &[2])],
            limits: LimitCounts::default(),
        };
        samples.samples[0].kl_penalty = 0.4;
        let algorithm = AlgorithmConfig { adv_estimator: agl_core::credit::Estimator::GrpoNoStd, ..Default::default() };
        let values = samples.advantages(&algorithm).values;
        assert!((values[0].unwrap() - 0.3).abs() < 1e-12 && (values[1].unwrap() + 0.3).abs() < 1e-12);
    }
}
