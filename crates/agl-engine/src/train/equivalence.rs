//! Losses and slopes against a reference in plain numbers, and against verl's published functions.
//!
//! The reference is written from the papers: objectives to be maximised, sums over rollouts, rows and tokens, slopes by central
//! differences. What a formula takes as a constant to the gradient, sg(·), is computed from the log-probs before the step.

use agl_core::credit::{KlEstimator, LossAggregation, RowTokens, token_weights};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use super::loss::{TokenInput, TokenLoss, needs_whole_rows, share_row_ratio, token_loss};
use super::rows::TrainRow;
use crate::config::{LossConfig, LossMode};

const AGGREGATIONS: [LossAggregation; 4] = [
    LossAggregation::TokenMean,
    LossAggregation::SeqMeanTokenMean,
    LossAggregation::SeqMeanTokenSumNorm,
    LossAggregation::RolloutMean,
];
const MODES: [LossMode; 3] = [LossMode::Vanilla, LossMode::Gspo, LossMode::Cispo];
const SCALE_FACTOR: f64 = 50.0;

/// A row of which every token is trained, with what its loss depends on.
#[derive(Clone, Debug, Deserialize)]
struct Row {
    #[serde(default)]
    rollout: usize,
    log_probs: Vec<f64>,
    old_log_probs: Vec<f64>,
    ref_log_probs: Vec<f64>,
    importance_weights: Vec<f64>,
    advantages: Vec<f64>,
}

/// What the engine makes of a batch: the loss of every token of every row.
fn engine(rows: &[Row], aggregation: LossAggregation, scale: f64, config: &LossConfig) -> Vec<Vec<TokenLoss>> {
    let counted: Vec<_> =
        rows.iter().map(|row| RowTokens { rollout: row.rollout, trained: row.log_probs.len() }).collect();
    let weights = token_weights(&counted, aggregation, scale);
    let single =
        |values: &[f64]| -> Vec<f32> { std::iter::once(0.0).chain(values.iter().map(|v| *v as f32)).collect() };
    rows.iter()
        .zip(weights)
        .map(|(row, weight)| {
            let len = row.log_probs.len() + 1;
            let row_of_tokens = TrainRow {
                ids: vec![0; len],
                mask: vec![true; len],
                weights: vec![weight as f32; len],
                advantages: single(&row.advantages),
                old_log_probs: single(&row.old_log_probs),
                importance_weights: Some(single(&row.importance_weights)),
                ref_log_probs: Some(single(&row.ref_log_probs)),
            };
            let mut tokens: Vec<TokenInput> = row_of_tokens.trained().map(|at| row_of_tokens.token(at)).collect();
            if needs_whole_rows(config) {
                share_row_ratio(&mut tokens, row.log_probs.iter().copied());
            }
            tokens.into_iter().zip(&row.log_probs).map(|(token, now)| token_loss(*now, token, config)).collect()
        })
        .collect()
}

fn assert_close(ours: f64, theirs: f64, what: impl Fn() -> String) {
    assert!((ours - theirs).abs() < 2e-6 * theirs.abs().max(0.1), "{}: {ours} instead of {theirs}", what());
}

mod reference {
    use super::*;

    /// The loss of a batch whose log-probs were `before` and are now `now`.
    pub(super) fn loss(before: &[Row], now: &[Vec<f64>], aggregation: LossAggregation, config: &LossConfig) -> f64 {
        let losses: Vec<Vec<f64>> = before.iter().zip(now).map(|(row, now)| row_losses(row, now, config)).collect();
        let sum = |row: &Vec<f64>| row.iter().sum::<f64>();
        let rows = losses.len() as f64;
        match aggregation {
            LossAggregation::TokenMean => {
                losses.iter().map(sum).sum::<f64>() / losses.iter().map(Vec::len).sum::<usize>() as f64
            }
            LossAggregation::SeqMeanTokenMean => {
                losses.iter().map(|row| sum(row) / row.len() as f64).sum::<f64>() / rows
            }
            LossAggregation::SeqMeanTokenSumNorm => {
                losses.iter().map(|row| sum(row) / SCALE_FACTOR).sum::<f64>() / rows
            }
            LossAggregation::RolloutMean => {
                let mut rollouts: Vec<usize> = before.iter().map(|row| row.rollout).collect();
                rollouts.dedup();
                let mut total = 0.0;
                for rollout in &rollouts {
                    let (mut numerator, mut tokens) = (0.0, 0.0);
                    for (row, losses) in before.iter().zip(&losses) {
                        if row.rollout == *rollout {
                            numerator += sum(losses);
                            tokens += losses.len() as f64;
                        }
                    }
                    total += numerator / tokens;
                }
                total / rollouts.len() as f64
            }
        }
    }

    fn row_losses(row: &Row, now: &[f64], config: &LossConfig) -> Vec<f64> {
        let (low, high) = (1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high);
        let clip = |ratio: f64| ratio.max(low).min(high);
        let length = now.len() as f64;
        let mean_log_ratio: f64 =
            (0..now.len()).map(|t| (row.log_probs[t] - row.old_log_probs[t]) / length).sum::<f64>();
        (0..now.len())
            .map(|t| {
                let a = row.advantages[t];
                let objective = match config.loss_mode {
                    LossMode::Vanilla => {
                        let r = (now[t] - row.old_log_probs[t]).exp();
                        let clipped = f64::min(r * a, clip(r) * a);
                        if a < 0.0 { f64::max(clipped, config.clip_ratio_c * a) } else { clipped }
                    }
                    LossMode::Gspo => {
                        let s = mean_log_ratio.exp() * now[t].exp() / row.log_probs[t].exp();
                        f64::min(s * a, clip(s) * a)
                    }
                    LossMode::Cispo => clip((row.log_probs[t] - row.old_log_probs[t]).exp()) * a * now[t],
                };
                let (p, q) = (now[t].exp(), row.ref_log_probs[t].exp());
                let kl = match config.kl_loss_type {
                    KlEstimator::K1 => (p / q).ln(),
                    KlEstimator::K2 => (p / q).ln().powi(2) / 2.0,
                    KlEstimator::K3 => f64::min(q / p - 1.0 - (q / p).ln(), 10.0),
                };
                -row.importance_weights[t] * objective + config.kl_loss_coef * kl
            })
            .collect()
    }

    /// Its derivative with respect to one log-prob.
    pub(super) fn slope(rows: &[Row], at: (usize, usize), aggregation: LossAggregation, config: &LossConfig) -> f64 {
        let step = 1e-5;
        let moved = |by: f64| {
            let mut now: Vec<Vec<f64>> = rows.iter().map(|row| row.log_probs.clone()).collect();
            now[at.0][at.1] += by;
            loss(rows, &now, aggregation, config)
        };
        (moved(step) - moved(-step)) / (2.0 * step)
    }
}

/// One to four rollouts of one to three rows of one to six tokens, ratios on both sides of every clip.
fn random_batch(rng: &mut ChaCha8Rng) -> Vec<Row> {
    let mut rows = Vec::new();
    for rollout in 0..rng.random_range(1..=4) {
        let advantage = f64::from(rng.random_range(-2.0f32..2.0));
        for _ in 0..rng.random_range(1..=3) {
            let length = rng.random_range(1..=6);
            let spread = [0.02, 0.3, 1.5][rng.random_range(0..3)];
            let mut each = |low: f32, high: f32| -> Vec<f64> {
                (0..length).map(|_| f64::from(rng.random_range(low..high))).collect()
            };
            let (log_probs, distance) = (each(-3.0, -0.1), each(-spread, spread));
            let old_log_probs = log_probs.iter().zip(distance).map(|(now, by)| f64::from((now + by) as f32)).collect();
            rows.push(Row {
                rollout,
                old_log_probs,
                ref_log_probs: each(-3.0, -0.1),
                importance_weights: each(0.2, 2.0),
                advantages: vec![advantage; length],
                log_probs,
            });
        }
    }
    rows
}

fn configs() -> Vec<LossConfig> {
    let mut configs = Vec::new();
    for loss_mode in MODES {
        let (clip_ratio_low, clip_ratio_high) = match loss_mode {
            LossMode::Vanilla => (0.2, 0.28),
            LossMode::Gspo => (0.03, 0.04),
            LossMode::Cispo => (1.0, 0.5),
        };
        for (kl_loss_coef, kl_loss_type) in
            [(0.0, KlEstimator::K3), (0.3, KlEstimator::K1), (0.3, KlEstimator::K2), (0.3, KlEstimator::K3)]
        {
            let config = LossConfig { loss_mode, clip_ratio_low, clip_ratio_high, ..LossConfig::default() };
            configs.push(LossConfig { kl_loss_coef, kl_loss_type, ..config });
        }
    }
    configs
}

#[test]
fn every_loss_under_every_weighting_and_its_slope_are_those_of_a_plain_reference() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let (mut clipped, mut all) = (0, 0);
    for number in 0..200 {
        let rows = random_batch(&mut rng);
        let now: Vec<Vec<f64>> = rows.iter().map(|row| row.log_probs.clone()).collect();
        for config in configs() {
            for aggregation in AGGREGATIONS {
                let what = || format!("batch {number}, {aggregation:?}, {config:?}");
                let ours = engine(&rows, aggregation, SCALE_FACTOR, &config);
                let total: f64 = ours.iter().flatten().map(|token| token.loss).sum();
                assert_close(total, reference::loss(&rows, &now, aggregation, &config), what);
                for (row, tokens) in ours.iter().enumerate() {
                    for (at, token) in tokens.iter().enumerate() {
                        assert_close(token.slope, reference::slope(&rows, (row, at), aggregation, &config), what);
                        clipped += usize::from(token.clipped);
                        all += 1;
                    }
                }
            }
        }
    }
    assert!(clipped > all / 20, "the clips take part: {clipped} of {all}");
}

#[test]
fn dividing_rollouts_into_more_rows_changes_nothing_about_their_mean() {
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    for _ in 0..200 {
        let rows = random_batch(&mut rng);
        let mut divided = Vec::new();
        for row in &rows {
            let cut = rng.random_range(0..row.log_probs.len());
            for part in [0..cut, cut..row.log_probs.len()].into_iter().filter(|part| !part.is_empty()) {
                divided.push(Row {
                    rollout: row.rollout,
                    log_probs: row.log_probs[part.clone()].to_vec(),
                    old_log_probs: row.old_log_probs[part.clone()].to_vec(),
                    ref_log_probs: row.ref_log_probs[part.clone()].to_vec(),
                    importance_weights: row.importance_weights[part.clone()].to_vec(),
                    advantages: row.advantages[part].to_vec(),
                });
            }
        }
        for config in configs().into_iter().filter(|config| config.loss_mode != LossMode::Gspo) {
            let whole = engine(&rows, LossAggregation::RolloutMean, 1.0, &config).concat();
            let parts = engine(&divided, LossAggregation::RolloutMean, 1.0, &config).concat();
            assert_eq!(whole, parts, "token by token");
        }
    }
}

#[derive(Deserialize)]
struct Recorded {
    loss_scale_factor: f64,
    kl_loss_coef: f64,
    batches: Vec<RecordedBatch>,
}

#[derive(Deserialize)]
struct RecordedBatch {
    rows: Vec<Row>,
    results: Vec<RecordedResult>,
}

#[derive(Deserialize)]
struct RecordedResult {
    loss_mode: LossMode,
    loss_agg_mode: LossAggregation,
    kl_loss_type: Option<KlEstimator>,
    clip_ratio_low: f64,
    clip_ratio_high: f64,
    clip_ratio_c: f64,
    loss: f64,
    slopes: Vec<Vec<f64>>,
}

#[test]
fn losses_and_slopes_are_those_of_verls_published_functions() {
    let recorded: Recorded = serde_json::from_str(include_str!("../../tests/fixtures/verl_losses.json")).unwrap();
    for batch in recorded.batches {
        assert_eq!(batch.results.len(), 36);
        for result in batch.results {
            let config = LossConfig {
                loss_mode: result.loss_mode,
                clip_ratio_low: result.clip_ratio_low,
                clip_ratio_high: result.clip_ratio_high,
                clip_ratio_c: result.clip_ratio_c,
                kl_loss_coef: result.kl_loss_type.map_or(0.0, |_| recorded.kl_loss_coef),
                kl_loss_type: result.kl_loss_type.unwrap_or_default(),
                ..LossConfig::default()
            };
            let what = || format!("{:?} {config:?}", result.loss_agg_mode);
            let ours = engine(&batch.rows, result.loss_agg_mode, recorded.loss_scale_factor, &config).concat();
            assert_close(ours.iter().map(|token| token.loss).sum(), result.loss, what);
            for (ours, theirs) in ours.iter().zip(result.slopes.concat()) {
                assert_close(ours.slope, theirs, what);
            }
        }
    }
}
