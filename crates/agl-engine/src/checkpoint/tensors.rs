//! `safetensors` bytes to tensors and back.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use burn::tensor::{Device, Tensor, TensorData};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, View};
use serde::{Deserialize, Serialize};

use crate::EngineError;

/// Number format of saved parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveDtype {
    /// 32 bits, exact.
    #[default]
    #[serde(rename = "float32")]
    F32,
    /// 16 bits with the range of 32, rounded to nearest even.
    #[serde(rename = "bfloat16")]
    Bf16,
}

impl SaveDtype {
    /// The name `config.json` uses.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }
}

/// The numbers of one stored tensor as `f32`; checks its shape. The error is a sentence about the tensor.
pub(crate) fn read_f32(name: &str, view: &TensorView<'_>, shape: &[usize]) -> Result<Vec<f32>, String> {
    if view.shape() != shape {
        return Err(format!("tensor `{name}` has shape {:?}, but config.json implies {shape:?}", view.shape()));
    }
    let pairs = || view.data().chunks_exact(2).map(|b| [b[0], b[1]]);
    match view.dtype() {
        Dtype::F32 => Ok(view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()),
        Dtype::BF16 => Ok(pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect()),
        Dtype::F16 => Ok(pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect()),
        other => Err(format!("tensor `{name}` is stored as {other:?}; supported are F32, BF16 and F16")),
    }
}

/// Parses a `safetensors` file; the error names it.
pub(crate) fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<SafeTensors<'a>, EngineError> {
    SafeTensors::deserialize(bytes).map_err(|error| EngineError::Model {
        path: path.to_owned(),
        what: format!("not a whole safetensors file ({error}); copy or download it again"),
    })
}

/// A matrix on `device` from numbers read from disk.
pub(crate) fn matrix(values: Vec<f32>, shape: [usize; 2], device: &Device) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// The numbers of a matrix; the error is a sentence.
pub(crate) fn values(tensor: &Tensor<2>) -> Result<Vec<f32>, String> {
    tensor
        .to_data()
        .try_into_vec::<f32>()
        .map_err(|error| format!("reading a tensor back from its device failed: {error:?}"))
}

/// One tensor on its way to disk.
pub(crate) struct Stored {
    dtype: SaveDtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    pub(crate) fn new(values: &[f32], shape: &[usize], dtype: SaveDtype) -> Self {
        let bytes = match dtype {
            SaveDtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            SaveDtype::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        };
        Self { dtype, shape: shape.to_vec(), bytes }
    }
}

impl View for Stored {
    fn dtype(&self) -> Dtype {
        match self.dtype {
            SaveDtype::F32 => Dtype::F32,
            SaveDtype::Bf16 => Dtype::BF16,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// A `safetensors` file of `tensors` and string `metadata`; the error is a sentence.
pub(crate) fn serialize(
    tensors: BTreeMap<String, Stored>,
    metadata: HashMap<String, String>,
) -> Result<Vec<u8>, String> {
    safetensors::serialize(tensors, Some(metadata)).map_err(|error| format!("safetensors refused the tensors: {error}"))
}
