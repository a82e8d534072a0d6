//! Prompts whose beginning is in the cache already: only what follows is processed.

use burn::tensor::Tensor;

use super::cache::KvCache;
use super::forward::{Decoder, Projections, index};
use super::weights::Weights;
use crate::kernels::cached_attention::CachedSequence;
use crate::ops::inference::{CacheSpan, cached_attention, suffix_softmax};

/// From so many products of a query with a key on, matrices are faster than one query at a time.
const MATRIX_FROM: usize = 8192;
/// Fewer queries than this are no matrix.
const MATRIX_ROWS: usize = 8;
/// Queries per matrix: bounds the scores held at once, [heads · queries, length].
const QUERIES_PER_MATRIX: usize = 256;

/// The part of a prompt that is not in the cache: `ids`, at least one, stand at position `start` and after.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Suffix<'a> {
    pub slot: usize,
    pub start: usize,
    pub ids: &'a [u32],
}

impl Suffix<'_> {
    fn end(&self) -> usize {
        self.start + self.ids.len()
    }

    fn is_matrix(&self) -> bool {
        self.ids.len() >= MATRIX_ROWS && self.ids.len() * self.end() >= MATRIX_FROM
    }
}

impl KvCache {
    /// Processes suffixes, each attending to what its slot holds before it, and answers the final hidden state
    /// [suffixes, hidden] of each one's last token.
    pub(crate) fn extend(&mut self, decoder: &Decoder, weights: &Weights, suffixes: &[Suffix<'_>]) -> Tensor<2> {
        self.reserve(suffixes.iter().map(Suffix::end).max().unwrap_or(0));
        // Those attended one query at a time come first, so that they are one block of rows.
        let (matrices, singles): (Vec<usize>, Vec<usize>) =
            (0..suffixes.len()).partition(|number| suffixes[*number].is_matrix());
        let (mut ids, mut positions, mut spans) = (Vec::new(), Vec::new(), Vec::new());
        let mut last = vec![0; suffixes.len()];
        for number in singles.iter().chain(&matrices).copied() {
            let suffix = suffixes[number];
            spans.push(CacheSpan { row: ids.len(), len: suffix.ids.len(), slot: suffix.slot, start: suffix.start });
            ids.extend_from_slice(suffix.ids);
            positions.extend(suffix.start..suffix.end());
            last[number] = (ids.len() - 1) as u32;
        }
        let (single_spans, matrix_spans) = spans.split_at(singles.len());
        let queries: Vec<CachedSequence> = single_spans
            .iter()
            .flat_map(|span| (1..=span.len).map(|seen| CachedSequence { slot: span.slot, len: span.start + seen }))
            .collect();
        let hidden = decoder.hidden_states(weights, &ids, &positions, |layer, p| {
            self.write(layer, &p, &spans);
            let mut parts = Vec::new();
            if !queries.is_empty() {
                let (keys, values) = self.layer(layer);
                parts.push(cached_attention(rows(&p, 0, queries.len()), keys, values, queries.clone()));
            }
            parts.extend(matrix_spans.iter().flat_map(|span| self.suffix_attention(layer, &p, span)));
            if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 0) }
        });
        hidden.select(0, index(&last, &weights.device()))
    }

    /// Attention [queries, heads · d] of a suffix's rows over its slot, in blocks of rows.
    fn suffix_attention(&mut self, layer: usize, p: &Projections, span: &CacheSpan) -> Vec<Tensor<2>> {
        let (kv, d) = self.heads();
        let group = p.query.dims()[1] / (kv * d);
        let scale = 1.0 / (d as f32).sqrt();
        let (keys, values) = self.layer(layer);
        let block = |first: usize| {
            let count = QUERIES_PER_MATRIX.min(span.len - first);
            let len = span.start + first + count;
            // As in training: the query heads that share a key head are stacked into one matrix.
            let query = rows(p, span.row + first, count)
                .reshape([1, count, kv, group, d])
                .permute([0, 2, 3, 1, 4])
                .reshape([1, kv, group * count, d]);
            let key = keys.clone().slice([span.slot..span.slot + 1, 0..kv, 0..d, 0..len]);
            let value = values.clone().slice([span.slot..span.slot + 1, 0..kv, 0..len, 0..d]);
            let mixed: Tensor<4> = suffix_softmax(query.matmul(key), count, scale).matmul(value);
            mixed.reshape([1, kv, group, count, d]).permute([0, 3, 1, 2, 4]).reshape([count, kv * group * d])
        };
        (0..span.len).step_by(QUERIES_PER_MATRIX).map(block).collect()
    }
}

/// The queries of `count` rows from `first` on.
fn rows(p: &Projections, first: usize, count: usize) -> Tensor<2> {
    let width = p.query.dims()[1];
    p.query.clone().slice([first..first + count, 0..width])
}
