//! The forward pass.

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::config::ModelConfig;
use super::rope::Rope;
use super::weights::{Layout, Weights};
use crate::kernels::Attention;
use crate::ops::training::{causal_softmax, gated, rms_norm, rotate};

/// A model without its parameters: what is the same for every policy version.
#[derive(Clone, Debug)]
pub(crate) struct Decoder {
    pub config: ModelConfig,
    pub layout: Arc<Layout>,
    ropes: Vec<Rope>,
}

/// Queries [rows, heads · d], keys and values [rows, kv_heads · d] of one layer, positions applied.
pub(crate) struct Projections {
    pub query: Tensor<2>,
    pub key: Tensor<2>,
    pub value: Tensor<2>,
}

impl Decoder {
    pub(crate) fn new(config: ModelConfig) -> Self {
        let layout = Arc::new(Layout::new(&config));
        let ropes = config.ropes.iter().map(|rope| Rope::new(*rope, config.head_dim)).collect();
        Self { config, layout, ropes }
    }

    /// How the queries of a layer look at the keys.
    pub(crate) fn attention(&self, layer: usize) -> Attention {
        Attention { scale: self.config.attention_scale, window: self.config.plans[layer].window }
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
        let angles: Vec<_> = self.ropes.iter().map(|rope| rope.angles(positions, &plain(&device))).collect();
        let mut x = weights.get(self.layout.embedding).select(0, index(ids, &device));
        if let Some(scale) = self.config.embedding_scale {
            x = x.mul_scalar(scale);
        }
        for (number, (layer, plan)) in self.layout.layers.iter().zip(&self.config.plans).enumerate() {
            let normed = self.norm(weights, x.clone(), layer.input_norm);
            let project = |matrix: usize, bias: Option<usize>| affine(weights, normed.clone(), matrix, bias);
            let position = |x: Tensor<2>, norm: Option<usize>| {
                let x = self.norm_heads(weights, x, norm);
                match plan.rope.map(|rope| &angles[rope]) {
                    Some((cos, sin)) => rotate(x, cos.clone(), sin.clone()),
                    None => x,
                }
            };
            let projections = Projections {
                query: position(project(layer.query, layer.query_bias), layer.query_norm),
                key: position(project(layer.key, layer.key_bias), layer.key_norm),
                value: project(layer.value, layer.value_bias),
            };
            let attended = affine(weights, attend(number, projections), layer.output, layer.output_bias);
            x = x + self.norm_if(weights, attended, layer.attention_out_norm);
            let normed = self.norm(weights, x.clone(), layer.mlp_norm);
            let gate = affine(weights, normed.clone(), layer.gate, layer.gate_bias);
            let up = affine(weights, normed, layer.up, layer.up_bias);
            let fed = affine(weights, gated(gate, up, self.config.activation), layer.down, layer.down_bias);
            x = x + self.norm_if(weights, fed, layer.mlp_out_norm);
        }
        self.norm(weights, x, self.layout.final_norm)
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
            self.causal_attention(projections, batch, len, self.attention(layer))
        })
    }

    /// Logits [rows, vocab] of final hidden states.
    pub(crate) fn logits(&self, weights: &Weights, hidden: Tensor<2>) -> Tensor<2> {
        affine(weights, hidden, self.layout.lm_head, None)
    }

    fn norm(&self, weights: &Weights, x: Tensor<2>, norm: usize) -> Tensor<2> {
        let weight = weights.get(norm);
        let weight = match self.config.family.norm_offset() {
            Some(offset) => weight.add_scalar(offset),
            None => weight,
        };
        rms_norm(x, weight, self.config.rms_norm_eps)
    }

    fn norm_if(&self, weights: &Weights, x: Tensor<2>, norm: Option<usize>) -> Tensor<2> {
        match norm {
            Some(norm) => self.norm(weights, x, norm),
            None => x,
        }
    }

    fn norm_heads(&self, weights: &Weights, x: Tensor<2>, norm: Option<usize>) -> Tensor<2> {
        let Some(norm) = norm else { return x };
        let [rows, width] = x.dims();
        let d = self.config.head_dim;
        self.norm(weights, x.reshape([rows * width / d, d]), norm).reshape([rows, width])
    }

    fn causal_attention(&self, p: Projections, batch: usize, len: usize, attention: Attention) -> Tensor<2> {
        let (kv, d) = (self.config.kv_heads, self.config.head_dim);
        let group = self.config.heads / kv;
        // The query heads sharing a key head are stacked into one matrix: one product per key head, no copies of keys.
        let query =
            p.query.reshape([batch, len, kv, group, d]).permute([0, 2, 3, 1, 4]).reshape([batch, kv, group * len, d]);
        let key = p.key.reshape([batch, len, kv, d]).permute([0, 2, 3, 1]);
        let value = p.value.reshape([batch, len, kv, d]).permute([0, 2, 1, 3]);
        let probs = causal_softmax(query.matmul(key), attention);
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
