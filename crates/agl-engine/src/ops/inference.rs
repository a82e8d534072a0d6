//! Operations of sampling and of the output layer; none of them is differentiated by the graph.

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use crate::kernels::Attention;
use crate::kernels::cached_attention::{CacheKind, CachedSequence};
use crate::kernels::log_prob::{TokenGradient, TokenStats};

/// Dispatched on the backend.
#[backend_extension(Flex)]
pub(crate) trait InferenceOps: Backend {
    /// See [`write_cache`].
    fn write_cache(
        cache: FloatTensor<Self>,
        new: FloatTensor<Self>,
        kind: CacheKind,
        spans: Vec<CacheSpan>,
    ) -> FloatTensor<Self>;
    /// See [`copy_cache`].
    fn copy_cache(cache: FloatTensor<Self>, kind: CacheKind, copy: CacheCopy) -> FloatTensor<Self>;
    /// See [`suffix_softmax`].
    fn suffix_softmax(scores: FloatTensor<Self>, queries: usize, attention: Attention) -> FloatTensor<Self>;
    /// See [`cached_attention`].
    fn cached_attention(
        q: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        sequences: Vec<CachedSequence>,
        attention: Attention,
    ) -> FloatTensor<Self>;
    /// See [`token_stats`]; rows of (log-prob, log Σ e^z, entropy).
    fn token_stats(logits: FloatTensor<Self>, targets: Vec<u32>, inverse_temperature: f32) -> FloatTensor<Self>;
    /// See [`logit_gradient`].
    fn logit_gradient(
        logits: FloatTensor<Self>,
        targets: Vec<u32>,
        stats: Vec<TokenStats>,
        gradients: Vec<TokenGradient>,
        inverse_temperature: f32,
    ) -> FloatTensor<Self>;
}

/// Which rows of a batch of new keys or values go where in the cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheSpan {
    /// First row of the sequence in the batch.
    pub row: usize,
    /// Rows to write.
    pub len: usize,
    /// The sequence's slot.
    pub slot: usize,
    /// Position of the first written row.
    pub start: usize,
}

/// The first positions of one slot that another is to hold too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheCopy {
    /// The slot that holds them.
    pub from: usize,
    /// The slot that is to hold them.
    pub to: usize,
    /// How many positions.
    pub len: usize,
}

/// Copies positions from slot to slot, in place when nothing else holds the cache.
pub(crate) fn copy_cache(cache: Tensor<4>, kind: CacheKind, copy: CacheCopy) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::copy_cache(cache.into_dispatch(), kind, copy))
}

/// softmax(scores · scale) over the last dimension of [1, kv_heads, stacked queries, len], where the `queries` of each head
/// are the last of `len` positions and each sees itself and what stands before it.
pub(crate) fn suffix_softmax(scores: Tensor<4>, queries: usize, attention: Attention) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::suffix_softmax(scores.into_dispatch(), queries, attention))
}

/// Writes rows of `new` [rows, kv_heads · d] into a cache, in place when nothing else holds it.
///
/// A cache of keys is [slots, kv_heads, d, capacity], one of values [slots, kv_heads, capacity, d].
pub(crate) fn write_cache(cache: Tensor<4>, new: Tensor<2>, kind: CacheKind, spans: Vec<CacheSpan>) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::write_cache(cache.into_dispatch(), new.into_dispatch(), kind, spans))
}

/// Attention of one query row [heads · d] per sequence over its cached positions, the last of which is the row's own.
pub(crate) fn cached_attention(
    q: Tensor<2>,
    keys: Tensor<4>,
    values: Tensor<4>,
    sequences: Vec<CachedSequence>,
    attention: Attention,
) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::cached_attention(
        q.into_dispatch(),
        keys.into_dispatch(),
        values.into_dispatch(),
        sequences,
        attention,
    ))
}

/// Log-probability of each row's target token under softmax(logits / temperature), and the row's entropy.
pub(crate) fn token_stats(logits: &Tensor<2>, targets: &[u32], inverse_temperature: f32) -> Vec<TokenStats> {
    let stats: Tensor<2> = Tensor::from_dispatch(Dispatch::token_stats(
        logits.clone().into_dispatch(),
        targets.to_vec(),
        inverse_temperature,
    ));
    let row = |values: &[f32]| TokenStats { log_prob: values[0], log_sum_exp: values[1], entropy: values[2] };
    host_values(stats).chunks_exact(3).map(row).collect()
}

/// The numbers of a float tensor, in row-major order.
pub(crate) fn host_values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    #[expect(
        clippy::expect_used,
        reason = "every tensor of the engine is f32: a mismatch is a bug of ours, not an input"
    )]
    tensor.into_data().try_into_vec::<f32>().expect("a float tensor holds f32")
}

/// ∂L/∂logits [rows, vocab] of a loss of each row's target log-probability and entropy; reuses the memory of `logits`.
pub(crate) fn logit_gradient(
    logits: Tensor<2>,
    targets: Vec<u32>,
    stats: Vec<TokenStats>,
    gradients: Vec<TokenGradient>,
    inverse_temperature: f32,
) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::logit_gradient(
        logits.into_dispatch(),
        targets,
        stats,
        gradients,
        inverse_temperature,
    ))
}
