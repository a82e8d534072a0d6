//! The forward pass.

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::config::ModelConfig;
use super::rope::Rope;
use super::weights::{Layout, Weights};
use crate::ops::training::{causal_softmax, rms_norm, rotate, swiglu};

/// A model without its parameters: what is the same for every policy version.
#[derive(Clone, Debug)]
pub(crate) struct Decoder {
    pub config: ModelConfig,
    pub layout: Arc<Layout>,
    rope: Rope,
}

/// Queries [rows, heads · d], keys and values [rows, kv_heads · d] of one layer, positions applied.
pub(crate) struct Projections {
    pub query: Tensor<2>,
    pub key: Tensor<2>,
    pub value: Tensor<2>,
}

impl Decoder {
    pub(crate) fn new(config: ModelConfig) -> Self {
        let (layout, rope) = (Arc::new(Layout::new(&config)), Rope::new(&config));
        Self { config, layout, rope }
    }

    /// Final hidden states [rows, hidden] of `ids`, row i standing at `positions[i]` of its sequence.
    ///
    /// `attend(layer, projections)` answers each row's attention output [rows, heads · d]; it decides who sees whom.
    pub(crate) fn hidden_states(
        &self,
        weights: &Weights,
        ids: &[u32],
        positions: &[usize],
        mut attend: impl FnMut(usize, Projections) -> Tensor<2>,
    ) -> Tensor<2> {
        let device = weights.device();
        let (cos, sin) = self.rope.angles(positions, &plain(&device));
        let eps = self.config.rms_norm_eps;
        let mut x = weights.get(self.layout.embedding).select(0, index(ids, &device));
        for (number, layer) in self.layout.layers.iter().enumerate() {
            let normed = rms_norm(x.clone(), weights.get(layer.input_norm), eps);
            let project = |matrix: usize, bias: Option<usize>| affine(weights, normed.clone(), matrix, bias);
            let position =
                |x: Tensor<2>, norm: Option<usize>| rotate(self.norm_heads(weights, x, norm), cos.clone(), sin.clone());
            let projections = Projections {
                query: position(project(layer.query, layer.query_bias), layer.query_norm),
                key: position(project(layer.key, layer.key_bias), layer.key_norm),
                value: project(layer.value, layer.value_bias),
            };
            x = x + affine(weights, attend(number, projections), layer.output, layer.output_bias);
            let normed = rms_norm(x.clone(), weights.get(layer.post_norm), eps);
            let gate = affine(weights, normed.clone(), layer.gate, None);
            let up = affine(weights, normed, layer.up, None);
            x = x + affine(weights, swiglu(gate, up), layer.down, None);
        }
        rms_norm(x, weights.get(self.layout.final_norm), eps)
    }

    /// Final hidden states of `batch` sequences padded on the right to `len`, each attending to its own past.
    ///
    /// Padding needs no mask: it stands after everything real, so nothing real sees it.
    /// `keep(layer, key, value)` is handed each layer's keys and values.
    pub(crate) fn padded(
        &self,
        weights: &Weights,
        ids: &[u32],
        batch: usize,
        len: usize,
        mut keep: impl FnMut(usize, &Projections),
    ) -> Tensor<2> {
        let positions: Vec<usize> = (0..batch).flat_map(|_| 0..len).collect();
        self.hidden_states(weights, ids, &positions, |layer, projections| {
            keep(layer, &projections);
            self.causal_attention(projections, batch, len)
        })
    }

    /// Logits [rows, vocab] of final hidden states.
    pub(crate) fn logits(&self, weights: &Weights, hidden: Tensor<2>) -> Tensor<2> {
        affine(weights, hidden, self.layout.lm_head, None)
    }

    fn norm_heads(&self, weights: &Weights, x: Tensor<2>, norm: Option<usize>) -> Tensor<2> {
        let Some(norm) = norm else { return x };
        let [rows, width] = x.dims();
        let d = self.config.head_dim;
        rms_norm(x.reshape([rows * width / d, d]), weights.get(norm), self.config.rms_norm_eps).reshape([rows, width])
    }

    fn causal_attention(&self, p: Projections, batch: usize, len: usize) -> Tensor<2> {
        let (kv, d) = (self.config.kv_heads, self.config.head_dim);
        let group = self.config.heads / kv;
        let scale = 1.0 / (d as f32).sqrt();
        // The query heads sharing a key head are stacked into one matrix: one product per key head, no copies of keys.
        let query =
            p.query.reshape([batch, len, kv, group, d]).permute([0, 2, 3, 1, 4]).reshape([batch, kv, group * len, d]);
        let key = p.key.reshape([batch, len, kv, d]).permute([0, 2, 3, 1]);
        let value = p.value.reshape([batch, len, kv, d]).permute([0, 2, 1, 3]);
        let probs = causal_softmax(query.matmul(key), scale);
        let mixed: Tensor<4> = probs.matmul(value);
        mixed.reshape([batch, kv, group, len, d]).permute([0, 3, 1, 2, 4]).reshape([batch * len, kv * group * d])
    }
}

/// x·Wᵀ + b, W stored as [out, in].
fn affine(weights: &Weights, x: Tensor<2>, matrix: usize, bias: Option<usize>) -> Tensor<2> {
    let y = x.matmul(weights.get(matrix).transpose());
    match bias {
        Some(bias) => y + weights.get(bias),
        None => y,
    }
}

/// Token ids or row numbers as an index tensor.
pub(crate) fn index(ids: &[u32], device: &Device) -> Tensor<1, Int> {
    let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    let len = ids.len();
    Tensor::from_data(TensorData::new(ids, [len]), &plain(device))
}

/// The device without its recording of graphs: constants need none.
fn plain(device: &Device) -> Device {
    device.clone().inner()
}
