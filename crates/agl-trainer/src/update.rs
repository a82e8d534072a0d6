//! From collected rollouts to the rows of the optimiser's updates: advantages, the batch plan, the weight of every token.

use std::collections::BTreeMap;

use agl_core::batch::{BatchPlan, BatchRules, Candidate, plan};
use agl_core::credit::{Advantages, RowTokens, Scored, advantages, token_weights};
use agl_core::trajectory::Sequence;
use agl_core::trajectory::sequence::LimitCounts;
use agl_engine::TrainRow;
use rand::Rng;

use crate::collect::{Collected, Exclusion, Verdict, count};
use crate::config::{ActorConfig, AlgorithmConfig};

/// A rollout that may be trained on: its rows after the length limits, and its place in its group.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Which rollout.
    pub rollout_id: String,
    /// Its siblings share it.
    pub group: String,
    /// What it counts.
    pub verdict: Verdict,
    /// Its rows.
    pub rows: Vec<Sequence>,
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
            result.samples.push(Sample { rollout_id: rollout.rollout.rollout_id, group, verdict, rows });
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
                reward: sample.verdict.reward(),
                rows: sample.rows.len().max(1),
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

    /// The rows of one update. Weights count every rollout of the update; rows whose advantage is 0 have no gradient
    /// and are not computed.
    #[must_use]
    pub fn rows(&self, update: &[usize], advantages: &Advantages, actor: &ActorConfig) -> Vec<TrainRow> {
        let rows: Vec<(usize, &Sequence)> =
            update.iter().flat_map(|&index| self.samples[index].rows.iter().map(move |row| (index, row))).collect();
        let counted: Vec<_> =
            rows.iter().map(|&(rollout, row)| RowTokens { rollout, trained: row.trained_tokens() }).collect();
        let weights = token_weights(&counted, actor.loss_agg_mode);
        rows.into_iter()
            .zip(weights)
            .filter_map(|((index, row), weight)| {
                let advantage = advantages.values[index].filter(|&advantage| advantage != 0.0)?;
                Some(TrainRow {
                    ids: row.token_ids.clone(),
                    mask: row.mask.iter().map(|&bit| bit == 1).collect(),
                    weights: vec![weight as f32; row.token_ids.len()],
                    advantages: vec![advantage as f32; row.token_ids.len()],
                    old_log_probs: row.log_probs.clone()?,
                    rollout_log_probs: None,
                })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
            rows: rows.iter().map(|&trained| row(trained)).collect(),
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
}
