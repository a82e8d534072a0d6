//! Correction where the policy that sampled (π_rollout) is not the one an update starts from (π_old): another implementation,
//! other numerics, or older parameters. Options and thresholds are spelt and computed as in verl's `rollout_correction`.
//!
//! A sequence is a row. What is rejected or weighs 0 keeps its place in the denominators of the loss (verl takes rejected tokens
//! out of them): an update of which half is rejected is half as long, and the other half does not count double.

use serde::{Deserialize, Serialize};

use super::KlEstimator;

/// |log ratio| beyond this is cut before it is exponentiated, as in verl.
const LOG_RATIO_LIMIT: f64 = 20.0;

/// What importance weights `ρ = π_old/π_rollout` are taken over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RolloutIs {
    /// Every weight is 1.
    None,
    /// Each token has its own: biased, of low variance.
    #[default]
    Token,
    /// Each token of a row has the product of the row's: unbiased, of high variance.
    Sequence,
}

/// A number, or two as `"lower_upper"`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Spelling", into = "Spelling")]
pub struct Bounds {
    /// `None` where only one number was given.
    pub lower: Option<f64>,
    /// The number, or the second of two.
    pub upper: f64,
}

/// How [`Bounds`] stand in a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Spelling {
    Number(f64),
    Text(String),
}

impl TryFrom<Spelling> for Bounds {
    type Error = String;

    fn try_from(spelling: Spelling) -> Result<Self, String> {
        match spelling {
            Spelling::Number(upper) => Self::new(None, upper),
            Spelling::Text(text) => text.parse(),
        }
    }
}

impl From<Bounds> for Spelling {
    fn from(bounds: Bounds) -> Self {
        match bounds.lower {
            None => Self::Number(bounds.upper),
            Some(lower) => Self::Text(format!("{lower}_{}", bounds.upper)),
        }
    }
}

impl std::str::FromStr for Bounds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |part: &str| {
            part.trim().parse::<f64>().map_err(|_| format!("{text:?} is neither a number nor \"lower_upper\""))
        };
        match text.split_once('_') {
            Some((lower, upper)) => Self::new(Some(number(lower)?), number(upper)?),
            None => Self::new(None, number(text)?),
        }
    }
}

impl Bounds {
    fn new(lower: Option<f64>, upper: f64) -> Result<Self, String> {
        let smallest = lower.unwrap_or(upper);
        if smallest > 0.0 && smallest <= upper && upper.is_finite() {
            return Ok(Self { lower, upper });
        }
        let shown = lower.map_or_else(|| upper.to_string(), |lower| format!("{lower}_{upper}"));
        Err(format!("{shown:?} is not above 0, or its lower bound is above its upper one"))
    }
}

/// What of a row's divergences is held against a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extent {
    Token,
    SeqSum,
    SeqMean,
    SeqMax,
}

/// One criterion of rejection: a divergence, each token's or a row's as a whole, and the bounds it must stay within. With
/// `x = log π_rollout − log π_old` the divergences are those of [`KlEstimator`], k3 without its cap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rejection {
    extent: Extent,
    estimator: KlEstimator,
    lower: f64,
    upper: f64,
}

impl Rejection {
    /// Reads verl's comma-separated `rollout_rs` and `rollout_rs_threshold`: one threshold for each criterion, or one for all. A
    /// threshold of a `k1` criterion is on the ratio π_rollout/π_old, `"lower_upper"` or an upper bound whose reciprocal is
    /// the lower; others are upper bounds of the divergence.
    ///
    /// # Errors
    /// Says which part is wrong.
    pub fn parse(criteria: &str, thresholds: &str) -> Result<Vec<Self>, String> {
        let parts = |text: &str| -> Vec<String> {
            text.split(',').map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
        };
        let criteria = parts(criteria);
        let thresholds = parts(thresholds);
        if criteria.is_empty() {
            return Err("no criterion is given".to_owned());
        }
        if thresholds.len() != 1 && thresholds.len() != criteria.len() {
            return Err(format!(
                "{} criteria have {} thresholds; give one each, or one",
                criteria.len(),
                thresholds.len()
            ));
        }
        criteria.iter().enumerate().map(|(i, name)| Self::one(name, &thresholds[i.min(thresholds.len() - 1)])).collect()
    }

    fn one(name: &str, threshold: &str) -> Result<Self, String> {
        let unknown = || {
            format!("{name:?} is not one of token_k1 … k3, seq_sum_k1 … k3, seq_mean_k1 … k3, seq_max_k2, seq_max_k3")
        };
        let (extent, estimator) = name.rsplit_once('_').ok_or_else(unknown)?;
        let estimator = match estimator {
            "k1" => KlEstimator::K1,
            "k2" => KlEstimator::K2,
            "k3" => KlEstimator::K3,
            _ => return Err(unknown()),
        };
        let extent = match extent {
            "token" => Extent::Token,
            "seq_sum" => Extent::SeqSum,
            "seq_mean" => Extent::SeqMean,
            "seq_max" if estimator != KlEstimator::K1 => Extent::SeqMax,
            _ => return Err(unknown()),
        };
        let bounds: Bounds = threshold.parse()?;
        let (lower, upper) = match (estimator, bounds.lower) {
            (KlEstimator::K1, lower) => (lower.unwrap_or(1.0 / bounds.upper).ln(), bounds.upper.ln()),
            (_, None) => (f64::NEG_INFINITY, bounds.upper),
            (_, Some(_)) => return Err(format!("{name} takes one upper bound, not {threshold:?}")),
        };
        Ok(Self { extent, estimator, lower, upper })
    }

    /// Which of a row's trained tokens stay, given their `log π_old − log π_rollout`.
    fn keeps(&self, log_ratios: &[f64]) -> Vec<bool> {
        let within = |value: f64| (self.lower..=self.upper).contains(&value);
        let divergences: Vec<f64> = log_ratios.iter().map(|ratio| self.estimator.value(-limited(*ratio))).collect();
        let sum: f64 = divergences.iter().sum();
        let whole = match self.extent {
            Extent::Token => return divergences.into_iter().map(within).collect(),
            Extent::SeqSum => sum,
            Extent::SeqMean => sum / divergences.len() as f64,
            Extent::SeqMax => divergences.iter().copied().fold(0.0, f64::max),
        };
        vec![within(whole); log_ratios.len()]
    }
}

/// What is done about the difference.
#[derive(Clone, Debug, PartialEq)]
pub struct Correction {
    /// Importance weights.
    pub weighting: RolloutIs,
    /// With one number weights are cut off at it, `min(ρ, upper)` (TIS); with two, those outside become 0 (IcePop).
    pub threshold: Bounds,
    /// A token is trained only if it passes all of these.
    pub rejections: Vec<Rejection>,
}

/// A row as its two policies see it. All slices have one length.
#[derive(Clone, Copy, Debug)]
pub struct DriftRow<'a> {
    /// 1 where the token is trained.
    pub mask: &'a [u8],
    /// log π_old.
    pub old_log_probs: &'a [f32],
    /// log π_rollout, as recorded.
    pub rollout_log_probs: &'a [f32],
}

/// What a row's tokens count from now on, parallel to the row.
#[derive(Clone, Debug, PartialEq)]
pub struct CorrectedRow {
    /// Constant factor of the token's policy loss; 1 where nothing is trained.
    pub weights: Vec<f32>,
    /// True where a trained token is left out.
    pub rejected: Vec<bool>,
}

/// How far the two policies are apart, over the trained tokens of all rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Drift {
    /// Rows.
    pub rows: usize,
    /// Their trained tokens.
    pub tokens: usize,
    /// Mean weight after truncation; of the plain token ratios where nothing is weighted.
    pub weight_mean: f64,
    /// Largest of them.
    pub weight_max: f64,
    /// `(Σ w)² / (N Σ w²)`, 1 where all weights are equal.
    pub effective_sample_size: f64,
    /// Mean of `log π_rollout − log π_old`: estimates KL(π_rollout ‖ π_old).
    pub kl: f64,
    /// The same by `ρ − 1 − log ρ`, which is never negative.
    pub k3_kl: f64,
    /// Tokens rejected.
    pub rejected_tokens: usize,
    /// Rows with a rejected token.
    pub rejected_rows: usize,
}

fn limited(log_ratio: f64) -> f64 {
    log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
}

impl Correction {
    /// Weights and rejections of each row, and how far the policies are apart.
    #[must_use]
    pub fn apply(&self, rows: &[DriftRow<'_>]) -> (Vec<CorrectedRow>, Drift) {
        let mut drift = Drift { rows: rows.len(), ..Drift::default() };
        let mut sums = [0.0; 4];
        let corrected = rows
            .iter()
            .map(|row| {
                let trained: Vec<usize> = (0..row.mask.len()).filter(|&at| row.mask[at] == 1).collect();
                let log_ratios: Vec<f64> = trained
                    .iter()
                    .map(|&at| f64::from(row.old_log_probs[at]) - f64::from(row.rollout_log_probs[at]))
                    .collect();
                let raw = self.raw_weights(&log_ratios);
                let mut result =
                    CorrectedRow { weights: vec![1.0; row.mask.len()], rejected: vec![false; row.mask.len()] };
                for ((&at, &raw), &log_ratio) in trained.iter().zip(&raw).zip(&log_ratios) {
                    let weight = self.truncated(raw);
                    if self.weighting != RolloutIs::None {
                        result.weights[at] = weight as f32;
                    }
                    let terms = [weight, weight * weight, -log_ratio, KlEstimator::K3.value(-log_ratio)];
                    sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
                    drift.weight_max = drift.weight_max.max(weight);
                }
                for rejection in &self.rejections {
                    for (&at, keep) in trained.iter().zip(rejection.keeps(&log_ratios)) {
                        result.rejected[at] |= !keep;
                    }
                }
                let rejected = result.rejected.iter().filter(|rejected| **rejected).count();
                drift.tokens += trained.len();
                drift.rejected_tokens += rejected;
                drift.rejected_rows += usize::from(rejected > 0);
                result
            })
            .collect();
        let count = drift.tokens.max(1) as f64;
        let [weight, square, kl, k3] = sums;
        drift.weight_mean = weight / count;
        drift.effective_sample_size = if square > 0.0 { weight * weight / (count * square) } else { 0.0 };
        drift.kl = kl / count;
        drift.k3_kl = k3 / count;
        (corrected, drift)
    }

    fn raw_weights(&self, log_ratios: &[f64]) -> Vec<f64> {
        match self.weighting {
            RolloutIs::Sequence => vec![limited(log_ratios.iter().sum()).exp(); log_ratios.len()],
            RolloutIs::Token | RolloutIs::None => log_ratios.iter().map(|ratio| limited(*ratio).exp()).collect(),
        }
    }

    fn truncated(&self, weight: f64) -> f64 {
        match (self.weighting, self.threshold.lower) {
            (RolloutIs::None, _) => weight,
            (_, None) => weight.min(self.threshold.upper),
            (_, Some(lower)) if weight < lower || weight > self.threshold.upper => 0.0,
            (_, Some(_)) => weight,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MASK: [u8; 5] = [0, 1, 1, 0, 1];

    /// A row whose trained tokens have these log ratios.
    fn apply(correction: &Correction, log_ratios: [f32; 3]) -> (CorrectedRow, Drift) {
        let old = [0.0, -1.0 + log_ratios[0], -1.0 + log_ratios[1], 0.0, -1.0 + log_ratios[2]];
        let rollout = [0.0, -1.0, -1.0, 0.0, -1.0];
        let row = DriftRow { mask: &MASK, old_log_probs: &old, rollout_log_probs: &rollout };
        let (mut rows, drift) = correction.apply(&[row]);
        (rows.remove(0), drift)
    }

    fn correction(weighting: RolloutIs, threshold: &str, rejections: &[(&str, &str)]) -> Correction {
        let rejections = rejections.iter().flat_map(|(name, bounds)| Rejection::parse(name, bounds).unwrap()).collect();
        Correction { weighting, threshold: threshold.parse().unwrap(), rejections }
    }

    fn assert_close(found: &[f32], expected: [f64; 5]) {
        assert!(found.iter().zip(expected).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5), "{found:?}, {expected:?}");
    }

    #[test]
    fn token_weights_are_cut_off_at_their_cap() {
        let (row, drift) = apply(&correction(RolloutIs::Token, "2", &[]), [0.1, 3.0, -0.5]);
        assert_close(&row.weights, [1.0, 0.1f64.exp(), 2.0, 1.0, (-0.5f64).exp()]);
        let weights = [0.1f64.exp(), 2.0, (-0.5f64).exp()];
        let (sum, square) = (weights.iter().sum::<f64>(), weights.iter().map(|w| w * w).sum::<f64>());
        assert!((drift.weight_mean - sum / 3.0).abs() < 1e-6 && (drift.weight_max - 2.0).abs() < 1e-6);
        assert!((drift.effective_sample_size - sum * sum / (3.0 * square)).abs() < 1e-6);
        assert!((drift.kl + (0.1 + 3.0 - 0.5) / 3.0).abs() < 1e-6);
        assert_eq!((drift.tokens, drift.rejected_tokens), (3, 0));
    }

    #[test]
    fn with_two_bounds_what_lies_outside_weighs_nothing() {
        let (row, _) = apply(&correction(RolloutIs::Token, "0.5_5", &[]), [0.1, 3.0, -2.0]);
        assert_close(&row.weights, [1.0, 0.1f64.exp(), 0.0, 1.0, 0.0]);
        assert!(row.rejected.iter().all(|rejected| !rejected), "they stay in the loss, with weight 0");
    }

    #[test]
    fn sequence_weights_are_the_product_of_the_rows_ratios() {
        let (row, _) = apply(&correction(RolloutIs::Sequence, "10", &[]), [0.1, 0.6, -0.2]);
        let product = 0.5f64.exp();
        assert_close(&row.weights, [1.0, product, product, 1.0, product]);
    }

    #[test]
    fn without_weighting_the_distance_is_still_measured() {
        let (row, drift) = apply(&correction(RolloutIs::None, "2", &[]), [3.0, 3.0, 3.0]);
        assert_close(&row.weights, [1.0; 5]);
        assert!((drift.weight_mean - 3f64.exp()).abs() < 1e-3 && (drift.kl + 3.0).abs() < 1e-6);
    }

    #[test]
    fn a_token_criterion_rejects_tokens_and_a_sequence_criterion_rows() {
        let by = |criteria| apply(&correction(RolloutIs::None, "2", criteria), [0.1, 1.0, -0.1]);
        let (row, drift) = by(&[("token_k1", "0.5_2")]);
        assert_eq!(row.rejected, [false, false, true, false, false]);
        assert_eq!((drift.rejected_tokens, drift.rejected_rows), (1, 1));
        let (row, _) = by(&[("seq_mean_k1", "0.9_1.1")]);
        assert_eq!(row.rejected, [false, true, true, false, true], "the geometric mean is e^(−1/3)");
        let (row, _) = by(&[("seq_max_k2", "0.6"), ("seq_sum_k3", "0.9"), ("token_k2", "0.51")]);
        assert_eq!(row.rejected, [false; 5]);
    }

    #[test]
    fn thresholds_are_read_as_verl_reads_them() {
        let (each, shared) =
            (Rejection::parse("token_k1,seq_max_k3", "2,0.5"), Rejection::parse("token_k2,token_k3", "1"));
        assert_eq!(each.unwrap()[0], Rejection::parse("token_k1", "0.5_2").unwrap()[0]);
        assert_eq!(shared.unwrap().len(), 2);
        for (criteria, thresholds) in [
            ("seq_max_k1", "2"),
            ("token", "2"),
            ("token_k2", "0.5_2"),
            ("token_k1", "2_0.5"),
            ("token_k1,token_k2,token_k3", "1,2"),
            ("token_k1", "much"),
        ] {
            Rejection::parse(criteria, thresholds).unwrap_err();
        }
    }

    #[test]
    fn bounds_are_written_as_they_were_read() {
        for text in ["2.0", "\"0.5_5\""] {
            let bounds: Bounds = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&bounds).unwrap(), text);
        }
        serde_json::from_str::<Bounds>("0").unwrap_err();
    }
}
