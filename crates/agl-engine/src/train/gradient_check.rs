//! The gradient against finite differences of the loss, for every parameter of every family, and against itself however its rows
//! are divided into micro-batches.

use std::path::PathBuf;

use burn::tensor::{Device, Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use agl_core::credit::KlEstimator;

use super::gradient::{accumulate, accumulate_groups, log_probs};
use super::rows::{MaskedRow, TrainRow};
use crate::checkpoint::directory::{ModelFiles, read_weights};
use crate::config::{LossConfig, LossMode};
use crate::model::forward::Decoder;
use crate::model::weights::Weights;
use crate::ops::inference::host_values;

/// Half the distance of the two points of a difference. The loss is of order 1 and its rounding error of order 1e-7, so
/// the quotient is good to about 1e-4; the curvature's share grows with the square of this and is of the same size.
const STEP: f32 = 2e-3;

fn model(name: &str) -> (Decoder, Weights) {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let files = ModelFiles::read(&dir.join("config.json"), &dir).unwrap();
    let decoder = Decoder::new(files.model_config().unwrap());
    let weights = read_weights(&dir, &decoder.layout, decoder.config.tied_embeddings, &Device::flex()).unwrap();
    (decoder, weights)
}

/// Rows of two lengths with both signs of advantage; old log-probs such that some tokens are clipped and none is near the
/// edge of a clip, where the loss has a kink.
fn rows(decoder: &Decoder, weights: &Weights, temperature: f32) -> Vec<TrainRow> {
    let offsets = [0.05, -0.05, 0.6, -0.6];
    (0..4usize)
        .map(|number| {
            let len = 9 + 5 * (number % 2);
            let ids: Vec<u32> = (0..len).map(|at| ((number * 53 + at * 29) % 128) as u32).collect();
            let mask = (0..len).map(|at| at % 4 != 1).collect();
            let mut row = TrainRow::supervised(ids, mask, 0.05);
            let now = log_probs(decoder, weights, &[MaskedRow::whole(row.ids.clone())], temperature, 1000).remove(0);
            row.old_log_probs = now.iter().enumerate().map(|(at, lp)| lp + offsets[(number + at) % 4]).collect();
            row.advantages = vec![if number % 2 == 0 { 1.0 } else { -0.7 }; len];
            row
        })
        .collect()
}

/// Rows whose ratios as a whole are inside the clip range, inside, beyond it, and beyond it: for a loss with one ratio per row.
/// Their divergence from a reference policy differs from token to token.
fn rows_with_a_reference(decoder: &Decoder, weights: &Weights, temperature: f32) -> Vec<TrainRow> {
    let mut rows = rows(decoder, weights, temperature);
    for (number, row) in rows.iter_mut().enumerate() {
        let now = log_probs(decoder, weights, &[MaskedRow::whole(row.ids.clone())], temperature, 1000).remove(0);
        row.old_log_probs = now.iter().map(|lp| lp + [0.01, -0.01, -0.3, 0.3][number]).collect();
        row.ref_log_probs =
            Some(now.iter().enumerate().map(|(at, lp)| lp + [0.3, -0.4, 0.1][(number + at) % 3]).collect());
    }
    rows
}

fn moved(weights: &Weights, slot: usize, direction: &Tensor<2>, by: f32) -> Weights {
    let mut weights = weights.clone();
    weights.tensors[slot] = weights.tensors[slot].clone() + direction.clone().mul_scalar(by);
    weights
}

fn inner(a: &Tensor<2>, b: &Tensor<2>) -> f64 {
    f64::from(host_values((a.clone() * b.clone()).sum())[0])
}

/// For each parameter tensor the slope of the loss along its own gradient and along a random direction of length 1.
fn assert_gradient_is_the_slope(name: &str) {
    let (decoder, weights) = model(name);
    let loss = LossConfig { entropy_coeff: 0.1, temperature: 0.8, ..LossConfig::default() };
    let rows = rows(&decoder, &weights, loss.temperature);
    assert_slope(name, &decoder, &weights, &rows, &loss);
}

fn assert_slope(name: &str, decoder: &Decoder, weights: &Weights, rows: &[TrainRow], loss: &LossConfig) {
    let budget = 30;
    let (gradients, sums) = accumulate(decoder, weights, rows, loss, budget);
    assert!(sums.clipped > 0 && sums.clipped < sums.trained, "the clip takes part: {sums:?}");
    let loss_at = |weights: &Weights| accumulate(decoder, weights, rows, loss, budget).1.loss;
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for (slot, (gradient, spec)) in gradients.iter().zip(&decoder.layout.tensors).enumerate() {
        let random: Vec<f32> = (0..spec.shape.iter().product()).map(|_| rng.random::<f32>() - 0.5).collect();
        let random = Tensor::from_data(TensorData::new(random, spec.matrix()), &weights.device());
        for direction in [gradient.clone(), random] {
            let length = inner(&direction, &direction).sqrt();
            let direction = direction.div_scalar(length);
            let expected = inner(gradient, &direction);
            let ahead = loss_at(&moved(weights, slot, &direction, STEP));
            let behind = loss_at(&moved(weights, slot, &direction, -STEP));
            let slope = (ahead - behind) / (2.0 * f64::from(STEP));
            let allowed = 2e-3 * expected.abs().max(0.1);
            assert!((slope - expected).abs() < allowed, "{name}, {}: slope {slope}, gradient {expected}", spec.name);
        }
    }
}

#[test]
fn gradients_of_qwen3_with_tied_embeddings_are_the_slopes_of_the_loss() {
    assert_gradient_is_the_slope("qwen3-tied");
}

#[test]
fn gradients_of_qwen3_with_untied_embeddings_are_the_slopes_of_the_loss() {
    assert_gradient_is_the_slope("qwen3-untied");
}

#[test]
fn gradients_of_qwen2_with_its_biases_are_the_slopes_of_the_loss() {
    assert_gradient_is_the_slope("qwen2");
}

#[test]
fn gradients_of_llama_are_the_slopes_of_the_loss() {
    assert_gradient_is_the_slope("llama");
}

#[test]
fn gradients_of_llama_with_biases_everywhere_are_the_slopes_of_the_loss() {
    assert_gradient_is_the_slope("llama-biases");
}

#[test]
fn gradients_of_qwen3_with_a_sliding_window_are_the_slopes_of_the_loss() {
    assert_gradient_is_the_slope("qwen3-window");
}

#[test]
fn gradients_of_qwen2_stretched_by_yarn_are_the_slopes_of_the_loss() {
    assert_gradient_is_the_slope("qwen2-yarn");
}

#[test]
fn gradients_of_smollm3_with_a_layer_without_positions_are_the_slopes_of_the_loss() {
    assert_gradient_is_the_slope("smollm3");
}

#[test]
fn gradients_of_gemma3_with_local_and_global_layers_are_the_slopes_of_the_loss() {
    assert_gradient_is_the_slope("gemma3");
}

const GSPO: LossConfig = LossConfig {
    kind: crate::config::LossKind::PolicyGradient,
    loss_mode: LossMode::Gspo,
    clip_ratio_low: 0.03,
    clip_ratio_high: 0.04,
    clip_ratio_c: 3.0,
    kl_loss_coef: 0.0,
    kl_loss_type: KlEstimator::K3,
    entropy_coeff: 0.0,
    temperature: 0.8,
};

#[test]
fn the_gradient_of_a_loss_with_one_ratio_per_row_is_its_slope() {
    let (decoder, weights) = model("qwen3-tied");
    let rows = rows_with_a_reference(&decoder, &weights, GSPO.temperature);
    assert_slope("qwen3-tied", &decoder, &weights, &rows, &GSPO);
}

#[test]
fn gradients_of_the_divergence_from_a_reference_are_its_slopes() {
    let (decoder, weights) = model("qwen3-tied");
    let rows = rows_with_a_reference(&decoder, &weights, GSPO.temperature);
    for kl_loss_type in [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3] {
        let loss = LossConfig { kl_loss_coef: 0.5, kl_loss_type, ..GSPO };
        assert_slope("qwen3-tied", &decoder, &weights, &rows, &loss);
    }
}

fn distance(a: &[Tensor<2>], b: &[Tensor<2>]) -> f64 {
    let squares = a.iter().zip(b).map(|(a, b)| a.clone() - b.clone()).map(|d| inner(&d, &d));
    let norm: f64 = b.iter().map(|b| inner(b, b)).sum();
    (squares.sum::<f64>() / norm).sqrt()
}

#[test]
fn where_nothing_is_clipped_a_bounded_weight_has_the_gradient_of_the_plain_surrogate() {
    let (decoder, weights) = model("qwen3-tied");
    let rows = rows(&decoder, &weights, 0.8);
    let wide = LossConfig { clip_ratio_low: 1.0, clip_ratio_high: 10.0, clip_ratio_c: 20.0, ..GSPO };
    let of = |loss_mode| accumulate(&decoder, &weights, &rows, &LossConfig { loss_mode, ..wide.clone() }, 30).0;
    assert!(distance(&of(LossMode::Cispo), &of(LossMode::Vanilla)) < 1e-5);
}

/// Every way of dividing the numbers below `count` into groups.
fn partitions(count: usize) -> Vec<Vec<Vec<usize>>> {
    let Some(last) = count.checked_sub(1) else { return vec![Vec::new()] };
    let mut result = Vec::new();
    for partition in partitions(last) {
        for group in 0..=partition.len() {
            let mut partition = partition.clone();
            if group == partition.len() {
                partition.push(Vec::new());
            }
            partition[group].push(last);
            result.push(partition);
        }
    }
    result
}

#[test]
fn one_batch_divided_every_way_gives_one_loss_and_one_gradient() {
    let (decoder, weights) = model("qwen3-tied");
    let mut rows = rows_with_a_reference(&decoder, &weights, GSPO.temperature);
    for (number, row) in rows.iter_mut().enumerate() {
        // As the weightings give them: uneven from row to row.
        row.weights.fill([0.02, 0.05, 0.03, 0.08][number]);
        row.importance_weights = Some((0..row.ids.len()).map(|at| 0.5 + at as f32 / 20.0).collect());
    }
    assert_eq!(partitions(rows.len()).len(), 15);
    for loss_mode in [LossMode::Vanilla, LossMode::Gspo, LossMode::Cispo] {
        let loss = LossConfig { loss_mode, kl_loss_coef: 0.2, entropy_coeff: 0.1, ..GSPO };
        let (whole, sums) = accumulate_groups(&decoder, &weights, &rows, &loss, &[vec![0, 1, 2, 3]]);
        for partition in partitions(rows.len()) {
            let (gradient, parts) = accumulate_groups(&decoder, &weights, &rows, &loss, &partition);
            assert!((parts.loss - sums.loss).abs() < 1e-5, "{loss_mode:?} {partition:?}");
            assert_eq!((parts.trained, parts.clipped), (sums.trained, sums.clipped));
            let distance = distance(&gradient, &whole);
            assert!(distance < 1e-5, "{loss_mode:?} {partition:?}: {distance}");
        }
    }
}
