//! The gated activation of the feed-forward block: y = silu(gate) · up, silu(x) = x·σ(x).

use rayon::prelude::*;

use super::simd;

const BLOCK: usize = 16_384;

/// Writes y into `out`.
pub(crate) fn forward(gate: &[f32], up: &[f32], out: &mut [f32]) {
    out.par_chunks_mut(BLOCK).zip(gate.par_chunks(BLOCK).zip(up.par_chunks(BLOCK))).for_each(|(out, (gate, up))| {
        simd::vectorised(
            #[inline(always)]
            || {
                for ((out, g), u) in out.iter_mut().zip(gate).zip(up) {
                    *out = g * simd::sigmoid(*g) * u;
                }
            },
        );
    });
}

/// Writes ∂L/∂gate and ∂L/∂up, given ∂L/∂y. silu′(x) = σ(x)·(1 + x·(1 − σ(x))).
pub(crate) fn backward(gate: &[f32], up: &[f32], grad: &[f32], grad_gate: &mut [f32], grad_up: &mut [f32]) {
    grad_gate
        .par_chunks_mut(BLOCK)
        .zip(grad_up.par_chunks_mut(BLOCK))
        .zip(gate.par_chunks(BLOCK).zip(up.par_chunks(BLOCK)).zip(grad.par_chunks(BLOCK)))
        .for_each(|((grad_gate, grad_up), ((gate, up), grad))| {
            simd::vectorised(
                #[inline(always)]
                || {
                    let inputs = gate.iter().zip(up).zip(grad);
                    for ((dg, du), ((g, u), d)) in grad_gate.iter_mut().zip(grad_up.iter_mut()).zip(inputs) {
                        let s = simd::sigmoid(*g);
                        *du = d * g * s;
                        *dg = d * u * s * (1.0 + g * (1.0 - s));
                    }
                },
            );
        });
}
