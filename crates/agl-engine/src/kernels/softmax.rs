//! Causal softmax over attention scores: row r of a matrix may look at columns 0 ..= r mod `len`, the rest become 0.
//!
//! The modulus is there because the query heads that share a key head are stacked: `len` queries of the first head, then
//! `len` of the second, all against the same `len` keys.

use rayon::prelude::*;

use super::{rows_per_block, simd};

/// Replaces each row of scores (length `len`) by softmax(scores · scale) over the columns it may see.
pub(crate) fn causal(scores: &mut [f32], len: usize, scale: f32) {
    suffix(scores, len, len, scale);
}

/// The same where only the last `queries` of the `len` positions ask: row r may look at columns 0 ..= len − queries + r mod
/// `queries`.
pub(crate) fn suffix(scores: &mut [f32], len: usize, queries: usize, scale: f32) {
    let known = len - queries;
    let rows = rows_per_block(len);
    scores.par_chunks_mut(rows * len).enumerate().for_each(|(block, scores)| {
        simd::vectorised(
            #[inline(always)]
            || {
                for (row, scores) in scores.chunks_exact_mut(len).enumerate() {
                    let (seen, hidden) = scores.split_at_mut(known + (block * rows + row) % queries + 1);
                    let peak = simd::max(seen);
                    let inverse = 1.0 / simd::exp_in_place(seen, peak, scale);
                    seen.iter_mut().for_each(|p| *p *= inverse);
                    hidden.fill(0.0);
                }
            },
        );
    });
}

/// Replaces `grad` = ∂L/∂p by ∂L/∂scores = p · (∂L/∂p − Σ p·∂L/∂p) · scale.
pub(crate) fn causal_backward(probs: &[f32], len: usize, scale: f32, grad: &mut [f32]) {
    let rows = rows_per_block(len);
    grad.par_chunks_mut(rows * len).zip(probs.par_chunks(rows * len)).enumerate().for_each(|(block, (grad, probs))| {
        simd::vectorised(
            #[inline(always)]
            || {
                for (row, (grad, probs)) in grad.chunks_exact_mut(len).zip(probs.chunks_exact(len)).enumerate() {
                    let limit = (block * rows + row) % len + 1;
                    let (seen, hidden) = grad.split_at_mut(limit);
                    let probs = &probs[..limit];
                    let inner = simd::dot(probs, seen);
                    for (g, p) in seen.iter_mut().zip(probs) {
                        *g = p * (*g - inner) * scale;
                    }
                    hidden.fill(0.0);
                }
            },
        );
    });
}
