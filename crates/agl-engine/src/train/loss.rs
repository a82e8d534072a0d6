//! Loss of one token and its derivative with respect to the token's log-probability.

use crate::config::{LossConfig, LossKind};

/// What is known of a token before its new log-probability.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenInput {
    pub weight: f64,
    pub advantage: f64,
    pub old_log_prob: f64,
    pub rollout_log_prob: Option<f64>,
}

/// Loss of a token with what the statistics need.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TokenLoss {
    pub loss: f64,
    /// ∂loss/∂(log-probability).
    pub slope: f64,
    /// π/π_old.
    pub ratio: f64,
    /// Truncated importance weight.
    pub tis: f64,
    /// The clipped branch was the larger one.
    pub clipped: bool,
}

/// |log ratio| beyond this is cut, as in verl, so that one stray token cannot overflow.
const LOG_RATIO_LIMIT: f64 = 20.0;

/// Loss of a token whose log-probability is now `log_prob`, weights included.
pub(crate) fn token_loss(log_prob: f64, token: TokenInput, config: &LossConfig) -> TokenLoss {
    match config.kind {
        LossKind::Sft => {
            TokenLoss { loss: -token.weight * log_prob, slope: -token.weight, ratio: 1.0, tis: 1.0, clipped: false }
        }
        LossKind::PolicyGradient => clipped_surrogate(log_prob, token, config),
    }
}

/// w·ρ·max(−rA, −clip(r, 1−ε_low, 1+ε_high)A), for A < 0 bounded above by −cA (dual clip); r = e^(log π − log π_old),
/// ρ = min(π_old/π_rollout, cap) is a constant to the gradient.
fn clipped_surrogate(log_prob: f64, token: TokenInput, config: &LossConfig) -> TokenLoss {
    let log_ratio = log_prob - token.old_log_prob;
    let ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp();
    let tis = match (config.tis_cap, token.rollout_log_prob) {
        (Some(cap), Some(rollout)) => (token.old_log_prob - rollout).exp().min(cap),
        _ => 1.0,
    };
    let a = token.advantage;
    let plain = -a * ratio;
    let clipped = -a * ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high);
    let is_clipped = clipped > plain;
    let bound = -a * config.clip_ratio_c;
    let is_bounded = a < 0.0 && plain.max(clipped) > bound;
    // Where a clip is active the loss no longer depends on the ratio.
    let moves = !is_clipped && !is_bounded && log_ratio.abs() <= LOG_RATIO_LIMIT;
    let scale = token.weight * tis;
    TokenLoss {
        loss: scale * if is_bounded { bound } else { plain.max(clipped) },
        slope: if moves { scale * plain } else { 0.0 },
        ratio,
        tis,
        clipped: is_clipped,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ratio: f64, advantage: f64) -> TokenLoss {
        let token = TokenInput { weight: 0.5, advantage, old_log_prob: -1.0, rollout_log_prob: None };
        token_loss(-1.0 + ratio.ln(), token, &LossConfig::default())
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
    fn the_importance_weight_is_truncated_at_its_cap() {
        let config = LossConfig::default();
        let token =
            |rollout| TokenInput { weight: 1.0, advantage: 1.0, old_log_prob: -1.0, rollout_log_prob: Some(rollout) };
        let mild = token_loss(-1.0, token(-1.3), &config);
        assert!((mild.tis - 0.3f64.exp()).abs() < 1e-12);
        assert!((mild.loss + 0.3f64.exp()).abs() < 1e-12);
        assert_eq!(token_loss(-1.0, token(-4.0), &config).tis, 2.0);
    }

    #[test]
    fn a_wild_log_ratio_stays_finite() {
        let token = TokenInput { weight: 1.0, advantage: 1.0, old_log_prob: -900.0, rollout_log_prob: None };
        assert!(token_loss(0.0, token, &LossConfig::default()).loss.is_finite());
    }
}
