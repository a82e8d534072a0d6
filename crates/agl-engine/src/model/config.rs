//! Sizes of the model, from the `config.json` of a Hugging Face directory.

use std::path::Path;

use serde_json::{Map, Value};

use super::rope::RopeScaling;
use crate::EngineError;

/// Which variant of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// Normalises queries and keys per head.
    Qwen3,
    /// Biases on the query, key and value projections.
    Qwen2,
    /// Neither, unless `attention_bias` or `mlp_bias` says otherwise.
    Llama,
}

/// Sizes and constants of a model.
#[derive(Clone, Debug)]
pub(crate) struct ModelConfig {
    pub family: Family,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub max_positions: usize,
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub rope_scaling: Option<RopeScaling>,
    pub tied_embeddings: bool,
    pub qkv_bias: bool,
    pub output_bias: bool,
    /// Standard deviation of freshly initialised weights.
    pub initializer_range: f64,
    /// Ids that end an answer, as `config.json` names them.
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// Reads the keys of Hugging Face's `Qwen3ForCausalLM`, `Qwen2ForCausalLM` or `LlamaForCausalLM`.
    pub(crate) fn from_json(path: &Path, json: &Map<String, Value>) -> Result<Self, EngineError> {
        let keys = Keys { path, json };
        let architecture = json
            .get("architectures")
            .and_then(|list| list.get(0))
            .and_then(Value::as_str)
            .or_else(|| json.get("model_type").and_then(Value::as_str))
            .unwrap_or_default();
        let family = match architecture {
            "Qwen3ForCausalLM" | "qwen3" => Family::Qwen3,
            "Qwen2ForCausalLM" | "qwen2" => Family::Qwen2,
            "LlamaForCausalLM" | "llama" => Family::Llama,
            other => {
                return Err(keys.wrong(format!(
                    "architecture `{other}` is not supported; supported are Qwen3ForCausalLM, Qwen2ForCausalLM and LlamaForCausalLM"
                )));
            }
        };
        for key in ["use_sliding_window", "mlp_bias"] {
            if json.get(key).and_then(Value::as_bool) == Some(true) {
                return Err(keys.wrong(format!("`{key}: true` is not supported")));
            }
        }
        match json.get("hidden_act").and_then(Value::as_str) {
            None | Some("silu") => {}
            Some(other) => return Err(keys.wrong(format!("`hidden_act` is `{other}`; only `silu` is supported"))),
        }
        let (hidden_size, heads) = (keys.size("hidden_size")?, keys.size("num_attention_heads")?);
        // transformers 5 writes the rotary settings into `rope_parameters`, earlier ones beside it.
        let rope = json.get("rope_parameters").or_else(|| json.get("rope_scaling")).and_then(Value::as_object);
        let attention_bias = json.get("attention_bias").and_then(Value::as_bool);
        let config = Self {
            family,
            vocab_size: keys.size("vocab_size")?,
            hidden_size,
            intermediate_size: keys.size("intermediate_size")?,
            layers: keys.size("num_hidden_layers")?,
            heads,
            kv_heads: match (family, json.get("num_key_value_heads")) {
                // The Qwen classes of transformers would assume 32, whatever the other sizes: better to ask.
                (Family::Qwen3 | Family::Qwen2, None) => keys.size("num_key_value_heads")?,
                _ => keys.size_or("num_key_value_heads", heads)?,
            },
            head_dim: keys.size_or("head_dim", if family == Family::Qwen3 { 128 } else { hidden_size / heads })?,
            max_positions: keys.size_or("max_position_embeddings", 32_768)?,
            rms_norm_eps: keys.number("rms_norm_eps").unwrap_or(1e-6) as f32,
            rope_theta: keys
                .number("rope_theta")
                .or_else(|| rope.and_then(|rope| rope.get("rope_theta")).and_then(Value::as_f64))
                .unwrap_or(10_000.0),
            rope_scaling: match rope {
                Some(rope) => RopeScaling::from_json(rope).map_err(|what| keys.wrong(what))?,
                None => None,
            },
            tied_embeddings: json.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false),
            qkv_bias: attention_bias.unwrap_or(family == Family::Qwen2),
            output_bias: family != Family::Qwen2 && attention_bias.unwrap_or(false),
            initializer_range: keys.number("initializer_range").unwrap_or(0.02),
            eos_token_ids: token_ids(json.get("eos_token_id")),
        };
        if !config.heads.is_multiple_of(config.kv_heads) {
            return Err(keys.wrong(format!(
                "`num_attention_heads` ({}) is not a multiple of `num_key_value_heads` ({})",
                config.heads, config.kv_heads
            )));
        }
        if !config.head_dim.is_multiple_of(2) {
            return Err(
                keys.wrong(format!("`head_dim` is {}, but rotary embedding needs an even number", config.head_dim))
            );
        }
        Ok(config)
    }
}

/// The ids of an `eos_token_id` entry: a number, a list, or nothing.
pub(crate) fn token_ids(value: Option<&Value>) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Value::Array(ids)) => ids.iter().filter_map(id).collect(),
        Some(value) => id(value).into_iter().collect(),
        None => Vec::new(),
    }
}

struct Keys<'a> {
    path: &'a Path,
    json: &'a Map<String, Value>,
}

impl Keys<'_> {
    fn wrong(&self, what: String) -> EngineError {
        EngineError::Model { path: self.path.to_owned(), what }
    }

    fn size(&self, key: &str) -> Result<usize, EngineError> {
        let Some(value) = self.json.get(key) else {
            return Err(self.wrong(format!("the key `{key}` is missing")));
        };
        match value.as_u64() {
            Some(size) if size > 0 => Ok(size as usize),
            _ => Err(self.wrong(format!("`{key}` is {value}, but it must be a whole number above 0"))),
        }
    }

    fn size_or(&self, key: &str, default: usize) -> Result<usize, EngineError> {
        match self.json.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(_) => self.size(key),
        }
    }

    fn number(&self, key: &str) -> Option<f64> {
        self.json.get(key).and_then(Value::as_f64)
    }
}
