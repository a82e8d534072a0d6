//! Attention of one new token per sequence over that sequence's cached keys and values.
//!
//! Keys are cached as [slots, kv_heads, head_dim, capacity] and values as [slots, kv_heads, capacity, head_dim]: either way
//! the innermost loop runs over what is summed last, and no vector is ever reduced to one number.

use rayon::prelude::*;

use super::{Attention, simd};

/// Sizes of a cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheShape {
    pub kv_heads: usize,
    pub capacity: usize,
    pub head_dim: usize,
}

/// Which of the two caches, hence which order of its last dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheKind {
    Keys,
    Values,
}

impl CacheShape {
    fn head_len(&self) -> usize {
        self.capacity * self.head_dim
    }

    fn slot_len(&self) -> usize {
        self.kv_heads * self.head_len()
    }
}

/// Where one sequence of a batch lives: its slot in the cache and how many positions to look at (its own included).
#[derive(Clone, Copy, Debug)]
pub(crate) struct CachedSequence {
    pub slot: usize,
    pub len: usize,
}

/// For each row of `q` (query heads × head_dim): softmax(scale·q·Kᵀ)·V over the first `len` positions of the row's slot, or
/// the last of them that fit into the window.
pub(crate) fn attend(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    shape: CacheShape,
    sequences: &[CachedSequence],
    attention: Attention,
    out: &mut [f32],
) {
    let d = shape.head_dim;
    let row_len = q.len() / sequences.len().max(1);
    let heads = row_len / d;
    let group = heads / shape.kv_heads;
    let first = |sequence: &CachedSequence| attention.first_seen(sequence.len.saturating_sub(1));
    let attend_row = |out: &mut [f32], q: &[f32], sequence: &CachedSequence, scores: &mut Vec<f32>| {
        let first = first(sequence);
        scores.resize(sequence.len - first, 0.0);
        simd::vectorised(
            #[inline(always)]
            || {
                for head in 0..heads {
                    let start = sequence.slot * shape.slot_len() + (head / group) * shape.head_len();
                    let keys = &keys[start..start + shape.head_len()];
                    let values = &values[start + first * d..start + sequence.len * d];
                    let out = &mut out[head * d..(head + 1) * d];
                    products(&q[head * d..(head + 1) * d], keys, shape.capacity, first, scores);
                    let peak = simd::max(scores);
                    let sum = simd::exp_in_place(scores, peak, attention.scale);
                    weighted_sum(scores, values, 1.0 / sum, out);
                }
            },
        );
    };
    // A step over a few short sequences is done before a second thread would have woken up.
    let work: usize = sequences.iter().map(|s| (s.len - first(s)) * row_len).sum();
    if work < 262_144 {
        let mut scores = Vec::new();
        for ((out, q), sequence) in out.chunks_exact_mut(row_len).zip(q.chunks_exact(row_len)).zip(sequences) {
            attend_row(out, q, sequence, &mut scores);
        }
    } else {
        out.par_chunks_exact_mut(row_len)
            .zip(q.par_chunks_exact(row_len))
            .zip(sequences.par_iter())
            .for_each_init(Vec::new, |scores, ((out, q), sequence)| attend_row(out, q, sequence, scores));
    }
}

/// scores[j] = Σᵢ q[i]·keys[i][first + j], keys in rows of `capacity`; four rows per pass over the scores.
#[inline(always)]
fn products(q: &[f32], keys: &[f32], capacity: usize, first: usize, scores: &mut [f32]) {
    let len = scores.len();
    scores.fill(0.0);
    let (q4, q_rest) = q.as_chunks::<4>();
    for (rows, q) in keys.chunks_exact(4 * capacity).zip(q4) {
        let row = |i: usize| &rows[i * capacity + first..i * capacity + first + len];
        let (a, b, c, d) = (row(0), row(1), row(2), row(3));
        for j in 0..len {
            scores[j] += (q[0] * a[j] + q[1] * b[j]) + (q[2] * c[j] + q[3] * d[j]);
        }
    }
    let done = 4 * q4.len();
    for (row, q) in keys[done * capacity..].chunks_exact(capacity).zip(q_rest) {
        for (score, k) in scores.iter_mut().zip(&row[first..]) {
            *score += q * k;
        }
    }
}

/// out = scale · Σⱼ weights[j]·values[j], values in rows of the length of `out`.
#[inline(always)]
fn weighted_sum(weights: &[f32], values: &[f32], scale: f32, out: &mut [f32]) {
    const WIDTH: usize = 32;
    let d = out.len();
    let (blocks, rest) = out.as_chunks_mut::<WIDTH>();
    let whole = blocks.len() * WIDTH;
    for (block, out) in blocks.iter_mut().enumerate() {
        // The sums stay in registers, in two sets so that one addition need not wait for the last.
        let mut even = [0.0f32; WIDTH];
        let mut odd = [0.0f32; WIDTH];
        let at = block * WIDTH;
        let mut pairs = values.chunks_exact(2 * d);
        let (weight_pairs, last_weight) = weights.as_chunks::<2>();
        for (rows, w) in (&mut pairs).zip(weight_pairs) {
            let (a, b) = (&rows[at..at + WIDTH], &rows[d + at..d + at + WIDTH]);
            for i in 0..WIDTH {
                even[i] += w[0] * a[i];
                odd[i] += w[1] * b[i];
            }
        }
        if let [w] = last_weight {
            let row = &values[values.len() - d + at..values.len() - d + at + WIDTH];
            for i in 0..WIDTH {
                even[i] += w * row[i];
            }
        }
        for i in 0..WIDTH {
            out[i] = (even[i] + odd[i]) * scale;
        }
    }
    rest.fill(0.0);
    if !rest.is_empty() {
        for (w, row) in weights.iter().zip(values.chunks_exact(d)) {
            for (out, v) in rest.iter_mut().zip(&row[whole..]) {
                *out += w * v;
            }
        }
        rest.iter_mut().for_each(|out| *out *= scale);
    }
}

/// Copies `len` new positions of one sequence into its slot of a cache, beginning at position `start`.
///
/// `new` holds one row of kv_heads × head_dim per position; rows beyond `len` (padding) are left out.
pub(crate) fn write(cache: &mut [f32], kind: CacheKind, shape: CacheShape, at: (usize, usize, usize), new: &[f32]) {
    let (slot, start, len) = at;
    let d = shape.head_dim;
    let slot = &mut cache[slot * shape.slot_len()..(slot + 1) * shape.slot_len()];
    for (row, position) in new.chunks_exact(shape.kv_heads * d).take(len).zip(start..) {
        for (head, part) in slot.chunks_exact_mut(shape.head_len()).zip(row.chunks_exact(d)) {
            match kind {
                CacheKind::Values => head[position * d..(position + 1) * d].copy_from_slice(part),
                CacheKind::Keys => {
                    for (row, value) in head.chunks_exact_mut(shape.capacity).zip(part) {
                        row[position] = *value;
                    }
                }
            }
        }
    }
}

/// Copies the first `len` positions of slot `from` into slot `to`.
pub(crate) fn copy(cache: &mut [f32], kind: CacheKind, shape: CacheShape, from: usize, to: usize, len: usize) {
    // Runs of numbers that lie together, and how far apart they begin.
    let (run, stride) = match kind {
        CacheKind::Values => (len * shape.head_dim, shape.head_len()),
        CacheKind::Keys => (len, shape.capacity),
    };
    let (from, to) = (from * shape.slot_len(), to * shape.slot_len());
    for offset in (0..shape.slot_len()).step_by(stride) {
        cache.copy_within(from + offset..from + offset + run, to + offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copied_beginning_is_what_writing_it_would_have_made() {
        let shape = CacheShape { kv_heads: 2, capacity: 5, head_dim: 3 };
        let rows: Vec<f32> = (0..4 * 6).map(|i| i as f32).collect();
        for kind in [CacheKind::Keys, CacheKind::Values] {
            let mut copied = vec![-1.0; 3 * shape.slot_len()];
            write(&mut copied, kind, shape, (2, 0, 4), &rows);
            let mut written = copied.clone();
            copy(&mut copied, kind, shape, 2, 0, 3);
            write(&mut written, kind, shape, (0, 0, 3), &rows);
            assert_eq!(copied, written);
        }
    }

    /// Compares with the formula written out, for head sizes on and off the width of a block.
    #[test]
    fn attention_over_the_cache_is_softmax_of_products_times_values() {
        for (d, window) in [(2, None), (6, Some(3)), (32, None), (38, Some(5)), (64, None), (64, Some(2)), (6, Some(9))]
        {
            let attention = Attention { scale: 0.3, window };
            let shape = CacheShape { kv_heads: 2, capacity: 9, head_dim: d };
            let number = |seed: usize| ((seed * 7919 + 13) % 101) as f32 / 50.0 - 1.0;
            let row = |seed: usize| (0..2 * d).map(|i| number(seed * 1000 + i)).collect::<Vec<f32>>();
            let sequences = [CachedSequence { slot: 2, len: 9 }, CachedSequence { slot: 0, len: 4 }];
            let mut keys = vec![f32::NAN; 3 * shape.slot_len()];
            let mut values = keys.clone();
            let (mut all_keys, mut all_values) = (Vec::new(), Vec::new());
            for s in sequences {
                let k: Vec<Vec<f32>> = (0..s.len).map(|j| row(10 * s.slot + j)).collect();
                let v: Vec<Vec<f32>> = (0..s.len).map(|j| row(500 + 10 * s.slot + j)).collect();
                // In two parts, the first followed by padding.
                for (cache, kind, rows) in [(&mut keys, CacheKind::Keys, &k), (&mut values, CacheKind::Values, &v)] {
                    write(cache, kind, shape, (s.slot, 0, 3), &rows.concat());
                    write(cache, kind, shape, (s.slot, 3, s.len - 3), &rows[3..].concat());
                }
                all_keys.push(k);
                all_values.push(v);
            }
            let q: Vec<f32> = (0..2 * 4 * d).map(|i| number(i + 77)).collect();
            let mut out = vec![0.0; q.len()];
            attend(&q, &keys, &values, shape, &sequences, attention, &mut out);
            for (at, found) in out.iter().enumerate() {
                let (s, head, i) = (at / (4 * d), at / d % 4, at % d);
                let kv = head / 2 * d;
                let q = &q[s * 4 * d + head * d..][..d];
                let score = |k: &Vec<f32>| {
                    let product: f64 = (0..d).map(|i| f64::from(q[i] * k[kv + i])).sum();
                    (product * f64::from(attention.scale)).exp()
                };
                let hidden = window.map_or(0, |window| all_keys[s].len().saturating_sub(window));
                let weights: Vec<f64> = all_keys[s].iter().skip(hidden).map(score).collect();
                let total: f64 = weights.iter().sum();
                let seen = weights.iter().zip(&all_values[s][hidden..]);
                let expected: f64 = seen.map(|(w, v)| w / total * f64::from(v[kv + i])).sum();
                assert!(
                    (f64::from(*found) - expected).abs() < 1e-5,
                    "d {d}, window {window:?}: {found} instead of {expected}"
                );
            }
        }
    }
}
