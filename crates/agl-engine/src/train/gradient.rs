//! Rows to one gradient and its statistics.

use burn::tensor::Tensor;

use super::head;
use super::loss::{TokenLoss, needs_whole_rows, share_row_ratio, token_loss};
use super::rows::{MaskedRow, TrainRow, micro_batches, padded};
use crate::config::LossConfig;
use crate::kernels::log_prob::{TokenGradient, TokenStats};
use crate::model::forward::{Decoder, index};
use crate::model::weights::Weights;

/// Sums over the trained tokens of an update.
#[derive(Clone, Debug, Default)]
pub(crate) struct TokenSums {
    pub loss: f64,
    pub trained: usize,
    pub clipped: usize,
    pub bounded: usize,
    /// Σ (r − 1 − log r), the k3 estimator of KL(π_old ‖ π).
    pub kl: f64,
    pub ratio: f64,
    pub ratio_square: f64,
    pub ratio_max: f64,
    pub ref_kl: f64,
    pub entropy: f64,
}

impl TokenSums {
    fn add(&mut self, token: &TokenLoss, stats: TokenStats) {
        self.loss += token.loss;
        self.trained += 1;
        self.clipped += usize::from(token.clipped);
        self.bounded += usize::from(token.bounded);
        self.kl += token.ratio - 1.0 - token.ratio.ln();
        self.ratio += token.ratio;
        self.ratio_square += token.ratio * token.ratio;
        self.ratio_max = self.ratio_max.max(token.ratio);
        self.ref_kl += token.ref_kl;
        self.entropy += f64::from(stats.entropy);
    }
}

/// ∂L/∂parameter for every parameter, in the order of the layout, with the sums.
pub(crate) fn accumulate(
    decoder: &Decoder,
    weights: &Weights,
    rows: &[TrainRow],
    loss: &LossConfig,
    micro_batch_tokens: usize,
) -> (Vec<Tensor<2>>, TokenSums) {
    // A row without a trained token would cost a pass and change nothing.
    let lengths: Vec<usize> = rows.iter().map(trained_length).collect();
    accumulate_groups(decoder, weights, rows, loss, &micro_batches(&lengths, micro_batch_tokens))
}

/// Up to the last trained token: what follows it changes nothing.
fn trained_length(row: &TrainRow) -> usize {
    row.trained().last().map_or(0, |last| last + 1)
}

/// [`accumulate`] with the micro-batches given, as indexes of rows that have trained tokens. The sums do not depend on them but
/// for rounding: weights are normalised over the whole update, and a row is never divided.
pub(super) fn accumulate_groups(
    decoder: &Decoder,
    weights: &Weights,
    rows: &[TrainRow],
    loss: &LossConfig,
    groups: &[Vec<usize>],
) -> (Vec<Tensor<2>>, TokenSums) {
    let mut total: Vec<Option<Tensor<2>>> = vec![None; weights.tensors.len()];
    let mut sums = TokenSums::default();
    for group in groups {
        let batch: Vec<(&TrainRow, usize)> =
            group.iter().map(|row| (&rows[*row], trained_length(&rows[*row]))).collect();
        micro_batch(decoder, weights, &batch, loss, &mut total, &mut sums);
    }
    let gradients = total.into_iter().zip(&weights.tensors).map(|(g, w)| g.unwrap_or_else(|| w.zeros_like())).collect();
    (gradients, sums)
}

fn micro_batch(
    decoder: &Decoder,
    weights: &Weights,
    batch: &[(&TrainRow, usize)],
    loss: &LossConfig,
    total: &mut [Option<Tensor<2>>],
    sums: &mut TokenSums,
) {
    let ids: Vec<&[u32]> = batch.iter().map(|(row, len)| &row.ids[..*len]).collect();
    let (ids, len) = padded(&ids);
    // The state at position t − 1 predicts the token at t.
    let mut sources = Vec::new();
    let mut targets = Vec::new();
    let mut tokens = Vec::new();
    for (i, (row, _)) in batch.iter().enumerate() {
        for at in row.trained() {
            sources.push((i * len + at - 1) as u32);
            targets.push(row.ids[at]);
            tokens.push(row.token(at));
        }
    }
    let tracked = weights.tracked();
    let hidden =
        decoder.padded(&tracked, &ids, batch.len(), len, |_, _| {}).select(0, index(&sources, &weights.device()));
    let states = hidden.clone().inner();
    if needs_whole_rows(loss) {
        // Once through the output layer for the ratios of the rows, before the first slope is asked for.
        let mut now = head::forward(decoder, weights, &states, &targets, loss.temperature).into_iter();
        let mut rest = tokens.as_mut_slice();
        for (row, _) in batch {
            let (own, others) = rest.split_at_mut(row.trained().count());
            share_row_ratio(own, now.by_ref().take(own.len()).map(|stats| f64::from(stats.log_prob)));
            rest = others;
        }
    }
    let head = head::forward_backward(decoder, weights, &states, &targets, loss.temperature, |i, stats| {
        let token = token_loss(f64::from(stats.log_prob), tokens[i], loss);
        let bonus = loss.entropy_coeff * tokens[i].weight;
        sums.add(&TokenLoss { loss: token.loss - bonus * f64::from(stats.entropy), ..token }, stats);
        TokenGradient { log_prob: token.slope as f32, entropy: -bonus as f32 }
    });
    // The gradient of Σ hidden · g with respect to hidden is g: this enters the graph with ∂L/∂hidden.
    let mut grads = (hidden * head.hidden.autodiff()).sum().backward();
    for (sum, leaf) in total.iter_mut().zip(&tracked.tensors) {
        if let Some(grad) = leaf.grad_remove(&mut grads) {
            add(sum, grad);
        }
    }
    add(&mut total[decoder.layout.lm_head], head.matrix);
}

fn add(sum: &mut Option<Tensor<2>>, part: Tensor<2>) {
    *sum = Some(match sum.take() {
        Some(sum) => sum + part,
        None => part,
    });
}

/// log π of the tokens asked for given what precedes them (0 elsewhere), without a gradient.
pub(crate) fn log_probs(
    decoder: &Decoder,
    weights: &Weights,
    rows: &[MaskedRow],
    temperature: f32,
    micro_batch_tokens: usize,
) -> Vec<Vec<f32>> {
    let mut result: Vec<Vec<f32>> = rows.iter().map(|row| vec![0.0; row.ids.len()]).collect();
    let lengths: Vec<usize> = rows.iter().map(|row| row.asked().last().map_or(0, |last| last + 1)).collect();
    for group in micro_batches(&lengths, micro_batch_tokens) {
        let batch: Vec<&[u32]> = group.iter().map(|row| &rows[*row].ids[..lengths[*row]]).collect();
        let (ids, len) = padded(&batch);
        let mut sources = Vec::new();
        let mut targets = Vec::new();
        for (i, row) in group.iter().enumerate() {
            sources.extend(rows[*row].asked().map(|at| (i * len + at - 1) as u32));
            targets.extend(rows[*row].asked().map(|at| rows[*row].ids[at]));
        }
        let hidden =
            decoder.padded(weights, &ids, batch.len(), len, |_, _| {}).select(0, index(&sources, &weights.device()));
        let mut stats = head::forward(decoder, weights, &hidden, &targets, temperature).into_iter();
        for row in &group {
            for (at, stats) in rows[*row].asked().zip(&mut stats) {
                result[*row][at] = stats.log_prob;
            }
        }
    }
    result
}
