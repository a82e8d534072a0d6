//! The weight of a trained token in the loss `Σ w · ℓ`. Engines get weights, so the normalisation is computed once, here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// How token losses are averaged. `ρ` counts rollouts, `j` the rows of a rollout, `t` the trained tokens of a row, `L` their number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossAggregation {
    /// Eq. 14: `Σ ℓ / Σ L`, long rollouts weigh more.
    TokenMean,
    /// Eq. 15: `1/ΣN · Σ_{ρ,j} (Σ_t ℓ / L_{ρ,j})`, rollouts with more rows weigh more.
    SeqMeanTokenMean,
    /// Dr. GRPO: `1/ΣN · Σ_{ρ,j} (Σ_t ℓ / C)` with a constant `C` in place of the row's length, so that a row's length changes
    /// nothing about the weight of its tokens.
    SeqMeanTokenSumNorm,
    /// Eq. 16: `1/R · Σ_ρ (Σ_{j,t} ℓ / Σ_j L_{ρ,j})`, each of the `R` *rollouts* of the update weighs the same.
    #[default]
    RolloutMean,
}

/// A row of an update: whose it is and how many trained tokens it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowTokens {
    /// Rows of one rollout share it.
    pub rollout: usize,
    /// Number of trained tokens, `L_{ρ,j}`.
    pub trained: usize,
}

/// For each row the weight that each of its trained tokens gets; rows without trained tokens count for nothing. The weights of
/// all trained tokens of an update sum to 1, except those of [`LossAggregation::SeqMeanTokenSumNorm`], whose constant `C` is
/// `loss_scale_factor`; the others do not look at it.
#[must_use]
pub fn token_weights(rows: &[RowTokens], aggregation: LossAggregation, loss_scale_factor: f64) -> Vec<f64> {
    let rows_with_tokens = rows.iter().filter(|row| row.trained > 0).count() as f64;
    let total: usize = rows.iter().map(|row| row.trained).sum();
    let mut per_rollout: BTreeMap<usize, usize> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.trained > 0) {
        *per_rollout.entry(row.rollout).or_default() += row.trained;
    }
    rows.iter()
        .map(|row| match aggregation {
            _ if row.trained == 0 => 0.0,
            LossAggregation::TokenMean => 1.0 / total as f64,
            LossAggregation::SeqMeanTokenMean => 1.0 / (rows_with_tokens * row.trained as f64),
            LossAggregation::SeqMeanTokenSumNorm => 1.0 / (rows_with_tokens * loss_scale_factor),
            LossAggregation::RolloutMean => 1.0 / (per_rollout.len() as f64 * per_rollout[&row.rollout] as f64),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Rollouts A = [50, 100], B = [30, 30, 30], C = [40] tokens.
    const ROWS: [(usize, usize); 6] = [(0, 50), (0, 100), (1, 30), (1, 30), (1, 30), (2, 40)];

    fn shares(rows: &[(usize, usize)], aggregation: LossAggregation) -> Vec<f64> {
        let rows: Vec<_> = rows.iter().map(|&(rollout, trained)| RowTokens { rollout, trained }).collect();
        let weights = token_weights(&rows, aggregation, 1.0);
        let mut shares = vec![0.0; rows.iter().map(|row| row.rollout + 1).max().unwrap_or(0)];
        for (row, weight) in rows.iter().zip(weights) {
            shares[row.rollout] += weight * row.trained as f64;
        }
        shares
    }

    fn assert_close(actual: &[f64], expected: &[f64]) {
        assert!(actual.iter().zip(expected).all(|(a, e)| (a - e).abs() < 5e-4), "{actual:?} is not {expected:?}");
    }

    #[test]
    fn token_mean_gives_each_rollout_its_share_of_tokens() {
        assert_close(&shares(&ROWS, LossAggregation::TokenMean), &[0.536, 0.321, 0.143]);
    }

    #[test]
    fn seq_mean_gives_each_rollout_its_share_of_rows() {
        assert_close(&shares(&ROWS, LossAggregation::SeqMeanTokenMean), &[0.333, 0.500, 0.167]);
    }

    #[test]
    fn rollout_mean_gives_each_rollout_the_same() {
        assert_close(&shares(&ROWS, LossAggregation::RolloutMean), &[1.0 / 3.0; 3]);
    }

    #[test]
    fn seq_mean_token_sum_norm_divides_by_a_constant_whatever_the_length() {
        let rows: Vec<_> = ROWS.iter().map(|&(rollout, trained)| RowTokens { rollout, trained }).collect();
        let weights = token_weights(&rows, LossAggregation::SeqMeanTokenSumNorm, 200.0);
        assert_eq!(weights, [1.0 / (6.0 * 200.0); 6]);
    }

    #[test]
    fn the_longest_call_of_a_rollout_gets_its_share_of_the_rollouts_tokens() {
        let calls = [(0, 40), (0, 12), (0, 90), (0, 18)];
        let rows: Vec<_> = calls.iter().map(|&(rollout, trained)| RowTokens { rollout, trained }).collect();
        let weights = token_weights(&rows, LossAggregation::RolloutMean, 1.0);
        assert!((weights[2] * 90.0 - 0.5625).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn weights_sum_to_one(rows in prop::collection::vec((0_usize..5, 0_usize..200), 1..20)) {
            prop_assume!(rows.iter().any(|row| row.1 > 0));
            for aggregation in [LossAggregation::TokenMean, LossAggregation::SeqMeanTokenMean, LossAggregation::RolloutMean] {
                prop_assert!((shares(&rows, aggregation).iter().sum::<f64>() - 1.0).abs() < 1e-9);
            }
        }

        #[test]
        fn splitting_a_rollout_into_rows_leaves_its_rollout_mean_share(cut in 1_usize..99, other in 1_usize..300) {
            let whole = shares(&[(0, 100), (1, other)], LossAggregation::RolloutMean);
            let split = shares(&[(0, cut), (0, 100 - cut), (1, other)], LossAggregation::RolloutMean);
            prop_assert!((whole[0] - split[0]).abs() < 1e-12);
        }
    }
}
