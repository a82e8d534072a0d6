//! Optimiser steps.

use agl_engine::{Engine, EngineConfig, EngineError, LossConfig, LossKind, OptimConfig, TrainRow};

use super::fixture::{dir, engine};

fn rows() -> Vec<TrainRow> {
    [17usize, 5, 40, 23, 11]
        .iter()
        .map(|len| {
            let ids: Vec<u32> = (0..*len).map(|at| (at * 37 + len * 11) as u32 % 128).collect();
            let mask = (0..*len).map(|at| at > 2 && at % 3 != 0).collect();
            TrainRow::supervised(ids, mask, 0.02)
        })
        .collect()
}

fn logits_after(engine: &Engine, rows: &[TrainRow], loss: &LossConfig, updates: usize) -> Vec<Vec<f32>> {
    for _ in 0..updates {
        engine.update(rows, loss, &OptimConfig { lr: 1e-3, ..OptimConfig::default() }).unwrap();
    }
    engine.logits(&[3, 1, 4, 1, 5, 9, 2, 6]).unwrap()
}

fn largest_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn supervised_loss_is_the_weighted_cross_entropy() {
    let engine = engine("qwen3-tied");
    let rows = rows();
    let ids: Vec<Vec<u32>> = rows.iter().map(|row| row.ids.clone()).collect();
    let log_probs = engine.log_probs(&ids, 1.0).unwrap();
    let mut expected = 0.0;
    for (row, log_probs) in rows.iter().zip(&log_probs) {
        for (at, log_prob) in log_probs.iter().enumerate().skip(1) {
            if row.mask[at] {
                expected -= f64::from(row.weights[at] * log_prob);
            }
        }
    }
    let loss = LossConfig { kind: LossKind::Sft, ..LossConfig::default() };
    let stats = engine.update(&rows, &loss, &OptimConfig::default()).unwrap();
    assert!((stats.loss - expected).abs() < 1e-5, "{} instead of {expected}", stats.loss);
}

#[test]
fn a_policy_gradient_with_ratio_one_and_advantage_one_is_supervised_learning() {
    let (policy, supervised) = (engine("qwen3-untied"), engine("qwen3-untied"));
    let mut rows = rows();
    let ids: Vec<Vec<u32>> = rows.iter().map(|row| row.ids.clone()).collect();
    for (row, log_probs) in rows.iter_mut().zip(policy.log_probs(&ids, 1.0).unwrap()) {
        row.old_log_probs = log_probs;
    }
    let a = logits_after(&policy, &rows, &LossConfig::default(), 1);
    let b = logits_after(&supervised, &rows, &LossConfig { kind: LossKind::Sft, ..LossConfig::default() }, 1);
    assert!(largest_difference(&a, &b) < 1e-4);
    assert!(largest_difference(&a, &engine("qwen3-untied").logits(&[3, 1, 4, 1, 5, 9, 2, 6]).unwrap()) > 1e-3);
}

#[test]
fn the_size_of_micro_batches_does_not_change_the_update() {
    let loss = LossConfig { kind: LossKind::Sft, ..LossConfig::default() };
    let whole = logits_after(&engine("qwen3-tied"), &rows(), &loss, 2);
    let config = EngineConfig { micro_batch_tokens: 1, ..EngineConfig::default() };
    let single = logits_after(&Engine::load(&dir("qwen3-tied"), config).unwrap(), &rows(), &loss, 2);
    assert!(largest_difference(&whole, &single) < 1e-4);
}

#[test]
fn what_follows_a_rows_last_trained_token_changes_nothing() {
    let loss = LossConfig { kind: LossKind::Sft, ..LossConfig::default() };
    let short = TrainRow::supervised(vec![1, 2, 3], vec![false, true, true], 0.5);
    let long = TrainRow::supervised(vec![1, 2, 3, 90, 91], vec![false, true, true, false, false], 0.5);
    let a = logits_after(&engine("qwen3-tied"), &[short], &loss, 1);
    let b = logits_after(&engine("qwen3-tied"), &[long], &loss, 1);
    assert_eq!(a, b);
}

#[test]
fn statistics_count_tokens_and_describe_the_ratio() {
    let engine = engine("qwen3-tied");
    let mut row = TrainRow::supervised(vec![1, 2, 3, 4], vec![true, true, false, true], 0.5);
    let log_probs = engine.log_probs(&[row.ids.clone()], 1.0).unwrap().remove(0);
    row.old_log_probs = vec![0.0, log_probs[1], 0.0, log_probs[3] - 0.5];
    row.rollout_log_probs = Some(vec![0.0, log_probs[1] - 5.0, 0.0, log_probs[3] - 0.5]);
    let stats =
        engine.update(&[row], &LossConfig::default(), &OptimConfig { lr: 0.0, ..OptimConfig::default() }).unwrap();
    let r = 0.5f64.exp();
    assert_eq!((stats.tokens, stats.trained_tokens), (4, 2), "the first position is never trained");
    assert!((stats.ratio_mean - (1.0 + r) / 2.0).abs() < 1e-5);
    assert!((stats.ratio_max - r).abs() < 1e-5);
    assert!((stats.clip_fraction - 0.5).abs() < 1e-9);
    assert!((stats.approx_kl - (r - 1.0 - 0.5) / 2.0).abs() < 1e-5);
    assert!((stats.tis_mean - (2.0 + 1.0) / 2.0).abs() < 1e-9, "the first weight is cut at 2");
    assert!(stats.entropy > 0.0 && stats.entropy < 128f64.ln());
    assert!((stats.loss - 0.5 * (-2.0 - 1.2)).abs() < 1e-5);
}

#[test]
fn an_update_takes_the_learning_rate_it_is_given() {
    let engine = engine("qwen3-tied");
    let before = engine.logits(&[1, 2]).unwrap();
    for lr in [0.0, 0.25e-3, 1e-3] {
        // Of the schedule it makes nothing: that is for whoever counts the steps.
        let optim = OptimConfig { lr, lr_warmup_steps: 4, ..OptimConfig::default() };
        assert_eq!(engine.update(&rows(), &LossConfig::default(), &optim).unwrap().lr, lr);
        assert_eq!(engine.logits(&[1, 2]).unwrap() == before, lr == 0.0, "a rate of 0 changes nothing");
    }
}

#[test]
fn an_update_without_trained_tokens_is_refused() {
    let row = TrainRow::supervised(vec![1, 2], vec![true, false], 1.0);
    let error = engine("qwen3-tied").update(&[row], &LossConfig::default(), &OptimConfig::default()).unwrap_err();
    assert!(matches!(error, EngineError::NothingToTrain { rows: 1 }));
}

#[test]
fn a_value_that_is_not_a_number_is_refused_and_nothing_changes() {
    let engine = engine("qwen3-tied");
    let before = engine.logits(&[1, 2]).unwrap();
    let mut row = TrainRow::supervised(vec![1, 2], vec![false, true], 1.0);
    row.advantages[1] = f32::NAN;
    let error = engine.update(&[row], &LossConfig::default(), &OptimConfig::default()).unwrap_err();
    assert_eq!(error.to_string(), "training row 0: `advantages` is NaN at trained position 1");
    assert_eq!(engine.logits(&[1, 2]).unwrap(), before);
}

#[test]
fn settings_out_of_range_name_the_key() {
    let engine = engine("qwen3-tied");
    let loss = LossConfig { clip_ratio_c: 0.5, ..LossConfig::default() };
    let error = engine.update(&rows(), &loss, &OptimConfig::default()).unwrap_err();
    assert_eq!(error.to_string(), "engine setting `clip_ratio_c` is 0.5, but it must be greater than 1");
    let optim = OptimConfig { lr: f64::NAN, ..OptimConfig::default() };
    assert!(engine.update(&rows(), &LossConfig::default(), &optim).unwrap_err().to_string().contains("`lr` is NaN"));
    let optim = OptimConfig { min_lr_ratio: 1.5, ..OptimConfig::default() };
    assert_eq!(
        optim.check().unwrap_err().to_string(),
        "engine setting `min_lr_ratio` is 1.5, but it must be in [0, 1]"
    );
}
