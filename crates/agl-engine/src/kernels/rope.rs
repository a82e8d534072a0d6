//! Rotary position embedding in the half-split layout of Hugging Face: element i of a head is paired with i + d/2.

use rayon::prelude::*;

use super::{rows_per_block, simd};

/// Rotates each row of `x` (heads × d) by the angles of its row in `cos` and `sin` (d/2 each); `direction` −1 rotates back.
pub(crate) fn rotate(
    x: &[f32],
    cos: &[f32],
    sin: &[f32],
    row_len: usize,
    half: usize,
    direction: f32,
    out: &mut [f32],
) {
    let rows = rows_per_block(row_len);
    out.par_chunks_mut(rows * row_len)
        .zip(x.par_chunks(rows * row_len))
        .zip(cos.par_chunks(rows * half).zip(sin.par_chunks(rows * half)))
        .for_each(|((out, x), (cos, sin))| {
            simd::vectorised(
                #[inline(always)]
                || {
                    for (row, (out, x)) in out.chunks_exact_mut(row_len).zip(x.chunks_exact(row_len)).enumerate() {
                        let cos = &cos[row * half..(row + 1) * half];
                        let sin = &sin[row * half..(row + 1) * half];
                        for (out, x) in out.chunks_exact_mut(2 * half).zip(x.chunks_exact(2 * half)) {
                            let (low, high) = x.split_at(half);
                            let (out_low, out_high) = out.split_at_mut(half);
                            for i in 0..half {
                                let s = sin[i] * direction;
                                out_low[i] = low[i] * cos[i] - high[i] * s;
                                out_high[i] = high[i] * cos[i] + low[i] * s;
                            }
                        }
                    }
                },
            );
        });
}
