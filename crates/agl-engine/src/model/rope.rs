//! Angles of the rotary position embedding.

use std::f64::consts::PI;

use burn::tensor::{Device, Tensor, TensorData};
use serde_json::{Map, Value};

use super::config::Family;
use super::keys::Keys;
use crate::EngineError;

/// Index of the rotary embedding of layers that see everything.
pub(super) const GLOBAL: usize = 0;
/// Index of that of layers with a window, where a family gives them one of their own.
pub(super) const LOCAL: usize = 1;

/// One rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RopeConfig {
    /// Base of the wavelengths.
    pub theta: f64,
    /// How the frequencies are stretched.
    pub scaling: RopeScaling,
}

/// How the frequencies are stretched for contexts beyond the trained one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RopeScaling {
    /// Not at all.
    None,
    /// All frequencies divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided, short ones kept, a ramp between.
    Llama3 {
        /// The divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above original / this are divided.
        low_freq_factor: f64,
        /// Wavelengths below original / this are kept.
        high_freq_factor: f64,
        /// Context length of pre-training.
        original_max_positions: f64,
    },
    /// YaRN: as Llama 3.1 with a ramp over the numbers of the pairs, and cos and sin multiplied by a factor.
    Yarn(Yarn),
}

/// Constants of YaRN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Yarn {
    /// The divisor of the frequencies that turn rarely.
    factor: f64,
    /// Factor of cos and sin, hence of queries and keys.
    attention_factor: f64,
    /// Pairs that turn more often than this within the original context are kept.
    beta_fast: f64,
    /// Pairs that turn more rarely than this are divided.
    beta_slow: f64,
    /// Context length of pre-training.
    original_max_positions: f64,
    /// The ends of the ramp are rounded to whole pairs.
    truncate: bool,
}

/// What `config.json` says about rotary embeddings.
#[derive(Debug)]
pub(super) struct RopeSettings {
    global: RopeConfig,
    /// Gemma's own for layers with a window.
    local: Option<RopeConfig>,
}

impl RopeSettings {
    /// transformers 5 writes everything into `rope_parameters`, per kind of layer where these differ; earlier ones write
    /// `rope_scaling` with `rope_theta` (and Gemma's `rope_local_base_freq`) beside it.
    pub(super) fn read(keys: &Keys<'_>, family: Family, max_positions: usize) -> Result<Self, EngineError> {
        let key = if keys.value("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
        let stated = match keys.value(key) {
            Some(value) => Some(
                value.as_object().ok_or_else(|| keys.wrong(format!("`{key}` is {value}, but it must be an object")))?,
            ),
            None => None,
        };
        let kind = |name: &str| stated.and_then(|stated| stated.get(name)).and_then(Value::as_object);
        let (global, local) = match kind("full_attention") {
            Some(global) => (Some(global), kind("sliding_attention")),
            None => (stated, None),
        };
        let rope = |json: Option<&Map<String, Value>>, theta: f64| {
            let stated = json.and_then(|json| json.get("rope_theta")).and_then(Value::as_f64);
            let theta = stated.unwrap_or(theta);
            let scaling = json.map_or(Ok(RopeScaling::None), |json| RopeScaling::from_json(json, max_positions));
            scaling.map(|scaling| RopeConfig { theta, scaling }).map_err(|what| keys.wrong(format!("`{key}`: {what}")))
        };
        let default = match family {
            Family::Gemma3 => 1_000_000.0,
            Family::SmolLm3 => 2_000_000.0,
            _ => 10_000.0,
        };
        Ok(Self {
            global: rope(global, keys.number_or("rope_theta", default)?)?,
            local: match family {
                Family::Gemma3 => Some(rope(local, keys.number_or("rope_local_base_freq", 10_000.0)?)?),
                _ => None,
            },
        })
    }

    /// In the order of [`GLOBAL`] and [`LOCAL`].
    pub(super) fn into_configs(self) -> Vec<RopeConfig> {
        std::iter::once(self.global).chain(self.local).collect()
    }

    /// The context that a model serves: with YaRN what it was stretched to, even where `max_position_embeddings` was left at
    /// the trained length.
    pub(super) fn max_positions(&self, stated: usize) -> usize {
        match self.global.scaling {
            RopeScaling::Yarn(yarn) => stated.max((yarn.original_max_positions * yarn.factor) as usize),
            _ => stated,
        }
    }
}

impl RopeScaling {
    /// The error is a sentence about the object.
    fn from_json(json: &Map<String, Value>, max_positions: usize) -> Result<Self, String> {
        let kind = json.get("rope_type").or_else(|| json.get("type")).and_then(Value::as_str).unwrap_or("default");
        let number = |key: &str| {
            json.get(key)
                .and_then(Value::as_f64)
                .filter(|number| *number > 0.0)
                .ok_or_else(|| format!("rotary scaling `{kind}` needs `{key}`, a number above 0"))
        };
        match kind {
            "default" => Ok(Self::None),
            "linear" => Ok(Self::Linear { factor: number("factor")? }),
            "llama3" => Ok(Self::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_positions: number("original_max_position_embeddings")?,
            }),
            "yarn" => Ok(Self::Yarn(Yarn::from_json(json, number("factor")?, max_positions))),
            "dynamic" => Err("rotary scaling `dynamic` is not supported: it turns a token by an angle that depends on how long its sequence is in the end, so that no log-prob recorded while sampling could be computed again; supported are default, linear, llama3 and yarn".to_owned()),
            other => Err(format!(
                "rotary scaling `{other}` is not supported; supported are default, linear, llama3 and yarn"
            )),
        }
    }

    /// The frequencies of all pairs.
    fn scale(self, frequencies: Vec<f64>, theta: f64) -> Vec<f64> {
        match self {
            Self::None => frequencies,
            Self::Linear { factor } => frequencies.into_iter().map(|frequency| frequency / factor).collect(),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => frequencies
                .into_iter()
                .map(|frequency| {
                    let turns = original_max_positions * frequency / (2.0 * PI);
                    let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    (1.0 - kept) * frequency / factor + kept * frequency
                })
                .collect(),
            Self::Yarn(yarn) => yarn.scale(frequencies, theta),
        }
    }

    /// Factor of cos and sin.
    fn attention_factor(self) -> f32 {
        match self {
            Self::Yarn(yarn) => yarn.attention_factor as f32,
            _ => 1.0,
        }
    }
}

impl Yarn {
    fn from_json(json: &Map<String, Value>, factor: f64, max_positions: usize) -> Self {
        // As in transformers, 0 counts as not given.
        let number = |key: &str| json.get(key).and_then(Value::as_f64).filter(|number| *number != 0.0);
        let magnitude = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
        let inferred = match (number("mscale"), number("mscale_all_dim")) {
            (Some(scale), Some(all)) => magnitude(scale) / magnitude(all),
            _ => magnitude(1.0),
        };
        Self {
            factor,
            attention_factor: json.get("attention_factor").and_then(Value::as_f64).unwrap_or(inferred),
            beta_fast: number("beta_fast").unwrap_or(32.0),
            beta_slow: number("beta_slow").unwrap_or(1.0),
            original_max_positions: number("original_max_position_embeddings").unwrap_or(max_positions as f64),
            truncate: json.get("truncate").and_then(Value::as_bool).unwrap_or(true),
        }
    }

    fn scale(self, frequencies: Vec<f64>, theta: f64) -> Vec<f64> {
        let d = 2.0 * frequencies.len() as f64;
        // The number of the pair, a fraction, that turns so often within the original context.
        let pair = |turns: f64| d * (self.original_max_positions / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(d - 1.0));
        if low == high {
            high += 0.001;
        }
        let divided = |i: usize| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        let scaled = frequencies
            .into_iter()
            .enumerate()
            .map(|(i, frequency)| frequency / self.factor * divided(i) + frequency * (1.0 - divided(i)));
        scaled.collect()
    }
}

/// The angle per position of each pair of elements of a head.
#[derive(Clone, Debug)]
pub(crate) struct Rope {
    frequencies: Vec<f32>,
    attention_factor: f32,
}

impl Rope {
    pub(crate) fn new(config: RopeConfig, head_dim: usize) -> Self {
        let d = head_dim as f64;
        let frequencies = (0..head_dim / 2).map(|i| 1.0 / config.theta.powf(2.0 * i as f64 / d)).collect();
        let scaled = config.scaling.scale(frequencies, config.theta);
        Self {
            frequencies: scaled.into_iter().map(|frequency| frequency as f32).collect(),
            attention_factor: config.scaling.attention_factor(),
        }
    }

    /// cos and sin of the angles of each position, [positions, d/2].
    pub(crate) fn angles(&self, positions: &[usize], device: &Device) -> (Tensor<2>, Tensor<2>) {
        let (rows, half) = (positions.len(), self.frequencies.len());
        let mut cos = Vec::with_capacity(rows * half);
        let mut sin = Vec::with_capacity(rows * half);
        for position in positions {
            for frequency in &self.frequencies {
                // In f32, as every implementation computes it: parity matters more than accuracy here.
                let (s, c) = (*position as f32 * frequency).sin_cos();
                cos.push(c * self.attention_factor);
                sin.push(s * self.attention_factor);
            }
        }
        let tensor = |values| Tensor::from_data(TensorData::new(values, [rows, half]), device);
        (tensor(cos), tensor(sin))
    }
}
