//! The operations on the CPU backend.

use burn::backend::{Flex, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, TensorData};
use burn_flex::FlexTensor;

use super::inference::{CacheCopy, CacheSpan, InferenceOps};
use super::training::{TrainingDerivatives, TrainingOps};
use crate::kernels::cached_attention::{self, CacheKind, CacheShape, CachedSequence};
use crate::kernels::gated::{self, Activation};
use crate::kernels::log_prob::{self, TokenGradient, TokenStats};
use crate::kernels::{Attention, rms_norm, rope, softmax};

/// The same values in row-major order, owning them alone if the argument did.
fn contiguous(tensor: FlexTensor) -> FlexTensor {
    tensor.to_contiguous()
}

fn filled(shape: Shape, fill: impl FnOnce(&mut [f32])) -> FlexTensor {
    let mut values = vec![0.0f32; shape.num_elements()];
    fill(&mut values);
    FlexTensor::from_data(TensorData::new(values, shape))
}

fn last_dim(shape: &Shape) -> usize {
    shape[shape.num_dims() - 1]
}

impl TrainingOps for Flex {
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f32) -> FloatTensor<Self> {
        let (x, weight) = (contiguous(x), contiguous(weight));
        filled(x.shape(), |out| rms_norm::forward(x.storage(), weight.storage(), eps, out))
    }

    fn rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        direction: f32,
    ) -> FloatTensor<Self> {
        let (x, cos, sin) = (contiguous(x), contiguous(cos), contiguous(sin));
        let (row_len, half) = (last_dim(&x.shape()), last_dim(&cos.shape()));
        filled(x.shape(), |out| {
            rope::rotate(x.storage(), cos.storage(), sin.storage(), row_len, half, direction, out);
        })
    }

    fn gated(gate: FloatTensor<Self>, up: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self> {
        let (gate, up) = (contiguous(gate), contiguous(up));
        filled(gate.shape(), |out| gated::forward(gate.storage(), up.storage(), activation, out))
    }

    fn causal_softmax(scores: FloatTensor<Self>, attention: Attention) -> FloatTensor<Self> {
        let mut scores = contiguous(scores);
        let len = last_dim(&scores.shape());
        softmax::causal(scores.storage_mut(), len, attention);
        scores
    }
}

impl TrainingDerivatives for Flex {
    fn rms_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (x, weight, grad) = (contiguous(x), contiguous(weight), contiguous(grad));
        let mut grad_weight = Vec::new();
        let grad_x = filled(x.shape(), |out| {
            grad_weight = rms_norm::backward(x.storage(), weight.storage(), grad.storage(), eps, out);
        });
        (grad_x, FlexTensor::from_data(TensorData::new(grad_weight, weight.shape())))
    }

    fn gated_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        activation: Activation,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (gate, up, grad) = (contiguous(gate), contiguous(up), contiguous(grad));
        let mut grad_up = vec![0.0f32; up.shape().num_elements()];
        let grad_gate = filled(gate.shape(), |grad_gate| {
            gated::backward(gate.storage(), up.storage(), grad.storage(), activation, grad_gate, &mut grad_up);
        });
        (grad_gate, FlexTensor::from_data(TensorData::new(grad_up, up.shape())))
    }

    fn causal_softmax_backward(
        probs: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        attention: Attention,
    ) -> FloatTensor<Self> {
        let (probs, mut grad) = (contiguous(probs), contiguous(grad));
        let len = last_dim(&probs.shape());
        softmax::causal_backward(probs.storage(), len, attention, grad.storage_mut());
        grad
    }
}

fn cache_shape(cache: &FlexTensor, kind: CacheKind) -> CacheShape {
    let shape = cache.shape();
    let (capacity, head_dim) = match kind {
        CacheKind::Keys => (shape[3], shape[2]),
        CacheKind::Values => (shape[2], shape[3]),
    };
    CacheShape { kv_heads: shape[1], capacity, head_dim }
}

impl InferenceOps for Flex {
    fn write_cache(
        cache: FloatTensor<Self>,
        new: FloatTensor<Self>,
        kind: CacheKind,
        spans: Vec<CacheSpan>,
    ) -> FloatTensor<Self> {
        let mut cache = contiguous(cache);
        let new = contiguous(new);
        let shape = cache_shape(&cache, kind);
        let row_len = last_dim(&new.shape());
        let rows: &[f32] = new.storage();
        let values = cache.storage_mut();
        for span in spans {
            let at = (span.slot, span.start, span.len);
            cached_attention::write(values, kind, shape, at, &rows[span.row * row_len..]);
        }
        cache
    }

    fn copy_cache(cache: FloatTensor<Self>, kind: CacheKind, copy: CacheCopy) -> FloatTensor<Self> {
        let mut cache = contiguous(cache);
        let shape = cache_shape(&cache, kind);
        cached_attention::copy(cache.storage_mut(), kind, shape, copy.from, copy.to, copy.len);
        cache
    }

    fn suffix_softmax(scores: FloatTensor<Self>, queries: usize, attention: Attention) -> FloatTensor<Self> {
        let mut scores = contiguous(scores);
        let len = last_dim(&scores.shape());
        softmax::suffix(scores.storage_mut(), len, queries, attention);
        scores
    }

    fn cached_attention(
        q: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        sequences: Vec<CachedSequence>,
        attention: Attention,
    ) -> FloatTensor<Self> {
        let (q, keys, values) = (contiguous(q), contiguous(keys), contiguous(values));
        let shape = cache_shape(&keys, CacheKind::Keys);
        filled(q.shape(), |out| {
            cached_attention::attend(q.storage(), keys.storage(), values.storage(), shape, &sequences, attention, out);
        })
    }

    fn token_stats(logits: FloatTensor<Self>, targets: Vec<u32>, inverse_temperature: f32) -> FloatTensor<Self> {
        let logits = contiguous(logits);
        let stats = log_prob::stats(logits.storage(), last_dim(&logits.shape()), &targets, inverse_temperature);
        let rows = Shape::new([stats.len(), 3]);
        let values = stats.iter().flat_map(|s| [s.log_prob, s.log_sum_exp, s.entropy]).collect::<Vec<f32>>();
        FlexTensor::from_data(TensorData::new(values, rows))
    }

    fn logit_gradient(
        logits: FloatTensor<Self>,
        targets: Vec<u32>,
        stats: Vec<TokenStats>,
        gradients: Vec<TokenGradient>,
        inverse_temperature: f32,
    ) -> FloatTensor<Self> {
        let mut logits = contiguous(logits);
        let vocab = last_dim(&logits.shape());
        log_prob::gradient(logits.storage_mut(), vocab, &targets, &stats, &gradients, inverse_temperature);
        logits
    }
}
