//! The parameters as one flat list in a fixed order, so that loading, saving, gradients and the optimiser are plain loops.

use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::config::ModelConfig;

/// How a fresh parameter is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Init {
    Normal,
    Ones,
    Zeros,
}

/// Name and shape of one parameter, as in Hugging Face checkpoints.
#[derive(Clone, Debug)]
pub(crate) struct TensorSpec {
    pub name: String,
    pub shape: Vec<usize>,
    pub init: Init,
}

impl TensorSpec {
    /// The shape in memory: vectors are kept as one row.
    pub(crate) fn matrix(&self) -> [usize; 2] {
        match self.shape[..] {
            [rows, columns] => [rows, columns],
            _ => [1, self.shape.iter().product()],
        }
    }
}

/// Positions in the list of one layer's parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerSlots {
    pub input_norm: usize,
    pub query: usize,
    pub key: usize,
    pub value: usize,
    pub query_bias: Option<usize>,
    pub key_bias: Option<usize>,
    pub value_bias: Option<usize>,
    pub query_norm: Option<usize>,
    pub key_norm: Option<usize>,
    pub output: usize,
    pub output_bias: Option<usize>,
    /// On the output of attention, before it is added.
    pub attention_out_norm: Option<usize>,
    /// On the input of the feed-forward block.
    pub mlp_norm: usize,
    /// On the output of the feed-forward block, before it is added.
    pub mlp_out_norm: Option<usize>,
    pub gate: usize,
    pub up: usize,
    pub down: usize,
    pub gate_bias: Option<usize>,
    pub up_bias: Option<usize>,
    pub down_bias: Option<usize>,
}

/// Which parameters a model has and where each stands in the list.
#[derive(Debug)]
pub(crate) struct Layout {
    pub tensors: Vec<TensorSpec>,
    pub embedding: usize,
    pub layers: Vec<LayerSlots>,
    pub final_norm: usize,
    /// The embedding itself when it is tied.
    pub lm_head: usize,
}

impl Layout {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: &[usize], init: Init| {
            tensors.push(TensorSpec { name, shape: shape.to_vec(), init });
            tensors.len() - 1
        };
        let (hidden, d) = (config.hidden_size, config.head_dim);
        let (query, kv) = (config.heads * d, config.kv_heads * d);
        let inner = config.intermediate_size;
        let (family, unit) =
            (config.family, if config.family.norm_offset().is_some() { Init::Zeros } else { Init::Ones });
        let embedding = add("model.embed_tokens.weight".to_owned(), &[config.vocab_size, hidden], Init::Normal);
        let layers = (0..config.plans.len())
            .map(|layer| {
                let at = |part: &str| format!("model.layers.{layer}.{part}");
                let mut bias =
                    |part: &str, len: usize, present: bool| present.then(|| add(at(part), &[len], Init::Zeros));
                let query_bias = bias("self_attn.q_proj.bias", query, config.qkv_bias);
                let key_bias = bias("self_attn.k_proj.bias", kv, config.qkv_bias);
                let value_bias = bias("self_attn.v_proj.bias", kv, config.qkv_bias);
                let output_bias = bias("self_attn.o_proj.bias", hidden, config.output_bias);
                let gate_bias = bias("mlp.gate_proj.bias", inner, config.mlp_bias);
                let up_bias = bias("mlp.up_proj.bias", inner, config.mlp_bias);
                let down_bias = bias("mlp.down_proj.bias", hidden, config.mlp_bias);
                let mut norm = |part: &str, len: usize| add(at(part), &[len], unit);
                let input_norm = norm("input_layernorm.weight", hidden);
                let after_attention = norm("post_attention_layernorm.weight", hidden);
                // What comes after attention stands before the feed-forward block too, unless each has its own.
                let (attention_out_norm, mlp_norm, mlp_out_norm) = if family.normalises_outputs() {
                    let before = norm("pre_feedforward_layernorm.weight", hidden);
                    (Some(after_attention), before, Some(norm("post_feedforward_layernorm.weight", hidden)))
                } else {
                    (None, after_attention, None)
                };
                let per_head = family.normalises_heads();
                let query_norm = per_head.then(|| norm("self_attn.q_norm.weight", d));
                let key_norm = per_head.then(|| norm("self_attn.k_norm.weight", d));
                let mut matrix = |part: &str, out: usize, input: usize| add(at(part), &[out, input], Init::Normal);
                LayerSlots {
                    input_norm,
                    query: matrix("self_attn.q_proj.weight", query, hidden),
                    key: matrix("self_attn.k_proj.weight", kv, hidden),
                    value: matrix("self_attn.v_proj.weight", kv, hidden),
                    query_bias,
                    key_bias,
                    value_bias,
                    query_norm,
                    key_norm,
                    output: matrix("self_attn.o_proj.weight", hidden, query),
                    output_bias,
                    attention_out_norm,
                    mlp_norm,
                    mlp_out_norm,
                    gate: matrix("mlp.gate_proj.weight", inner, hidden),
                    up: matrix("mlp.up_proj.weight", inner, hidden),
                    down: matrix("mlp.down_proj.weight", hidden, inner),
                    gate_bias,
                    up_bias,
                    down_bias,
                }
            })
            .collect();
        let final_norm = add("model.norm.weight".to_owned(), &[hidden], unit);
        let lm_head = if config.tied_embeddings {
            embedding
        } else {
            add("lm_head.weight".to_owned(), &[config.vocab_size, hidden], Init::Normal)
        };
        Self { tensors, embedding, layers, final_norm, lm_head }
    }
}

/// The parameters. Cloning copies handles, not numbers.
#[derive(Clone, Debug)]
pub(crate) struct Weights {
    pub layout: Arc<Layout>,
    pub tensors: Vec<Tensor<2>>,
}

impl Weights {
    /// Fresh parameters: normal with the model's `initializer_range`, norms such that they
    /// leave the scale alone, biases 0.
    pub(crate) fn random(config: &ModelConfig, layout: Arc<Layout>, seed: u64, device: &Device) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let tensors = layout
            .tensors
            .iter()
            .map(|spec| {
                let count = spec.shape.iter().product();
                let values = match spec.init {
                    Init::Normal => (0..count).map(|_| normal(&mut rng, config.initializer_range)).collect(),
                    Init::Ones => vec![1.0; count],
                    Init::Zeros => vec![0.0; count],
                };
                Tensor::from_data(TensorData::new(values, spec.matrix()), device)
            })
            .collect();
        Self { layout, tensors }
    }

    pub(crate) fn get(&self, slot: usize) -> Tensor<2> {
        self.tensors[slot].clone()
    }

    /// The same parameters as leaves of a new graph.
    pub(crate) fn tracked(&self) -> Self {
        let tensors = self.tensors.iter().map(|t| t.clone().autodiff().require_grad()).collect();
        Self { layout: self.layout.clone(), tensors }
    }

    pub(crate) fn parameter_count(&self) -> usize {
        self.layout.tensors.iter().map(|spec| spec.shape.iter().product::<usize>()).sum()
    }

    pub(crate) fn device(&self) -> Device {
        self.tensors[0].device()
    }
}

/// One draw of N(0, deviation²) by the method of Box and Muller.
fn normal(rng: &mut ChaCha8Rng, deviation: f64) -> f32 {
    let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
    let angle = 2.0 * std::f64::consts::PI * rng.random::<f64>();
    (deviation * radius * angle.cos()) as f32
}
