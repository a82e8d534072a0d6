//! `[algorithm.rollout_correction]`: what is done where the policy that sampled is not the one that an update starts from.

use agl_core::credit::off_policy::{Bounds, Correction, Rejection, RolloutIs};
use serde::{Deserialize, Serialize};

use crate::TrainerError;

/// Where log π_old, the denominator of the ratio, comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OldLogProbs {
    /// From the sampler, as recorded with each token (verl's `bypass_mode`): the ratio itself corrects for all that lies between.
    #[default]
    Recorded,
    /// From the trainer's forward before the step; the recorded ones become log π_rollout, and [`RolloutCorrectionConfig`]
    /// corrects for the difference.
    Recompute,
}

/// See the keys of verl's `rollout_correction`, whose spelling and arithmetic these have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RolloutCorrectionConfig {
    /// `"token"`, `"sequence"` or `"none"`: importance weights π_old/π_rollout.
    pub rollout_is: RolloutIs,
    /// A number cuts weights off at it (1.5 to 5 for tokens, 2 to 10 for sequences); `"lower_upper"`, e.g. `"0.5_5.0"`, makes those
    /// outside 0 (IcePop).
    pub rollout_is_threshold: Bounds,
    /// Criteria a token must pass to be trained, separated by commas: `token_k1 … k3`, `seq_sum_k1 … k3`, `seq_mean_k1 … k3`,
    /// `seq_max_k2`, `seq_max_k3`. None if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout_rs: Option<String>,
    /// Their thresholds, separated by commas, or one for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout_rs_threshold: Option<Thresholds>,
}

/// A number, or a text of several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Thresholds {
    /// One for all criteria.
    Number(f64),
    /// As verl reads them: `"0.5_2.0,0.3"`.
    Text(String),
}

impl Default for RolloutCorrectionConfig {
    fn default() -> Self {
        Self {
            rollout_is: RolloutIs::Token,
            rollout_is_threshold: Bounds { lower: None, upper: 2.0 },
            rollout_rs: None,
            rollout_rs_threshold: None,
        }
    }
}

impl RolloutCorrectionConfig {
    /// What is to be done.
    ///
    /// # Errors
    /// [`TrainerError::Config`] naming the key that cannot be used.
    pub fn correction(&self) -> Result<Correction, TrainerError> {
        let rejections = match (&self.rollout_rs, &self.rollout_rs_threshold) {
            (None, None) => Vec::new(),
            (None, Some(_)) => {
                let what = "is missing, but there is a rollout_rs_threshold; say which criteria it is for".to_owned();
                return Err(TrainerError::Config { key: "algorithm.rollout_correction.rollout_rs", what });
            }
            (Some(_), None) => {
                let what = "is missing; give each criterion of rollout_rs its threshold, e.g. \"0.5_2.0\"".to_owned();
                return Err(TrainerError::Config { key: "algorithm.rollout_correction.rollout_rs_threshold", what });
            }
            (Some(criteria), Some(thresholds)) => {
                let thresholds = match thresholds {
                    Thresholds::Number(number) => number.to_string(),
                    Thresholds::Text(text) => text.clone(),
                };
                Rejection::parse(criteria, &thresholds).map_err(|what| TrainerError::Config {
                    key: "algorithm.rollout_correction.rollout_rs",
                    what: format!("or its threshold cannot be used: {what}"),
                })?
            }
        };
        Ok(Correction { weighting: self.rollout_is, threshold: self.rollout_is_threshold, rejections })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(criteria: Option<&str>, thresholds: Option<Thresholds>) -> Result<Correction, TrainerError> {
        RolloutCorrectionConfig {
            rollout_rs: criteria.map(str::to_owned),
            rollout_rs_threshold: thresholds,
            ..RolloutCorrectionConfig::default()
        }
        .correction()
    }

    #[test]
    fn criteria_and_thresholds_belong_together() {
        assert!(with(None, None).unwrap().rejections.is_empty());
        assert_eq!(with(Some("token_k2,seq_max_k3"), Some(Thresholds::Number(0.5))).unwrap().rejections.len(), 2);
        let error = with(Some("token_k1"), None).unwrap_err().to_string();
        assert!(error.contains("`algorithm.rollout_correction.rollout_rs_threshold` is missing"), "{error}");
        let error = with(Some("token_k9"), Some(Thresholds::Number(0.5))).unwrap_err().to_string();
        assert!(error.contains("`algorithm.rollout_correction.rollout_rs`") && error.contains("token_k9"), "{error}");
    }
}
