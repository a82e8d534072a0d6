//! Sizes of the model, from the `config.json` of a Hugging Face directory.

use std::path::Path;

use serde_json::{Map, Value};

use super::keys::Keys;
use super::layers::{LayerPlan, layer_plans};
use super::rope::{RopeConfig, RopeSettings};
use crate::EngineError;
use crate::kernels::gated::Activation;

/// Which variant of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// Normalises queries and keys per head.
    Qwen3,
    /// Biases on the query, key and value projections.
    Qwen2,
    /// Neither, unless `attention_bias` or `mlp_bias` says otherwise. SmolLM and SmolLM2 are of this family.
    Llama,
    /// As Llama, with layers that know no positions.
    SmolLm3,
    /// Scaled embeddings, a norm before and after each block, 1 + w as the weight of norms, GELU, local and global layers.
    Gemma3,
}

impl Family {
    const ALL: [Self; 5] = [Self::Qwen3, Self::Qwen2, Self::Llama, Self::SmolLm3, Self::Gemma3];

    /// Its entry of `architectures` and its `model_type`.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
            Self::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            Self::Llama => ("LlamaForCausalLM", "llama"),
            Self::SmolLm3 => ("SmolLM3ForCausalLM", "smollm3"),
            Self::Gemma3 => ("Gemma3ForCausalLM", "gemma3_text"),
        }
    }

    fn read(keys: &Keys<'_>) -> Result<Self, EngineError> {
        let architecture = keys.value("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
        let stated = architecture.or_else(|| keys.text("model_type")).unwrap_or_default();
        let found = Self::ALL.into_iter().find(|family| {
            let (architecture, model_type) = family.names();
            stated == architecture || stated == model_type
        });
        found.ok_or_else(|| {
            let supported = Self::ALL.map(|family| family.names().0).join(", ");
            let key = if architecture.is_some() { "architectures" } else { "model_type" };
            keys.wrong(format!(
                "`{key}` says `{stated}`, an architecture that is not supported; supported are {supported}"
            ))
        })
    }

    /// Norms of queries and keys per head.
    pub(crate) fn normalises_heads(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Gemma3)
    }

    /// Norms not only before but also after attention and feed-forward block.
    pub(crate) fn normalises_outputs(self) -> bool {
        self == Self::Gemma3
    }

    /// What is added to the stored weight of a norm.
    pub(crate) fn norm_offset(self) -> Option<f32> {
        (self == Self::Gemma3).then_some(1.0)
    }
}

/// Sizes and constants of a model.
#[derive(Clone, Debug)]
pub(crate) struct ModelConfig {
    pub family: Family,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    /// What differs from layer to layer; one entry each.
    pub plans: Vec<LayerPlan>,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub max_positions: usize,
    pub rms_norm_eps: f32,
    /// The rotary embeddings that plans refer to.
    pub ropes: Vec<RopeConfig>,
    pub tied_embeddings: bool,
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub mlp_bias: bool,
    pub activation: Activation,
    /// Factor of the products of queries and keys.
    pub attention_scale: f32,
    /// Factor of the embeddings. In f32 like everything here: a model saved in bf16 computes with the same factor.
    pub embedding_scale: Option<f32>,
    /// Standard deviation of freshly initialised weights.
    pub initializer_range: f64,
    /// Ids that end an answer, as `config.json` names them.
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// Reads the keys of the supported architectures of Hugging Face, with the defaults that `transformers` gives each.
    pub(crate) fn from_json(path: &Path, json: &Map<String, Value>) -> Result<Self, EngineError> {
        let keys = Keys { path, json };
        let family = Family::read(&keys)?;
        refuse_what_is_not_computed(&keys, family)?;
        let (hidden_size, heads) = (keys.size("hidden_size")?, keys.size("num_attention_heads")?);
        let kv_heads = match (family, keys.value("num_key_value_heads")) {
            // transformers would assume a fixed number, whatever the other sizes: better to ask.
            (Family::Qwen3 | Family::Qwen2 | Family::SmolLm3 | Family::Gemma3, None) => {
                keys.size("num_key_value_heads")?
            }
            _ => keys.size_or("num_key_value_heads", heads)?,
        };
        if !heads.is_multiple_of(kv_heads) {
            return Err(keys.wrong(format!(
                "`num_attention_heads` ({heads}) is not a multiple of `num_key_value_heads` ({kv_heads})"
            )));
        }
        let head_dim = match family {
            Family::Qwen3 => keys.size_or("head_dim", 128)?,
            Family::Gemma3 => keys.size_or("head_dim", 256)?,
            _ => keys.size_or("head_dim", hidden_size / heads)?,
        };
        if !head_dim.is_multiple_of(2) {
            return Err(keys.wrong(format!("`head_dim` is {head_dim}, but rotary embedding needs an even number")));
        }
        let layers = keys.size("num_hidden_layers")?;
        let stated_positions =
            keys.size_or("max_position_embeddings", if family == Family::Gemma3 { 131_072 } else { 32_768 })?;
        let rope = RopeSettings::read(&keys, family, stated_positions)?;
        let attention_bias = keys.flag_or("attention_bias", family == Family::Qwen2)?;
        let score_scale = match family {
            Family::Gemma3 => keys.number_or("query_pre_attn_scalar", 256.0)?,
            _ => head_dim as f64,
        };
        Ok(Self {
            family,
            vocab_size: keys.size("vocab_size")?,
            hidden_size,
            intermediate_size: keys.size("intermediate_size")?,
            plans: layer_plans(&keys, family, layers)?,
            heads,
            kv_heads,
            head_dim,
            max_positions: rope.max_positions(stated_positions),
            rms_norm_eps: keys.number_or("rms_norm_eps", 1e-6)? as f32,
            ropes: rope.into_configs(),
            tied_embeddings: keys.flag_or("tie_word_embeddings", matches!(family, Family::Gemma3 | Family::SmolLm3))?,
            qkv_bias: attention_bias,
            output_bias: attention_bias && family != Family::Qwen2,
            mlp_bias: keys.flag_or("mlp_bias", false)?,
            activation: activation(&keys, family)?,
            attention_scale: (1.0 / score_scale.sqrt()) as f32,
            embedding_scale: (family == Family::Gemma3).then(|| (hidden_size as f64).sqrt() as f32),
            initializer_range: keys.number_or("initializer_range", 0.02)?,
            eos_token_ids: token_ids(json.get("eos_token_id")),
        })
    }
}

/// Keys that change what a model computes and are not implemented: better no answer than one of another model.
fn refuse_what_is_not_computed(keys: &Keys<'_>, family: Family) -> Result<(), EngineError> {
    if keys.flag_or("mlp_bias", false)? && !matches!(family, Family::Llama | Family::SmolLm3) {
        let name = family.names().0;
        return Err(keys.wrong(format!(
            "`mlp_bias: true` is not supported for {name}; supported are LlamaForCausalLM and SmolLM3ForCausalLM"
        )));
    }
    if keys.flag_or("use_bidirectional_attention", false)? {
        return Err(keys.wrong(
            "`use_bidirectional_attention: true` is not supported: a policy samples from left to right".to_owned(),
        ));
    }
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(value) = keys.value(key) {
            return Err(keys.wrong(format!("`{key}` is {value}, but only models without it (null) are supported")));
        }
    }
    if let Some(value) = keys.value("partial_rotary_factor")
        && value.as_f64() != Some(1.0)
    {
        return Err(keys.wrong(format!(
            "`partial_rotary_factor` is {value}, but only 1.0 (all of a head is rotated) is supported"
        )));
    }
    Ok(())
}

fn activation(keys: &Keys<'_>, family: Family) -> Result<Activation, EngineError> {
    let (key, default) = match family {
        Family::Gemma3 => ("hidden_activation", "gelu_pytorch_tanh"),
        _ => ("hidden_act", "silu"),
    };
    match keys.text(key).unwrap_or(default) {
        "silu" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        other => Err(keys.wrong(format!("`{key}` is `{other}`; supported are silu and gelu_pytorch_tanh"))),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::rope::RopeScaling;
    use serde_json::json;

    fn read(json: Value) -> Result<ModelConfig, EngineError> {
        ModelConfig::from_json(Path::new("m/config.json"), json.as_object().unwrap())
    }

    /// The keys that every family needs, and those of the case.
    fn with(architecture: &str, more: Value) -> Result<ModelConfig, EngineError> {
        let mut json = json!({
            "architectures": [architecture], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        });
        json.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        read(json)
    }

    fn windows(config: &ModelConfig) -> Vec<Option<usize>> {
        config.plans.iter().map(|plan| plan.window).collect()
    }

    #[test]
    fn gemma_3_as_published_has_five_local_layers_to_a_global_one_and_the_defaults_of_its_class() {
        let config = with(
            "Gemma3ForCausalLM",
            json!({
                "attn_logit_softcapping": null, "final_logit_softcapping": null, "sliding_window": 512,
                "sliding_window_pattern": 6, "rope_theta": 1_000_000, "rope_local_base_freq": 10_000,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 256,
                "eos_token_id": [1, 106],
            }),
        )
        .unwrap();
        let (local, global) = (Some(512), None);
        assert_eq!(windows(&config), [local, local, local, local, local, global, local, local]);
        let ropes: Vec<_> = config.plans.iter().map(|plan| plan.rope.map(|rope| config.ropes[rope])).collect();
        assert_eq!(
            ropes[0],
            Some(RopeConfig { theta: 10_000.0, scaling: RopeScaling::None }),
            "local layers are not stretched"
        );
        assert_eq!(ropes[5].unwrap().theta, 1_000_000.0);
        assert!(config.tied_embeddings, "the key is left out where it is true");
        assert_eq!((config.head_dim, config.activation), (256, Activation::GeluTanh));
        assert_eq!((config.attention_scale, config.embedding_scale), (1.0 / 16.0, Some(8.0)));
    }

    #[test]
    fn gemma_3_as_written_by_transformers_5_is_the_same() {
        let both = |kind: &str| json!({"rope_type": "default", "rope_theta": kind.len()});
        let config = with(
            "Gemma3ForCausalLM",
            json!({
                "layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention",
                    "full_attention", "full_attention", "full_attention", "full_attention"],
                "sliding_window": 16,
                "rope_parameters": {"full_attention": both("four"), "sliding_attention": both("two")},
            }),
        )
        .unwrap();
        let thetas: Vec<_> = config.plans.iter().map(|plan| config.ropes[plan.rope.unwrap()].theta).collect();
        assert_eq!(thetas[..2], [3.0, 4.0]);
        assert_eq!(windows(&config)[..2], [Some(16), None]);
    }

    #[test]
    fn smollm3_leaves_positions_out_of_every_fourth_layer_or_of_those_it_names() {
        let rotated = |more: Value| {
            let config = with("SmolLM3ForCausalLM", more).unwrap();
            config.plans.iter().map(|plan| plan.rope.is_some()).collect::<Vec<_>>()
        };
        assert_eq!(rotated(json!({})), [true, true, true, false, true, true, true, false]);
        let named = json!({"no_rope_layers": [0, 1, 1, 1, 1, 1, 1, 0], "no_rope_layer_interval": 4});
        assert_eq!(rotated(named), [false, true, true, true, true, true, true, false]);
        let config = with("SmolLM3ForCausalLM", json!({})).unwrap();
        assert!(config.tied_embeddings);
        assert_eq!(config.ropes[0].theta, 2_000_000.0);
    }

    #[test]
    fn qwen_has_its_window_only_where_it_is_turned_on() {
        let off = with("Qwen2ForCausalLM", json!({"use_sliding_window": false, "sliding_window": 4096})).unwrap();
        assert_eq!(windows(&off), [None; 8]);
        let on = json!({"use_sliding_window": true, "sliding_window": 32, "max_window_layers": 6});
        let on = with("Qwen3ForCausalLM", on).unwrap();
        assert_eq!(windows(&on), [None, None, None, None, None, None, Some(32), Some(32)]);
    }

    #[test]
    fn yarn_stretches_the_context_that_is_served() {
        let yarn = |factor: f64| {
            json!({"max_position_embeddings": 40_960, "rope_scaling":
                {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 32_768}})
        };
        assert_eq!(with("Qwen3ForCausalLM", yarn(4.0)).unwrap().max_positions, 131_072);
        assert_eq!(with("Qwen3ForCausalLM", yarn(1.1)).unwrap().max_positions, 40_960);
    }

    #[test]
    fn what_is_not_supported_is_named_with_its_file_its_key_and_what_is() {
        let cases = [
            ("Gemma3ForConditionalGeneration", json!({}), "`architectures` says `Gemma3ForConditionalGeneration`"),
            ("LlamaForCausalLM", json!({"hidden_act": "gelu"}), "`hidden_act` is `gelu`; supported are silu and"),
            ("Gemma3ForCausalLM", json!({"hidden_activation": "relu"}), "`hidden_activation` is `relu`; supported are"),
            ("Qwen3ForCausalLM", json!({"mlp_bias": true}), "supported are LlamaForCausalLM and SmolLM3ForCausalLM"),
            ("Gemma3ForCausalLM", json!({"final_logit_softcapping": 30.0}), "`final_logit_softcapping` is 30.0"),
            ("LlamaForCausalLM", json!({"partial_rotary_factor": 0.5}), "`partial_rotary_factor` is 0.5"),
            ("Gemma3ForCausalLM", json!({"use_bidirectional_attention": true}), "`use_bidirectional_attention: true`"),
            ("Qwen2ForCausalLM", json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}), "`dynamic`"),
            (
                "Qwen2ForCausalLM",
                json!({"rope_scaling": {"type": "longrope"}}),
                "supported are default, linear, llama3 and yarn",
            ),
            (
                "Qwen2ForCausalLM",
                json!({"rope_scaling": {"type": "yarn"}}),
                "`rope_scaling`: rotary scaling `yarn` needs `factor`",
            ),
            (
                "Qwen3ForCausalLM",
                json!({"layer_types": ["full_attention"]}),
                "`layer_types` must be a list of `num_hidden_layers` (8)",
            ),
            (
                "Qwen3ForCausalLM",
                json!({"layer_types": vec!["linear_attention"; 8]}),
                "`layer_types` contains \"linear_attention\"",
            ),
            (
                "Qwen3ForCausalLM",
                json!({"layer_types": vec!["sliding_attention"; 8]}),
                "`use_sliding_window` is not true",
            ),
            (
                "LlamaForCausalLM",
                json!({"layer_types": vec!["sliding_attention"; 8]}),
                "LlamaForCausalLM does not have",
            ),
            (
                "LlamaForCausalLM",
                json!({"num_key_value_heads": 3}),
                "(4) is not a multiple of `num_key_value_heads` (3)",
            ),
            ("LlamaForCausalLM", json!({"head_dim": 7}), "`head_dim` is 7"),
            ("LlamaForCausalLM", json!({"tie_word_embeddings": "yes"}), "`tie_word_embeddings` is \"yes\""),
        ];
        for (architecture, more, expected) in cases {
            let error = with(architecture, more).unwrap_err().to_string();
            assert!(error.starts_with("m/config.json: ") && error.contains(expected), "{error}");
        }
    }
}
