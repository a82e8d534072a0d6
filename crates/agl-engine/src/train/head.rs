//! The output layer: hidden states to log-probabilities and straight back to gradients, in chunks.
//!
//! A token's loss depends on the logits of its own position only. So each chunk of positions is taken forward and
//! backward before the next begins, outside of the recorded graph, and [tokens × vocab] never exists for all tokens. The
//! graph is then entered with ∂L/∂hidden.

use burn::tensor::Tensor;

use crate::kernels::log_prob::{TokenGradient, TokenStats};
use crate::model::forward::Decoder;
use crate::model::weights::Weights;
use crate::ops::inference::{logit_gradient, token_stats};

/// Logits held at once: 4 MiB of f32, so that a chunk stays in cache between its passes.
const LOGITS_PER_CHUNK: usize = 1 << 20;

fn rows_per_chunk(vocab: usize) -> usize {
    (LOGITS_PER_CHUNK / vocab).clamp(64, 2048)
}

/// What each row's hidden state says about its target token.
pub(super) fn forward(
    decoder: &Decoder,
    weights: &Weights,
    hidden: &Tensor<2>,
    targets: &[u32],
    temperature: f32,
) -> Vec<TokenStats> {
    let mut stats = Vec::with_capacity(targets.len());
    for (start, targets) in chunks(targets, decoder.config.vocab_size) {
        let rows = hidden.clone().narrow(0, start, targets.len());
        stats.extend(token_stats(&decoder.logits(weights, rows), targets, 1.0 / temperature));
    }
    stats
}

/// ∂L/∂hidden [rows, hidden] and ∂L/∂W of the output matrix.
pub(super) struct HeadGradients {
    pub hidden: Tensor<2>,
    pub matrix: Tensor<2>,
}

/// Forward and backward in one go; `slopes(i, stats)` answers the derivative of the loss of row i.
pub(super) fn forward_backward(
    decoder: &Decoder,
    weights: &Weights,
    hidden: &Tensor<2>,
    targets: &[u32],
    temperature: f32,
    mut slopes: impl FnMut(usize, TokenStats) -> TokenGradient,
) -> HeadGradients {
    let matrix = weights.get(decoder.layout.lm_head);
    let mut grad_hidden = Vec::new();
    let mut grad_matrix: Option<Tensor<2>> = None;
    for (start, targets) in chunks(targets, decoder.config.vocab_size) {
        let rows = hidden.clone().narrow(0, start, targets.len());
        let logits = decoder.logits(weights, rows.clone());
        let stats = token_stats(&logits, targets, 1.0 / temperature);
        let gradients = stats.iter().enumerate().map(|(i, stats)| slopes(start + i, *stats)).collect();
        let grad_logits = logit_gradient(logits, targets.to_vec(), stats, gradients, 1.0 / temperature);
        let part = grad_logits.clone().transpose().matmul(rows);
        grad_matrix = Some(match grad_matrix {
            Some(sum) => sum + part,
            None => part,
        });
        grad_hidden.push(grad_logits.matmul(matrix.clone()));
    }
    HeadGradients { hidden: Tensor::cat(grad_hidden, 0), matrix: grad_matrix.unwrap_or_else(|| matrix.zeros_like()) }
}

fn chunks(targets: &[u32], vocab: usize) -> impl Iterator<Item = (usize, &[u32])> {
    let rows = rows_per_chunk(vocab);
    targets.chunks(rows).enumerate().map(move |(i, chunk)| (i * rows, chunk))
}
