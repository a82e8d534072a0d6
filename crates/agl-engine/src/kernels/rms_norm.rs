//! Root-mean-square normalisation: y = w · x / √(mean(x²) + ε), over rows of the length of `w`.

use rayon::prelude::*;

use super::{rows_per_block, simd};

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (simd::dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// Writes y for every row of `x` into `out`.
pub(crate) fn forward(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let n = weight.len();
    let block = rows_per_block(n) * n;
    out.par_chunks_mut(block).zip(x.par_chunks(block)).for_each(|(out, x)| {
        simd::vectorised(
            #[inline(always)]
            || {
                for (out, x) in out.chunks_exact_mut(n).zip(x.chunks_exact(n)) {
                    let r = inverse_rms(x, eps);
                    for i in 0..n {
                        out[i] = x[i] * r * weight[i];
                    }
                }
            },
        );
    });
}

/// Writes ∂L/∂x into `grad_x` and returns ∂L/∂w, given ∂L/∂y.
///
/// With x̂ = x·r and g = ∂L/∂y · w: ∂L/∂x = r (g − x̂ · mean(g·x̂)), ∂L/∂w = Σ_rows ∂L/∂y · x̂.
pub(crate) fn backward(x: &[f32], weight: &[f32], grad: &[f32], eps: f32, grad_x: &mut [f32]) -> Vec<f32> {
    let n = weight.len();
    let block = rows_per_block(n) * n;
    let partial: Vec<Vec<f32>> = grad_x
        .par_chunks_mut(block)
        .zip(x.par_chunks(block).zip(grad.par_chunks(block)))
        .map(|(grad_x, (x, grad))| {
            let mut grad_w = vec![0.0; n];
            simd::vectorised(
                #[inline(always)]
                || {
                    for ((dx, x), g) in grad_x.chunks_exact_mut(n).zip(x.chunks_exact(n)).zip(grad.chunks_exact(n)) {
                        let r = inverse_rms(x, eps);
                        for i in 0..n {
                            dx[i] = g[i] * weight[i];
                        }
                        let mean = simd::dot(dx, x) * r / n as f32;
                        for i in 0..n {
                            let normed = x[i] * r;
                            grad_w[i] += g[i] * normed;
                            dx[i] = r * (dx[i] - normed * mean);
                        }
                    }
                },
            );
            grad_w
        })
        .collect();
    let mut total = vec![0.0; n];
    for grad_w in &partial {
        for (sum, part) in total.iter_mut().zip(grad_w) {
            *sum += part;
        }
    }
    total
}
