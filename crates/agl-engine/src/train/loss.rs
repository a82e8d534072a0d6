//! Loss of one token and its derivative with respect to the token's log-probability.

use crate::config::{LossConfig, LossKind, LossMode};

/// What is known of a token before its new log-probability.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenInput {
    pub weight: f64,
    pub advantage: f64,
    pub old_log_prob: f64,
    /// Constant factor of the policy loss.
    pub importance: f64,
    pub ref_log_prob: Option<f64>,
    /// Mean log ratio of the token's row, where the loss has one ratio per row: see [`share_row_ratio`].
    pub row_log_ratio: f64,
}

/// Loss of a token with what the statistics need.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct TokenLoss {
    pub loss: f64,
    /// ∂loss/∂(log-probability).
    pub slope: f64,
    /// π/π_old.
    pub ratio: f64,
    /// The clipped branch was the larger one; with CISPO, the ratio was clipped.
    pub clipped: bool,
    /// The dual clip was active.
    pub bounded: bool,
    /// Estimated divergence from the reference policy.
    pub ref_kl: f64,
}

/// |log ratio| beyond this is cut, as in verl, so that one stray token cannot overflow.
const LOG_RATIO_LIMIT: f64 = 20.0;
/// The same for the mean log ratio of a row, from above only.
const ROW_LOG_RATIO_LIMIT: f64 = 10.0;

/// True if a token's loss depends on the other tokens of its row.
pub(crate) fn needs_whole_rows(config: &LossConfig) -> bool {
    config.kind == LossKind::PolicyGradient && config.loss_mode == LossMode::Gspo
}

/// Gives the trained tokens of one row the mean of log π − log π_old over all of them.
pub(crate) fn share_row_ratio(tokens: &mut [TokenInput], log_probs: impl Iterator<Item = f64>) {
    let sum: f64 = tokens.iter().zip(log_probs).map(|(token, log_prob)| log_prob - token.old_log_prob).sum();
    let mean = sum / tokens.len() as f64;
    tokens.iter_mut().for_each(|token| token.row_log_ratio = mean);
}

/// Loss of a token whose log-probability is now `log_prob`, weights included: w·(ρ·ℓ + β·KL), where ρ is the token's constant
/// importance weight, ℓ the policy loss and KL the divergence from the reference policy.
pub(crate) fn token_loss(log_prob: f64, token: TokenInput, config: &LossConfig) -> TokenLoss {
    if config.kind == LossKind::Sft {
        return TokenLoss { loss: -token.weight * log_prob, slope: -token.weight, ratio: 1.0, ..TokenLoss::default() };
    }
    let policy = match config.loss_mode {
        LossMode::Vanilla => clipped_surrogate(log_prob, token, config),
        LossMode::Gspo => row_surrogate(log_prob, token, config),
        LossMode::Cispo => clipped_weight(log_prob, token, config),
    };
    let (kl, kl_slope) =
        token.ref_log_prob.map_or((0.0, 0.0), |reference| config.kl_loss_type.value_and_slope(log_prob, reference));
    let scale = token.weight * token.importance;
    let penalty = token.weight * config.kl_loss_coef;
    TokenLoss {
        loss: scale * policy.loss + penalty * kl,
        slope: scale * policy.slope + penalty * kl_slope,
        ref_kl: kl,
        ..policy
    }
}

/// r = π/π_old, and whether it moves with π.
fn token_ratio(log_prob: f64, token: TokenInput) -> (f64, bool) {
    let log_ratio = log_prob - token.old_log_prob;
    (log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), log_ratio.abs() <= LOG_RATIO_LIMIT)
}

/// PPO: max(−rA, −clip(r, 1−ε_low, 1+ε_high)A), for A < 0 bounded above by −cA (dual clip).
fn clipped_surrogate(log_prob: f64, token: TokenInput, config: &LossConfig) -> TokenLoss {
    let (ratio, moves) = token_ratio(log_prob, token);
    let a = token.advantage;
    let plain = -a * ratio;
    let clipped = -a * clip(ratio, config);
    let is_clipped = clipped > plain;
    let bound = -a * config.clip_ratio_c;
    let is_bounded = a < 0.0 && plain.max(clipped) > bound;
    // Where a clip is active the loss no longer depends on the ratio.
    let moves = moves && !is_clipped && !is_bounded;
    TokenLoss {
        loss: if is_bounded { bound } else { plain.max(clipped) },
        slope: if moves { plain } else { 0.0 },
        ratio,
        clipped: is_clipped,
        bounded: is_bounded,
        ref_kl: 0.0,
    }
}

/// GSPO: max(−sA, −clip(s, 1−ε_low, 1+ε_high)A), s = exp(mean_t log r_t) of the row. As in verl a token's slope is that of
/// s·π/sg(π): summed over a row whose tokens count the same, it is the gradient of s itself.
fn row_surrogate(log_prob: f64, token: TokenInput, config: &LossConfig) -> TokenLoss {
    let moves = token.row_log_ratio <= ROW_LOG_RATIO_LIMIT;
    let ratio = token.row_log_ratio.min(ROW_LOG_RATIO_LIMIT).exp();
    let plain = -token.advantage * ratio;
    let clipped = -token.advantage * clip(ratio, config);
    TokenLoss {
        loss: plain.max(clipped),
        slope: if moves && clipped <= plain { plain } else { 0.0 },
        ratio: token_ratio(log_prob, token).0,
        clipped: clipped > plain,
        ..TokenLoss::default()
    }
}

/// CISPO: −sg(clip(r, 1−ε_low, 1+ε_high))·A·log π.
fn clipped_weight(log_prob: f64, token: TokenInput, config: &LossConfig) -> TokenLoss {
    let (ratio, _) = token_ratio(log_prob, token);
    let slope = -clip(ratio, config) * token.advantage;
    TokenLoss { loss: slope * log_prob, slope, ratio, clipped: clip(ratio, config) != ratio, ..TokenLoss::default() }
}

fn clip(ratio: f64, config: &LossConfig) -> f64 {
    ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(weight: f64, advantage: f64) -> TokenInput {
        TokenInput { weight, advantage, old_log_prob: -1.0, importance: 1.0, ref_log_prob: None, row_log_ratio: 0.0 }
    }

    fn at(ratio: f64, advantage: f64) -> TokenLoss {
        token_loss(-1.0 + ratio.ln(), token(0.5, advantage), &LossConfig::default())
    }

    #[test]
    fn inside_the_clip_range_loss_and_slope_are_the_plain_surrogate() {
        let token = at(1.1, 2.0);
        assert!((token.loss + 0.5 * 2.0 * 1.1).abs() < 1e-12);
        assert!((token.slope + 0.5 * 2.0 * 1.1).abs() < 1e-12);
        assert!(!token.clipped);
    }

    #[test]
    fn a_good_token_beyond_the_upper_clip_has_no_slope() {
        let token = at(1.5, 2.0);
        assert_eq!((token.slope, token.clipped), (0.0, true));
        assert!((token.loss + 0.5 * 2.0 * 1.2).abs() < 1e-12);
    }

    #[test]
    fn a_good_token_below_the_lower_clip_is_still_pulled_up() {
        let token = at(0.5, 2.0);
        assert!((token.slope + 0.5 * 2.0 * 0.5).abs() < 1e-12);
    }

    #[test]
    fn a_bad_token_beyond_the_dual_clip_has_bounded_loss_and_no_slope() {
        let token = at(5.0, -2.0);
        assert!((token.loss - 0.5 * 2.0 * 3.0).abs() < 1e-12);
        assert_eq!(token.slope, 0.0);
        assert!(at(2.0, -2.0).slope > 0.0, "between the clips a bad token is pushed down");
    }

    #[test]
    fn the_slope_is_the_derivative_wherever_the_loss_is_smooth() {
        let step = 1e-6f64;
        for advantage in [-2.0f64, 1.5] {
            for ratio in [0.3f64, 0.9, 1.0, 1.15, 1.7, 2.5, 4.0] {
                let difference = at(ratio * step.exp(), advantage).loss - at(ratio * (-step).exp(), advantage).loss;
                assert!((difference / (2.0 * step) - at(ratio, advantage).slope).abs() < 1e-6, "{ratio} {advantage}");
            }
        }
    }

    #[test]
    fn the_importance_weight_scales_the_policy_loss_but_not_the_divergence() {
        let config = LossConfig { kl_loss_coef: 0.1, ..LossConfig::default() };
        let given = |importance| TokenInput { importance, ref_log_prob: Some(-1.2), ..token(1.0, 1.0) };
        let (plain, weighted) = (token_loss(-0.9, given(1.0), &config), token_loss(-0.9, given(0.5), &config));
        let kl = 0.1 * config.kl_loss_type.value_and_slope(-0.9, -1.2).0;
        assert!((weighted.loss - kl - 0.5 * (plain.loss - kl)).abs() < 1e-12);
    }

    #[test]
    fn one_ratio_per_row_clips_all_its_tokens_or_none() {
        let config = LossConfig {
            loss_mode: LossMode::Gspo,
            clip_ratio_low: 3e-4,
            clip_ratio_high: 4e-4,
            ..LossConfig::default()
        };
        let mut row = [token(0.5, 1.0); 2];
        // Ratios e^0.3 and e^−0.3: the row's is 1, although each token's is far outside of the clip range.
        share_row_ratio(&mut row, [-0.7, -1.3].into_iter());
        for (token, log_prob) in row.into_iter().zip([-0.7, -1.3]) {
            let loss = token_loss(log_prob, token, &config);
            assert!(!loss.clipped && (loss.slope + 0.5).abs() < 1e-12 && (loss.loss + 0.5).abs() < 1e-12);
        }
        share_row_ratio(&mut row, [-0.7, -1.2].into_iter());
        let loss = token_loss(-1.2, row[1], &config);
        assert!(loss.clipped && loss.slope == 0.0 && (loss.loss + 0.5 * 1.0004).abs() < 1e-12);
    }

    #[test]
    fn a_clipped_weight_keeps_its_gradient() {
        let config = LossConfig {
            loss_mode: LossMode::Cispo,
            clip_ratio_low: 1.0,
            clip_ratio_high: 2.0,
            ..LossConfig::default()
        };
        let loss = token_loss(-1.0 + 5f64.ln(), token(0.5, 1.0), &config);
        assert!(loss.clipped && (loss.slope + 0.5 * 3.0).abs() < 1e-12);
        let loss = token_loss(-1.0 + 0.01f64.ln(), token(0.5, 1.0), &config);
        assert!(!loss.clipped && (loss.slope + 0.5 * 0.01).abs() < 1e-12);
    }

    #[test]
    fn a_wild_log_ratio_stays_finite() {
        for loss_mode in [LossMode::Vanilla, LossMode::Gspo, LossMode::Cispo] {
            let config = LossConfig { loss_mode, ..LossConfig::default() };
            let mut row = [TokenInput { old_log_prob: -900.0, ..token(1.0, 1.0) }];
            share_row_ratio(&mut row, [0.0].into_iter());
            assert!(token_loss(0.0, row[0], &config).loss.is_finite());
        }
    }
}
