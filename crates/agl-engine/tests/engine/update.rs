//! Optimiser steps.

use agl_engine::{Engine, EngineConfig, EngineError, LossConfig, LossKind, MaskedRow, OptimConfig, TrainRow};

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
    row.importance_weights = Some(vec![1.0, 2.0, 1.0, 1.0]);
    let stats =
        engine.update(&[row], &LossConfig::default(), &OptimConfig { lr: 0.0, ..OptimConfig::default() }).unwrap();
    let r = 0.5f64.exp();
    assert_eq!((stats.tokens, stats.trained_tokens), (4, 2), "the first position is never trained");
    assert!((stats.ratio_mean - (1.0 + r) / 2.0).abs() < 1e-5);
    assert!((stats.ratio_max - r).abs() < 1e-5);
    assert!((stats.clip_fraction - 0.5).abs() < 1e-9);
    assert!((stats.approx_kl - (r - 1.0 - 0.5) / 2.0).abs() < 1e-5);
    assert!((stats.ratio_ess - (1.0 + r).powi(2) / (2.0 * (1.0 + r * r))).abs() < 1e-5);
    assert!(stats.entropy > 0.0 && stats.entropy < 128f64.ln());
    assert!((stats.loss - 0.5 * (-2.0 - 1.2)).abs() < 1e-5);
}

#[test]
fn an_update_takes_the_learning_rate_it_is_given() {
    let before = engine("qwen3-tied").logits(&[1, 2]).unwrap();
    let after = |lr: f64, lr_warmup_steps: i64| {
        let engine = engine("qwen3-tied");
        let optim = OptimConfig { lr, lr_warmup_steps, ..OptimConfig::default() };
        engine.update(&rows(), &LossConfig::default(), &optim).unwrap();
        engine.logits(&[1, 2]).unwrap()
    };
    assert_eq!(after(0.0, 4), before, "a rate of 0 changes nothing");
    assert_ne!(after(0.25e-3, 4), before);
    // Of the schedule it makes nothing: that is for whoever counts the steps.
    assert_eq!(after(1e-3, 4), after(1e-3, -1));
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

#[test]
fn the_reference_stays_as_it_was_while_the_policy_learns() {
    let engine = engine("qwen3-tied");
    let rows: Vec<MaskedRow> = rows().into_iter().map(|row| MaskedRow { ids: row.ids, mask: row.mask }).collect();
    let error = engine.reference_log_probs(&rows, 1.0).unwrap_err();
    assert!(matches!(error, EngineError::NoReference));
    engine.keep_reference();
    let before = engine.masked_log_probs(&rows, 1.0).unwrap();
    logits_after(&engine, &self::rows(), &LossConfig { kind: LossKind::Sft, ..LossConfig::default() }, 2);
    assert_eq!(engine.reference_log_probs(&rows, 1.0).unwrap(), before);
    assert_ne!(engine.masked_log_probs(&rows, 1.0).unwrap(), before);
    engine.keep_reference();
    assert_ne!(engine.reference_log_probs(&rows, 1.0).unwrap(), before);
    engine.load_reference(&dir("qwen3-tied")).unwrap();
    assert_eq!(engine.reference_log_probs(&rows, 1.0).unwrap(), before);
}

#[test]
fn log_probs_of_some_tokens_are_those_of_all_and_zero_elsewhere() {
    let engine = engine("qwen3-untied");
    let rows = rows();
    let whole = engine.log_probs(&rows.iter().map(|row| row.ids.clone()).collect::<Vec<_>>(), 0.7).unwrap();
    let masked: Vec<MaskedRow> =
        rows.iter().map(|row| MaskedRow { ids: row.ids.clone(), mask: row.mask.clone() }).collect();
    for (row, (some, all)) in rows.iter().zip(engine.masked_log_probs(&masked, 0.7).unwrap().iter().zip(&whole)) {
        for (at, &asked) in row.mask.iter().enumerate() {
            let expected = if asked && at > 0 { all[at] } else { 0.0 };
            assert!((some[at] - expected).abs() < 1e-5, "position {at}: {} instead of {expected}", some[at]);
        }
    }
}

#[test]
fn a_divergence_loss_alone_brings_the_policy_back_to_its_reference() {
    let engine = engine("qwen3-tied");
    engine.keep_reference();
    logits_after(&engine, &rows(), &LossConfig { kind: LossKind::Sft, ..LossConfig::default() }, 5);
    let mut rows = rows();
    let asked: Vec<MaskedRow> =
        rows.iter().map(|row| MaskedRow { ids: row.ids.clone(), mask: row.mask.clone() }).collect();
    let loss = LossConfig { kl_loss_coef: 1.0, ..LossConfig::default() };
    let mut distances = Vec::new();
    // The first steps still go on with the momentum of what was learnt.
    for _ in 0..30 {
        let old = engine.masked_log_probs(&asked, 1.0).unwrap();
        let reference = engine.reference_log_probs(&asked, 1.0).unwrap();
        for ((row, old), reference) in rows.iter_mut().zip(old).zip(reference) {
            row.advantages.fill(0.0);
            row.old_log_probs = old;
            row.ref_log_probs = Some(reference);
        }
        let optim = OptimConfig { lr: 1e-3, ..OptimConfig::default() };
        distances.push(engine.update(&rows, &loss, &optim).unwrap().ref_kl);
    }
    assert!(distances[0] > 0.0 && distances[29] < 0.5 * distances[0], "{distances:?}");
}

#[test]
fn a_divergence_without_a_reference_is_refused() {
    let loss = LossConfig { kl_loss_coef: 0.1, ..LossConfig::default() };
    let error = engine("qwen3-tied").update(&rows(), &loss, &OptimConfig::default()).unwrap_err().to_string();
    assert_eq!(error, "training row 0: `ref_log_probs` is missing, but the loss has a `kl_loss_coef` above 0");
}
