//! The gradient against finite differences of the loss, for every parameter of every family.

use std::path::PathBuf;

use burn::tensor::{Device, Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::gradient::{accumulate, log_probs};
use super::rows::TrainRow;
use crate::checkpoint::directory::{ModelFiles, read_weights};
use crate::config::LossConfig;
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
            let now = log_probs(decoder, weights, &[row.ids.clone()], temperature, 1000).remove(0);
            row.old_log_probs = now.iter().enumerate().map(|(at, lp)| lp + offsets[(number + at) % 4]).collect();
            row.advantages = vec![if number % 2 == 0 { 1.0 } else { -0.7 }; len];
            row
        })
        .collect()
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
    let budget = 30;
    let (gradients, sums) = accumulate(&decoder, &weights, &rows, &loss, budget);
    assert!(sums.clipped > 0 && sums.clipped < sums.trained, "the clip takes part: {sums:?}");
    let loss_at = |weights: &Weights| accumulate(&decoder, weights, &rows, &loss, budget).1.loss;
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for (slot, (gradient, spec)) in gradients.iter().zip(&decoder.layout.tensors).enumerate() {
        let random: Vec<f32> = (0..spec.shape.iter().product()).map(|_| rng.random::<f32>() - 0.5).collect();
        let random = Tensor::from_data(TensorData::new(random, spec.matrix()), &weights.device());
        for direction in [gradient.clone(), random] {
            let length = inner(&direction, &direction).sqrt();
            let direction = direction.div_scalar(length);
            let expected = inner(gradient, &direction);
            let ahead = loss_at(&moved(&weights, slot, &direction, STEP));
            let behind = loss_at(&moved(&weights, slot, &direction, -STEP));
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
