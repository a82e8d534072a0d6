//! Angles of the rotary position embedding.

use burn::tensor::{Device, Tensor, TensorData};
use serde_json::{Map, Value};

use super::config::ModelConfig;

/// How the frequencies are stretched for contexts beyond the trained one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RopeScaling {
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
}

impl RopeScaling {
    /// Reads `rope_scaling` / `rope_parameters`; the error is a sentence about them.
    pub(crate) fn from_json(json: &Map<String, Value>) -> Result<Option<Self>, String> {
        let kind = json.get("rope_type").or_else(|| json.get("type")).and_then(Value::as_str).unwrap_or("default");
        let number = |key: &str| {
            json.get(key)
                .and_then(Value::as_f64)
                .ok_or_else(|| format!("rotary scaling `{kind}` needs the number `{key}`"))
        };
        match kind {
            "default" => Ok(None),
            "linear" => Ok(Some(Self::Linear { factor: number("factor")? })),
            "llama3" => Ok(Some(Self::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_positions: number("original_max_position_embeddings")?,
            })),
            other => {
                Err(format!("rotary scaling `{other}` is not supported; supported are default, linear and llama3"))
            }
        }
    }

    fn scale(self, frequency: f64) -> f64 {
        match self {
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                let wavelength = 2.0 * std::f64::consts::PI / frequency;
                if wavelength > original_max_positions / low_freq_factor {
                    frequency / factor
                } else if wavelength < original_max_positions / high_freq_factor {
                    frequency
                } else {
                    let smooth =
                        (original_max_positions / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }
}

/// The angle per position of each pair of elements of a head.
#[derive(Clone, Debug)]
pub(crate) struct Rope {
    frequencies: Vec<f32>,
}

impl Rope {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let d = config.head_dim;
        let frequencies = (0..d / 2)
            .map(|i| {
                let frequency = 1.0 / config.rope_theta.powf(2.0 * i as f64 / d as f64);
                config.rope_scaling.map_or(frequency, |scaling| scaling.scale(frequency)) as f32
            })
            .collect();
        Self { frequencies }
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
                cos.push(c);
                sin.push(s);
            }
        }
        let tensor = |values| Tensor::from_data(TensorData::new(values, [rows, half]), device);
        (tensor(cos), tensor(sin))
    }
}
