//! Causal softmax over attention scores: row r of a matrix stands at position r mod `len` and may look at the columns up to
//! there, or the last few of them where there is a window; the rest become 0.
//!
//! The modulus is there because the query heads that share a key head are stacked: `len` queries of the first head, then
//! `len` of the second, all against the same `len` keys.

use rayon::prelude::*;

use super::{Attention, rows_per_block, simd};

/// Replaces each row of scores (length `len`) by softmax(scores · scale) over the columns it may see.
pub(crate) fn causal(scores: &mut [f32], len: usize, attention: Attention) {
    suffix(scores, len, len, attention);
}

/// The same where only the last `queries` of the `len` positions ask: row r stands at position len − queries + r mod `queries`.
pub(crate) fn suffix(scores: &mut [f32], len: usize, queries: usize, attention: Attention) {
    let known = len - queries;
    let rows = rows_per_block(len);
    scores.par_chunks_mut(rows * len).enumerate().for_each(|(block, scores)| {
        simd::vectorised(
            #[inline(always)]
            || {
                for (row, scores) in scores.chunks_exact_mut(len).enumerate() {
                    let position = known + (block * rows + row) % queries;
                    let (past, seen, future) = parts(scores, position, attention);
                    let peak = simd::max(seen);
                    let inverse = 1.0 / simd::exp_in_place(seen, peak, attention.scale);
                    seen.iter_mut().for_each(|p| *p *= inverse);
                    past.fill(0.0);
                    future.fill(0.0);
                }
            },
        );
    });
}

/// Replaces `grad` = ∂L/∂p by ∂L/∂scores = p · (∂L/∂p − Σ p·∂L/∂p) · scale.
pub(crate) fn causal_backward(probs: &[f32], len: usize, attention: Attention, grad: &mut [f32]) {
    let rows = rows_per_block(len);
    grad.par_chunks_mut(rows * len).zip(probs.par_chunks(rows * len)).enumerate().for_each(|(block, (grad, probs))| {
        simd::vectorised(
            #[inline(always)]
            || {
                for (row, (grad, probs)) in grad.chunks_exact_mut(len).zip(probs.chunks_exact(len)).enumerate() {
                    let (past, seen, future) = parts(grad, (block * rows + row) % len, attention);
                    let probs = &probs[past.len()..past.len() + seen.len()];
                    let inner = simd::dot(probs, seen);
                    for (g, p) in seen.iter_mut().zip(probs) {
                        *g = p * (*g - inner) * attention.scale;
                    }
                    past.fill(0.0);
                    future.fill(0.0);
                }
            },
        );
    });
}

/// A row split into what lies before the window of the query at `position`, what it sees, and what comes after it.
#[inline(always)]
fn parts(row: &mut [f32], position: usize, attention: Attention) -> (&mut [f32], &mut [f32], &mut [f32]) {
    let (until, future) = row.split_at_mut(position + 1);
    let (past, seen) = until.split_at_mut(attention.first_seen(position));
    (past, seen, future)
}
