//! Advantages of a group of sibling rollouts: one scalar each, which every row of the rollout inherits.
//!
//! A reward belongs to a rollout, so rows of one rollout cannot disagree on it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Added to the standard deviation, as in the field's GRPO implementations.
const EPSILON: f64 = 1e-6;

/// How rewards become advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Estimator {
    /// `(R − mean) / (std + 1e-6)`, std with one degree of freedom taken.
    #[default]
    Grpo,
    /// `R − mean`: GRPO without the division (`norm_adv_by_std_in_grpo = false`, Dr. GRPO's advantage).
    #[serde(rename = "grpo_no_std")]
    GrpoNoStd,
    /// `n/(n−1) · (R − mean)`: each rollout against the mean of the others.
    Rloo,
}

/// What the statistics of a group are taken over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AdvantageLevel {
    /// Each rollout counts once.
    #[default]
    Rollout,
    /// Each rollout counts as often as it has rows. For ablations only: the row count is an accident.
    Row,
}

/// A rollout with its reward. `group` names its siblings: rollouts of one prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// Siblings share it.
    pub group: String,
    /// `None` where the rollout has no reward and is left out of its group.
    pub reward: Option<f64>,
    /// How many training rows it yields; matters at [`AdvantageLevel::Row`] alone.
    pub rows: usize,
}

/// Advantages, parallel to the rollouts they were asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Advantages {
    /// `None` for a rollout without a reward, and for one whose group has fewer than two rewarded rollouts.
    pub values: Vec<Option<f64>>,
    /// Groups dropped because they had fewer than two rewarded rollouts.
    pub dropped_groups: Vec<String>,
    /// Groups whose rewards are all equal: their advantages are all 0 and they teach nothing.
    pub zero_variance_groups: Vec<String>,
}

/// One advantage per rollout.
#[must_use]
pub fn advantages(rollouts: &[Scored], estimator: Estimator, level: AdvantageLevel) -> Advantages {
    let mut groups: BTreeMap<&str, Vec<(usize, f64)>> = BTreeMap::new();
    for (index, rollout) in rollouts.iter().enumerate() {
        let members = groups.entry(&rollout.group).or_default();
        members.extend(rollout.reward.map(|reward| (index, reward)));
    }
    let mut result =
        Advantages { values: vec![None; rollouts.len()], dropped_groups: Vec::new(), zero_variance_groups: Vec::new() };
    for (group, members) in groups {
        if members.len() < 2 {
            result.dropped_groups.push(group.to_owned());
            continue;
        }
        let weight = |index: usize| match level {
            AdvantageLevel::Rollout => 1.0,
            AdvantageLevel::Row => rollouts[index].rows as f64,
        };
        let statistics = Statistics::of(members.iter().map(|&(index, reward)| (reward, weight(index))));
        if members.iter().all(|&(_, reward)| reward == members[0].1) {
            // Exactly 0, not what rounding leaves of R − mean: dividing that by a std near 0 would make it anything.
            members.iter().for_each(|&(index, _)| result.values[index] = Some(0.0));
            result.zero_variance_groups.push(group.to_owned());
            continue;
        }
        for (index, reward) in members {
            result.values[index] = Some(statistics.advantage(reward, estimator));
        }
    }
    result
}

/// Count, mean and standard deviation (ddof = 1) of a group.
struct Statistics {
    count: f64,
    mean: f64,
    std: f64,
}

impl Statistics {
    fn of(rewards: impl Iterator<Item = (f64, f64)> + Clone) -> Self {
        let count: f64 = rewards.clone().map(|(_, weight)| weight).sum();
        let mean = rewards.clone().map(|(reward, weight)| reward * weight).sum::<f64>() / count;
        let squares: f64 = rewards.map(|(reward, weight)| weight * (reward - mean).powi(2)).sum();
        Self { count, mean, std: (squares / (count - 1.0)).sqrt() }
    }

    fn advantage(&self, reward: f64, estimator: Estimator) -> f64 {
        let centred = reward - self.mean;
        match estimator {
            Estimator::Grpo => centred / (self.std + EPSILON),
            Estimator::GrpoNoStd => centred,
            Estimator::Rloo => centred * self.count / (self.count - 1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scored(group: &str, reward: f64, rows: usize) -> Scored {
        Scored { group: group.into(), reward: Some(reward), rows }
    }

    #[test]
    fn three_rows_of_one_rollout_do_not_move_the_baseline() {
        let rollouts = [scored("g", 1.0, 3), scored("g", 0.0, 1)];
        let rollout_level = advantages(&rollouts, Estimator::GrpoNoStd, AdvantageLevel::Rollout);
        assert_eq!(rollout_level.values, [Some(0.5), Some(-0.5)]);
        let row_level = advantages(&rollouts, Estimator::GrpoNoStd, AdvantageLevel::Row);
        assert_eq!(row_level.values, [Some(0.25), Some(-0.75)], "the row-level baseline is 3/4");
    }

    #[test]
    fn grpo_divides_by_the_sample_deviation() {
        let group = [scored("g", 1.0, 1), scored("g", 0.0, 1), scored("g", 0.0, 1), scored("g", 1.0, 1)];
        let values = advantages(&group, Estimator::Grpo, AdvantageLevel::Rollout).values;
        let std = (4.0 * 0.25_f64 / 3.0).sqrt();
        assert!((values[0].unwrap() - 0.5 / (std + 1e-6)).abs() < 1e-12);
        assert!((values[1].unwrap() + 0.5 / (std + 1e-6)).abs() < 1e-12);
    }

    #[test]
    fn rloo_compares_each_rollout_with_the_mean_of_the_others() {
        let group = [scored("g", 3.0, 1), scored("g", 1.0, 1), scored("g", 2.0, 1)];
        let values = advantages(&group, Estimator::Rloo, AdvantageLevel::Rollout).values;
        assert_eq!(values, [Some(1.5), Some(-1.5), Some(0.0)]);
    }

    #[test]
    fn a_group_with_one_reward_is_dropped_and_named() {
        let group = [
            scored("a", 1.0, 1),
            Scored { group: "a".into(), reward: None, rows: 1 },
            scored("b", 1.0, 1),
            scored("b", 1.0, 1),
        ];
        let result = advantages(&group, Estimator::Grpo, AdvantageLevel::Rollout);
        assert_eq!(result.values, [None, None, Some(0.0), Some(0.0)]);
        assert_eq!(result.dropped_groups, ["a"]);
        assert_eq!(result.zero_variance_groups, ["b"]);
    }

    #[test]
    fn a_group_of_equal_rewards_has_advantages_of_exactly_zero() {
        let group = [scored("g", 0.1, 1), scored("g", 0.1, 1), scored("g", 0.1, 1)];
        for estimator in [Estimator::Grpo, Estimator::GrpoNoStd, Estimator::Rloo] {
            assert_eq!(advantages(&group, estimator, AdvantageLevel::Rollout).values, [Some(0.0); 3]);
        }
    }

    proptest! {
        #[test]
        fn advantages_of_a_group_sum_to_zero_and_ignore_the_row_count(
            rewards in prop::collection::vec(-10.0..10.0_f64, 2..12),
            rows in prop::collection::vec(1_usize..9, 12),
            shift in -5.0..5.0_f64,
        ) {
            for estimator in [Estimator::Grpo, Estimator::GrpoNoStd, Estimator::Rloo] {
                let group: Vec<_> = rewards.iter().zip(&rows).map(|(&r, &n)| scored("g", r, n)).collect();
                let shifted: Vec<_> = rewards.iter().map(|&r| scored("g", r + shift, 1)).collect();
                let values: Vec<f64> = advantages(&group, estimator, AdvantageLevel::Rollout).values.into_iter().flatten().collect();
                let moved: Vec<f64> = advantages(&shifted, estimator, AdvantageLevel::Rollout).values.into_iter().flatten().collect();
                prop_assert!(values.iter().sum::<f64>().abs() < 1e-6);
                for (a, b) in values.iter().zip(&moved) {
                    prop_assert!((a - b).abs() < 1e-4, "a constant added to all rewards changes nothing");
                }
            }
        }
    }
}
