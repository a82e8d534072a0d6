//! Prompts whose beginning is in the cache already: only what follows is processed.

use burn::tensor::Tensor;

use super::cache::KvCache;
use super::forward::{Decoder, Projections, index};
use super::weights::Weights;
use crate::kernels::Attention;
use crate::ops::inference::{CacheSpan, suffix_softmax};

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
}

impl KvCache {
    /// Processes suffixes, each attending to what its slot holds before it, and answers the final hidden state
    /// [suffixes, hidden] of each one's last token.
    pub(crate) fn extend(&mut self, decoder: &Decoder, weights: &Weights, suffixes: &[Suffix<'_>]) -> Tensor<2> {
        self.reserve(suffixes.iter().map(Suffix::end).max().unwrap_or(0));
        let (mut ids, mut positions, mut spans) = (Vec::new(), Vec::new(), Vec::new());
        for suffix in suffixes {
            spans.push(CacheSpan { row: ids.len(), len: suffix.ids.len(), slot: suffix.slot, start: suffix.start });
            ids.extend_from_slice(suffix.ids);
            positions.extend(suffix.start..suffix.end());
        }
        let hidden = decoder.hidden_states(weights, &ids, &positions, |layer, p| {
            self.write(layer, &p, &spans);
            let attention = decoder.attention(layer);
            Tensor::cat(spans.iter().flat_map(|span| self.suffix_attention(layer, &p, span, attention)).collect(), 0)
        });
        let last: Vec<u32> = spans.iter().map(|span| (span.row + span.len - 1) as u32).collect();
        hidden.select(0, index(&last, &weights.device()))
    }

    /// Attention [queries, heads · d] of a suffix's rows over its slot, in blocks of rows.
    fn suffix_attention(
        &mut self,
        layer: usize,
        p: &Projections,
        span: &CacheSpan,
        attention: Attention,
    ) -> Vec<Tensor<2>> {
        let (kv, d) = self.heads();
        let group = p.query.dims()[1] / (kv * d);
        let (keys, values) = self.layer(layer);
        let block = |first: usize| {
            let count = QUERIES_PER_MATRIX.min(span.len - first);
            let len = span.start + first + count;
            // As in training: the query heads that share a key head are stacked into one matrix.
            let row = span.row + first;
            let query = p
                .query
                .clone()
                .slice([row..row + count, 0..kv * group * d])
                .reshape([1, count, kv, group, d])
                .permute([0, 2, 3, 1, 4])
                .reshape([1, kv, group * count, d]);
            let key = keys.clone().slice([span.slot..span.slot + 1, 0..kv, 0..d, 0..len]);
            let value = values.clone().slice([span.slot..span.slot + 1, 0..kv, 0..len, 0..d]);
            let mixed: Tensor<4> = suffix_softmax(query.matmul(key), count, attention).matmul(value);
            mixed.reshape([1, kv, group, count, d]).permute([0, 3, 1, 2, 4]).reshape([count, kv * group * d])
        };
        (0..span.len).step_by(QUERIES_PER_MATRIX).map(block).collect()
    }
}
