//! Agreement with verl's published functions, whose answers `scripts/parity` recorded in the fixture.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use agl_core::credit::off_policy::{Correction, DriftRow, Rejection};
use agl_core::credit::{AdvantageLevel, Estimator, Scored, advantages};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

fn recorded<T: DeserializeOwned>(part: &str) -> Vec<T> {
    let mut fixture: Value = serde_json::from_str(include_str!("fixtures/verl_credit.json")).unwrap();
    serde_json::from_value(fixture[part].take()).unwrap()
}

fn assert_close(ours: f64, theirs: f64, what: &str) {
    assert!((ours - theirs).abs() < 1e-6 * theirs.abs().max(1.0), "{what}: {ours} instead of {theirs}");
}

#[derive(Deserialize)]
struct AdvantageCase {
    rollouts: Vec<Rollout>,
    expected: std::collections::BTreeMap<String, Vec<f64>>,
}

#[derive(Deserialize)]
struct Rollout {
    group: String,
    reward: f64,
    tokens: usize,
}

#[test]
fn advantages_of_rollouts_of_one_row_are_verls() {
    for case in recorded::<AdvantageCase>("advantages") {
        let rollouts: Vec<Scored> = case
            .rollouts
            .into_iter()
            .map(|Rollout { group, reward, tokens }| Scored { group, reward: Some(reward), rows: 1, tokens })
            .collect();
        assert_eq!(case.expected.len(), 5);
        for (name, expected) in case.expected {
            let estimator: Estimator = serde_json::from_value(name.as_str().into()).unwrap();
            let values = advantages(&rollouts, estimator, AdvantageLevel::Rollout).values;
            for (ours, theirs) in values.into_iter().zip(expected) {
                assert_close(ours.unwrap(), theirs, &name);
            }
        }
    }
}

#[derive(Deserialize)]
struct CorrectionCase {
    rollout_is: Value,
    rollout_is_threshold: String,
    rollout_rs: Option<String>,
    rollout_rs_threshold: Option<String>,
    rows: Vec<Row>,
    weight_mean: f64,
    effective_sample_size: f64,
    kl: f64,
    k3_kl: f64,
}

#[derive(Deserialize)]
struct Row {
    old_log_probs: Vec<f32>,
    rollout_log_probs: Vec<f32>,
    weights: Vec<f64>,
    kept: Vec<bool>,
}

#[test]
fn weights_rejections_and_metrics_of_the_correction_are_verls() {
    for case in recorded::<CorrectionCase>("corrections") {
        let name = format!("{} {} {:?}", case.rollout_is, case.rollout_is_threshold, case.rollout_rs);
        let rejections = case.rollout_rs.as_deref().zip(case.rollout_rs_threshold.as_deref());
        let correction = Correction {
            weighting: serde_json::from_value(case.rollout_is).unwrap(),
            threshold: case.rollout_is_threshold.parse().unwrap(),
            rejections: rejections
                .map_or_else(Vec::new, |(criteria, bounds)| Rejection::parse(criteria, bounds).unwrap()),
        };
        let mask = [1; 16];
        let rows: Vec<DriftRow<'_>> = case
            .rows
            .iter()
            .map(|row| DriftRow {
                mask: &mask[..row.weights.len()],
                old_log_probs: &row.old_log_probs,
                rollout_log_probs: &row.rollout_log_probs,
            })
            .collect();
        let (corrected, drift) = correction.apply(&rows);
        for (ours, theirs) in corrected.iter().zip(&case.rows) {
            assert!(ours.rejected.iter().zip(&theirs.kept).all(|(rejected, kept)| *rejected != *kept), "{name}");
            for (ours, theirs) in ours.weights.iter().zip(&theirs.weights) {
                assert_close(f64::from(*ours), *theirs, &name);
            }
        }
        assert_close(drift.weight_mean, case.weight_mean, &name);
        assert_close(drift.effective_sample_size, case.effective_sample_size, &name);
        assert_close(drift.kl, case.kl, &name);
        assert_close(drift.k3_kl, case.k3_kl, &name);
    }
}
