//! Advantages of a group of sibling rollouts: one scalar each, which every row of the rollout inherits.
//!
//! A reward belongs to a rollout, so rows of one rollout cannot disagree on it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Added to the standard deviation, as in the field's GRPO implementations.
const EPSILON: f64 = 1e-6;

/// Added to the variance where advantages are whitened, as verl does.
const WHITEN_EPSILON: f64 = 1e-8;

/// How rewards become advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Estimator {
    /// `(R − mean) / (std + 1e-6)`, std with one degree of freedom taken.
    #[default]
    Grpo,
    /// `R − mean`: GRPO without the division (`norm_adv_by_std_in_grpo = false`, Dr. GRPO's advantage).
    #[serde(rename = "grpo_no_std", alias = "dr_grpo")]
    GrpoNoStd,
    /// `n/(n−1) · (R − mean)`: each rollout against the mean of the others.
    Rloo,
    /// REINFORCE++ without a baseline: `R`, then whitened over the trained tokens of all rollouts,
    /// `(R − mean) / √(var + 1e-8)`, var with one degree of freedom taken. The discount is 1.
    #[serde(rename = "reinforce_plus_plus")]
    ReinforcePlusPlus,
    /// REINFORCE++ with a baseline: `R − mean` of the group, then whitened like [`Estimator::ReinforcePlusPlus`].
    #[serde(rename = "reinforce_plus_plus_baseline")]
    ReinforcePlusPlusBaseline,
}

impl Estimator {
    /// False where a rollout is compared with the whole batch and not with its siblings, so that a group may be of one.
    #[must_use]
    pub const fn compares_siblings(self) -> bool {
        !matches!(self, Self::ReinforcePlusPlus)
    }

    /// True where the advantages of all rollouts are brought to mean 0 and variance 1 over their trained tokens.
    const fn whitens(self) -> bool {
        matches!(self, Self::ReinforcePlusPlus | Self::ReinforcePlusPlusBaseline)
    }
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
    /// How many trained tokens it has in all its rows; matters where advantages are whitened.
    pub tokens: usize,
}

/// Advantages, parallel to the rollouts they were asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Advantages {
    /// `None` for a rollout without a reward, and for one whose group has too few rewarded rollouts.
    pub values: Vec<Option<f64>>,
    /// Groups dropped because they had fewer than two rewarded rollouts, or none where siblings are not compared.
    pub dropped_groups: Vec<String>,
    /// Groups whose rewards are all equal, where siblings are compared: their members are all as good as the baseline.
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
        if members.len() < if estimator.compares_siblings() { 2 } else { 1 } {
            result.dropped_groups.push(group.to_owned());
            continue;
        }
        let weight = |index: usize| match level {
            AdvantageLevel::Rollout => 1.0,
            AdvantageLevel::Row => rollouts[index].rows as f64,
        };
        let statistics = Statistics::of(members.iter().map(|&(index, reward)| (reward, weight(index))));
        if estimator.compares_siblings() && members.iter().all(|&(_, reward)| reward == members[0].1) {
            // Exactly 0, not what rounding leaves of R − mean: dividing that by a std near 0 would make it anything.
            members.iter().for_each(|&(index, _)| result.values[index] = Some(0.0));
            result.zero_variance_groups.push(group.to_owned());
            continue;
        }
        for (index, reward) in members {
            result.values[index] = Some(statistics.advantage(reward, estimator));
        }
    }
    if estimator.whitens() {
        whiten(&mut result.values, rollouts);
    }
    result
}

/// `(A − mean) / √(var + 1e-8)` over the trained tokens of all rollouts, var with one degree of freedom taken: a rollout counts
/// as often as it has trained tokens, however many rows these stand in.
fn whiten(values: &mut [Option<f64>], rollouts: &[Scored]) {
    let counted =
        || values.iter().zip(rollouts).filter_map(|(value, rollout)| Some(((*value)?, rollout.tokens as f64)));
    let mut given = values.iter().flatten();
    let first = given.next().copied().unwrap_or(0.0);
    let equal = given.all(|value| *value == first);
    let Statistics { count, mean, std } = Statistics::of(counted());
    let scale = (std * std + WHITEN_EPSILON).sqrt().recip();
    for value in values.iter_mut().flatten() {
        // Exactly 0 where all are equal: an optimiser that normalises gradients would blow up what rounding leaves.
        *value = if equal || count < 2.0 { 0.0 } else { (*value - mean) * scale };
    }
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
            Estimator::GrpoNoStd | Estimator::ReinforcePlusPlusBaseline => centred,
            Estimator::ReinforcePlusPlus => reward,
            Estimator::Rloo => centred * self.count / (self.count - 1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scored(group: &str, reward: f64, rows: usize) -> Scored {
        Scored { group: group.into(), reward: Some(reward), rows, tokens: 10 }
    }

    fn of_length(group: &str, reward: f64, tokens: usize) -> Scored {
        Scored { group: group.into(), reward: Some(reward), rows: 1, tokens }
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
            Scored { group: "a".into(), reward: None, rows: 1, tokens: 10 },
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

    #[test]
    fn reinforce_with_baseline_whitens_what_is_left_of_the_rewards_over_all_tokens() {
        let rollouts =
            [of_length("a", 1.0, 30), of_length("a", 0.0, 10), of_length("b", 3.0, 20), of_length("b", 3.0, 40)];
        let result = advantages(&rollouts, Estimator::ReinforcePlusPlusBaseline, AdvantageLevel::Rollout);
        // Over 100 tokens: 30 of 0.5, 10 of −0.5, 60 of 0.
        let mean = (30.0 * 0.5 - 10.0 * 0.5) / 100.0;
        let squares = 30.0 * (0.5_f64 - mean).powi(2) + 10.0 * (-0.5_f64 - mean).powi(2) + 60.0 * mean.powi(2);
        let scale = (squares / 99.0 + 1e-8).sqrt();
        for (value, centred) in result.values.iter().zip([0.5, -0.5, 0.0, 0.0]) {
            assert!((value.unwrap() - (centred - mean) / scale).abs() < 1e-12);
        }
        assert_eq!(result.zero_variance_groups, ["b"]);
    }

    #[test]
    fn plain_reinforce_compares_with_the_batch_so_a_group_may_be_of_one() {
        let rollouts = [of_length("a", 2.0, 10), of_length("b", 0.0, 10), of_length("c", 0.0, 10)];
        let result = advantages(&rollouts, Estimator::ReinforcePlusPlus, AdvantageLevel::Rollout);
        assert!(result.dropped_groups.is_empty() && result.zero_variance_groups.is_empty());
        assert!(result.values[0].unwrap() > 0.0 && result.values[1].unwrap() < 0.0);
        assert!(result.values.iter().map(|value| value.unwrap()).sum::<f64>().abs() < 1e-9);
    }

    #[test]
    fn equal_rewards_are_whitened_to_exactly_zero() {
        let rollouts = [of_length("a", 0.1, 3), of_length("a", 0.1, 7), of_length("b", 0.1, 9)];
        let result = advantages(&rollouts, Estimator::ReinforcePlusPlus, AdvantageLevel::Rollout);
        assert_eq!(result.values, [Some(0.0); 3]);
    }

    #[test]
    fn dr_grpo_is_another_name_for_grpo_without_the_division() {
        let named: Estimator = serde_json::from_str("\"dr_grpo\"").unwrap();
        assert_eq!(named, Estimator::GrpoNoStd);
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
