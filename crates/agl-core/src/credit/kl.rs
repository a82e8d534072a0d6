//! Estimators of KL(π ‖ π_ref) from the log-probs of sampled tokens (Schulman, <http://joschu.net/blog/kl-approx.html>).

use serde::{Deserialize, Serialize};

/// |log ratio| beyond this is cut before it is exponentiated, as in verl.
const LOG_RATIO_LIMIT: f64 = 20.0;
/// No token counts more than this under k3, as in verl.
const K3_LIMIT: f64 = 10.0;

/// How a token's divergence is estimated, with `x = log π − log π_ref`. verl's other names for the three are understood.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KlEstimator {
    /// `x`: unbiased, of high variance, negative at times. As a loss its gradient is 0 in expectation: use it for rewards.
    #[serde(alias = "kl")]
    K1,
    /// `x²/2`: biased, of low variance; the expectation of its gradient is the gradient of the divergence.
    #[serde(alias = "mse")]
    K2,
    /// `e^(−x) − 1 + x`: unbiased and never negative. Cut at 10 per token.
    #[default]
    #[serde(alias = "low_var_kl")]
    K3,
}

impl KlEstimator {
    /// The estimate of a token and its derivative with respect to log π.
    #[must_use]
    pub fn value_and_slope(self, log_prob: f64, ref_log_prob: f64) -> (f64, f64) {
        let x = log_prob - ref_log_prob;
        let value = self.value(x);
        match self {
            Self::K1 => (value, 1.0),
            Self::K2 => (value, x),
            Self::K3 if value > K3_LIMIT => (K3_LIMIT, 0.0),
            Self::K3 if x.abs() > LOG_RATIO_LIMIT => (value, 0.0),
            Self::K3 => (value, 1.0 - (-x).exp()),
        }
    }

    /// The estimate as it is, at `x = log π − log π_ref`.
    pub(crate) fn value(self, x: f64) -> f64 {
        match self {
            Self::K1 => x,
            Self::K2 => x * x / 2.0,
            Self::K3 => {
                let x = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
                (-x).exp() - 1.0 + x
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [KlEstimator; 3] = [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3];

    #[test]
    fn equal_policies_do_not_diverge() {
        for estimator in ALL {
            assert_eq!(estimator.value_and_slope(-1.5, -1.5).0, 0.0);
        }
    }

    #[test]
    fn the_slope_is_the_derivative_of_the_estimate() {
        let step = 1e-6;
        for estimator in ALL {
            for x in [-30.0, -2.7, -1.0, -0.1, 0.2, 1.3, 8.0, 25.0] {
                let at = |x: f64| estimator.value_and_slope(x - 1.0, -1.0);
                let slope = (at(x + step).0 - at(x - step).0) / (2.0 * step);
                assert!((slope - at(x).1).abs() < 1e-5 * slope.abs().max(1.0), "{estimator:?} at {x}: {slope}");
            }
        }
    }

    #[test]
    fn the_expectation_of_k1_and_k3_is_the_divergence() {
        let (policy, reference) = ([0.5_f64, 0.3, 0.2], [0.2_f64, 0.3, 0.5]);
        let exact: f64 = policy.iter().zip(&reference).map(|(p, q)| p * (p / q).ln()).sum();
        for estimator in [KlEstimator::K1, KlEstimator::K3] {
            let expected: f64 =
                policy.iter().zip(&reference).map(|(p, q)| p * estimator.value_and_slope(p.ln(), q.ln()).0).sum();
            assert!((expected - exact).abs() < 1e-12, "{estimator:?}");
        }
    }

    #[test]
    fn verls_other_names_are_understood() {
        for (name, estimator) in [("kl", KlEstimator::K1), ("mse", KlEstimator::K2), ("low_var_kl", KlEstimator::K3)] {
            assert_eq!(serde_json::from_value::<KlEstimator>(name.into()).unwrap(), estimator);
        }
    }
}
