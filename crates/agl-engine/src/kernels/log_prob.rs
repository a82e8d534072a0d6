//! Log-probabilities of given tokens from rows of logits, and the gradient back to the logits.

use rayon::prelude::*;

use super::{rows_per_block, simd};

/// What one row of logits says about its target token, at the given temperature.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct TokenStats {
    /// log p(target) = z_target − log Σ e^z, z = logit / temperature.
    pub log_prob: f32,
    /// log Σ e^z.
    pub log_sum_exp: f32,
    /// −Σ p log p.
    pub entropy: f32,
}

/// One [`TokenStats`] per row of `logits` (rows of `vocab`).
pub(crate) fn stats(logits: &[f32], vocab: usize, targets: &[u32], inverse_temperature: f32) -> Vec<TokenStats> {
    logits
        .par_chunks(vocab)
        .zip(targets.par_iter())
        .with_min_len(rows_per_block(vocab))
        .map(|(row, target)| {
            simd::vectorised(
                #[inline(always)]
                || {
                    let peak = simd::max(row);
                    // Σ e^(z−m) and Σ (z−m)·e^(z−m) in one pass: H = log Σ e^(z−m) − Σ p·(z−m).
                    let (sum, weighted) = exp_sums(row, peak, inverse_temperature);
                    let log_sum = sum.ln();
                    let log_sum_exp = peak * inverse_temperature + log_sum;
                    TokenStats {
                        log_prob: (row[*target as usize] - peak) * inverse_temperature - log_sum,
                        log_sum_exp,
                        entropy: log_sum - weighted / sum,
                    }
                },
            )
        })
        .collect()
}

#[inline(always)]
fn exp_sums(row: &[f32], peak: f32, scale: f32) -> (f32, f32) {
    const LANES: usize = 32;
    let mut sum = [0.0f32; LANES];
    let mut weighted = [0.0f32; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for x in chunks {
        for i in 0..LANES {
            let z = (x[i] - peak) * scale;
            let e = simd::exp(z);
            sum[i] += e;
            weighted[i] += e * z;
        }
    }
    for (i, x) in rest.iter().enumerate() {
        let z = (*x - peak) * scale;
        let e = simd::exp(z);
        sum[i] += e;
        weighted[i] += e * z;
    }
    (sum.iter().sum(), weighted.iter().sum())
}

/// ∂L/∂(log-probability of the target) and ∂L/∂(entropy) of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct TokenGradient {
    pub log_prob: f32,
    pub entropy: f32,
}

/// Replaces `logits` by ∂L/∂logits, the stats being those of the same rows.
///
/// ∂ log p_t / ∂z_j = 1[j = t] − p_j and ∂H / ∂z_j = −p_j (log p_j + H).
pub(crate) fn gradient(
    logits: &mut [f32],
    vocab: usize,
    targets: &[u32],
    stats: &[TokenStats],
    gradients: &[TokenGradient],
    inverse_temperature: f32,
) {
    logits
        .par_chunks_mut(vocab)
        .zip(targets.par_iter().zip(stats.par_iter().zip(gradients.par_iter())))
        .with_min_len(rows_per_block(vocab))
        .for_each(|(row, (target, (stats, gradient)))| {
            let by_log_prob = gradient.log_prob * inverse_temperature;
            let by_entropy = gradient.entropy * inverse_temperature;
            if by_log_prob == 0.0 && by_entropy == 0.0 {
                row.fill(0.0);
                return;
            }
            simd::vectorised(
                #[inline(always)]
                || {
                    for x in row.iter_mut() {
                        let log_p = *x * inverse_temperature - stats.log_sum_exp;
                        let p = simd::exp(log_p);
                        *x = -p * (by_log_prob + by_entropy * (log_p + stats.entropy));
                    }
                },
            );
            row[*target as usize] += by_log_prob;
        });
}

/// Replaces each logit by e^((logit − peak) · inverse temperature); answers the peak and the sum of the results.
pub(crate) fn exponentials(logits: &mut [f32], inverse_temperature: f32) -> (f32, f32) {
    simd::vectorised(
        #[inline(always)]
        || {
            let peak = simd::max(logits);
            (peak, simd::exp_in_place(logits, peak, inverse_temperature))
        },
    )
}
