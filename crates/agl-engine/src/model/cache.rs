//! Keys and values of the sequences being decoded, and of finished ones that later prompts may begin with.

use burn::tensor::{Device, Tensor};

use super::config::ModelConfig;
use super::forward::{Decoder, Projections};
use super::weights::Weights;
use crate::kernels::cached_attention::{CacheKind, CachedSequence};
use crate::ops::inference::{CacheCopy, CacheSpan, cached_attention, copy_cache, write_cache};

/// Positions are added in steps of this many, so that a short sequence never pays for a long one's room.
const POSITION_STEP: usize = 64;

/// One slot per sequence; grows with the number of sequences and with the longest one.
#[derive(Debug)]
pub(crate) struct KvCache {
    layers: Vec<Layer>,
    kv_heads: usize,
    head_dim: usize,
    slots: usize,
    capacity: usize,
    free: Vec<usize>,
    device: Device,
}

#[derive(Debug)]
struct Layer {
    keys: Option<Tensor<4>>,
    values: Option<Tensor<4>>,
}

/// A prompt to be processed into a slot.
pub(crate) struct Prompt<'a> {
    pub slot: usize,
    pub ids: &'a [u32],
}

/// The next token of a running sequence: `id` stands at `position`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub slot: usize,
    pub id: u32,
    pub position: usize,
}

impl KvCache {
    pub(crate) fn new(config: &ModelConfig, device: Device) -> Self {
        let layers = config.plans.iter().map(|_| Layer { keys: None, values: None }).collect();
        let (kv_heads, head_dim) = (config.kv_heads, config.head_dim);
        Self { layers, kv_heads, head_dim, slots: 0, capacity: 0, free: Vec::new(), device }
    }

    /// A slot for a new sequence, made if none is free; the caller never holds more than `most`.
    pub(crate) fn take_slot(&mut self, most: usize) -> usize {
        if let Some(slot) = self.free.pop() {
            return slot;
        }
        let slots = (self.slots * 2).max(8).min(most).max(self.slots + 1);
        let first = self.slots;
        self.resize(slots, self.capacity);
        // The lowest numbers are handed out first.
        self.free.extend((first + 1..slots).rev());
        first
    }

    /// Gives a slot back. When the last one returns, all memory does.
    pub(crate) fn release(&mut self, slot: usize) {
        self.free.push(slot);
        if self.free.len() == self.slots {
            for layer in &mut self.layers {
                *layer = Layer { keys: None, values: None };
            }
            (self.slots, self.capacity) = (0, 0);
            self.free.clear();
        }
    }

    /// Gives slot `to` the first `len` positions of slot `from`.
    pub(crate) fn copy(&mut self, from: usize, to: usize, len: usize) {
        for layer in &mut self.layers {
            for kind in [CacheKind::Keys, CacheKind::Values] {
                let cache = layer.of(kind);
                *cache = cache.take().map(|whole| copy_cache(whole, kind, CacheCopy { from, to, len }));
            }
        }
    }

    /// Positions that every slot has room for once it has room for `len`.
    pub(crate) fn capacity_for(&self, len: usize) -> usize {
        // A quarter more than asked, so that copying stays a small part of decoding.
        if len > self.capacity { (len + len / 4).div_ceil(POSITION_STEP) * POSITION_STEP } else { self.capacity }
    }

    /// What a position of one slot takes up, over all layers.
    pub(crate) fn bytes_per_token(&self) -> usize {
        self.layers.len() * 2 * self.kv_heads * self.head_dim * size_of::<f32>()
    }

    /// Key heads and their size.
    pub(super) fn heads(&self) -> (usize, usize) {
        (self.kv_heads, self.head_dim)
    }

    /// Processes prompts into their slots and answers the final hidden state [prompts, hidden] of each one's last token.
    pub(crate) fn prefill(&mut self, decoder: &Decoder, weights: &Weights, prompts: &[Prompt<'_>]) -> Tensor<2> {
        let len = prompts.iter().map(|p| p.ids.len()).max().unwrap_or(0);
        self.reserve(len);
        let mut ids = vec![0; prompts.len() * len];
        for (row, prompt) in ids.chunks_exact_mut(len).zip(prompts) {
            row[..prompt.ids.len()].copy_from_slice(prompt.ids);
        }
        let spans: Vec<CacheSpan> = prompts
            .iter()
            .enumerate()
            .map(|(i, p)| CacheSpan { row: i * len, len: p.ids.len(), slot: p.slot, start: 0 })
            .collect();
        let hidden = decoder.padded(weights, &ids, prompts.len(), len, |layer, p| self.write(layer, p, &spans));
        let last: Vec<u32> = spans.iter().map(|s| (s.row + s.len - 1) as u32).collect();
        hidden.select(0, super::forward::index(&last, &self.device))
    }

    /// Advances every sequence by one token and answers its final hidden state [steps, hidden].
    pub(crate) fn step(&mut self, decoder: &Decoder, weights: &Weights, steps: &[Step]) -> Tensor<2> {
        self.reserve(steps.iter().map(|s| s.position + 1).max().unwrap_or(0));
        let ids: Vec<u32> = steps.iter().map(|s| s.id).collect();
        let positions: Vec<usize> = steps.iter().map(|s| s.position).collect();
        let spans: Vec<CacheSpan> = steps
            .iter()
            .enumerate()
            .map(|(row, s)| CacheSpan { row, len: 1, slot: s.slot, start: s.position })
            .collect();
        let sequences: Vec<CachedSequence> =
            steps.iter().map(|s| CachedSequence { slot: s.slot, len: s.position + 1 }).collect();
        decoder.hidden_states(weights, &ids, &positions, |layer, p| {
            self.write(layer, &p, &spans);
            let (keys, values) = self.layer(layer);
            cached_attention(p.query, keys, values, sequences.clone(), decoder.attention(layer))
        })
    }

    pub(super) fn write(&mut self, layer: usize, p: &Projections, spans: &[CacheSpan]) {
        for (kind, new) in [(CacheKind::Keys, &p.key), (CacheKind::Values, &p.value)] {
            let shape = self.shape(kind);
            let cache = self.layers[layer].of(kind);
            // Taken out, so that it is held once and written in place.
            let whole = cache.take().unwrap_or_else(|| Tensor::zeros(shape, &self.device));
            *cache = Some(write_cache(whole, new.clone(), kind, spans.to_vec()));
        }
    }

    pub(super) fn layer(&mut self, layer: usize) -> (Tensor<4>, Tensor<4>) {
        let whole = |cache: &mut Self, kind: CacheKind| {
            let shape = cache.shape(kind);
            cache.layers[layer].of(kind).clone().unwrap_or_else(|| Tensor::zeros(shape, &cache.device))
        };
        (whole(self, CacheKind::Keys), whole(self, CacheKind::Values))
    }

    fn shape(&self, kind: CacheKind) -> [usize; 4] {
        match kind {
            CacheKind::Keys => [self.slots, self.kv_heads, self.head_dim, self.capacity],
            CacheKind::Values => [self.slots, self.kv_heads, self.capacity, self.head_dim],
        }
    }

    /// Makes room for positions 0 .. len.
    pub(super) fn reserve(&mut self, len: usize) {
        let capacity = self.capacity_for(len);
        if capacity > self.capacity {
            self.resize(self.slots, capacity);
        }
    }

    fn resize(&mut self, slots: usize, capacity: usize) {
        let kinds = [CacheKind::Keys, CacheKind::Values];
        let regions = kinds.map(|kind| self.shape(kind).map(|len| 0..len));
        (self.slots, self.capacity) = (slots, capacity);
        for (kind, region) in kinds.into_iter().zip(regions) {
            let shape = self.shape(kind);
            for layer in &mut self.layers {
                let cache = layer.of(kind);
                if let Some(old) = cache.take() {
                    *cache = Some(Tensor::zeros(shape, &self.device).slice_assign(region.clone(), old));
                }
            }
        }
    }
}

impl Layer {
    fn of(&mut self, kind: CacheKind) -> &mut Option<Tensor<4>> {
        match kind {
            CacheKind::Keys => &mut self.keys,
            CacheKind::Values => &mut self.values,
        }
    }
}
