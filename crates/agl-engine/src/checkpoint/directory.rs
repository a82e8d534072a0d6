//! A model directory: `config.json`, weights, tokenizer files.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use safetensors::tensor::SafeTensors;
use serde_json::{Map, Value};

use super::atomic::write_directory;
use super::tensors::{self, SaveDtype, Stored};
use crate::EngineError;
use crate::model::config::ModelConfig;
use crate::model::weights::{Layout, Weights};
use crate::train::adamw::OptimizerState;

/// Files that travel with a model unchanged.
const COMPANIONS: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
];

const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const OPTIMIZER: &str = "optimizer.safetensors";

/// Everything of a model directory but the weights, kept so that a checkpoint is complete even if its origin is gone.
#[derive(Clone, Debug)]
pub(crate) struct ModelFiles {
    config_path: PathBuf,
    config: Map<String, Value>,
    companions: BTreeMap<&'static str, Vec<u8>>,
    tokenizer_dir: PathBuf,
}

impl ModelFiles {
    /// Reads `config_path` and the tokenizer files of `tokenizer_dir`, of which only `tokenizer.json` must be there.
    pub(crate) fn read(config_path: &Path, tokenizer_dir: &Path) -> Result<Self, EngineError> {
        let config = read_object(config_path)?;
        let mut companions = BTreeMap::new();
        for name in COMPANIONS {
            let path = tokenizer_dir.join(name);
            match fs::read(&path) {
                Ok(bytes) => drop(companions.insert(*name, bytes)),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound && *name != "tokenizer.json" => {}
                Err(source) => return Err(EngineError::Read { path, source }),
            }
        }
        Ok(Self { config_path: config_path.to_owned(), config, companions, tokenizer_dir: tokenizer_dir.to_owned() })
    }

    pub(crate) fn model_config(&self) -> Result<ModelConfig, EngineError> {
        ModelConfig::from_json(&self.config_path, &self.config)
    }

    /// The bytes of a companion file and the path to name in an error about it.
    pub(crate) fn companion(&self, name: &str) -> Option<(PathBuf, &[u8])> {
        self.companions.get(name).map(|bytes| (self.tokenizer_dir.join(name), bytes.as_slice()))
    }

    /// A companion file that is a JSON object; an empty one if the file is not there.
    pub(crate) fn companion_json(&self, name: &str) -> Result<Map<String, Value>, EngineError> {
        match self.companion(name) {
            Some((path, bytes)) => parse_object(&path, bytes),
            None => Ok(Map::new()),
        }
    }

    /// Writes a directory that `transformers` and vLLM load.
    pub(crate) fn write(&self, dir: &Path, weights: &Weights, dtype: SaveDtype) -> Result<(), EngineError> {
        let wrong = |what: String| EngineError::Model { path: dir.to_owned(), what };
        let mut stored = BTreeMap::new();
        for (spec, tensor) in weights.layout.tensors.iter().zip(&weights.tensors) {
            let values = tensors::values(tensor).map_err(wrong)?;
            stored.insert(spec.name.clone(), Stored::new(&values, &spec.shape, dtype));
        }
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let bytes = tensors::serialize(stored, metadata).map_err(wrong)?;
        let mut config = self.config.clone();
        // transformers 5 renamed the key; readers accept both, so the one that is there is kept.
        let key = if config.contains_key("dtype") { "dtype" } else { "torch_dtype" };
        config.insert(key.to_owned(), dtype.name().into());
        let config = serde_json::to_vec_pretty(&config).map_err(|error| wrong(error.to_string()))?;
        let mut files: Vec<(&str, &[u8])> = vec![("config.json", &config), (WEIGHTS, &bytes)];
        files.extend(self.companions.iter().map(|(name, bytes)| (*name, bytes.as_slice())));
        write_directory(dir, &files)
    }
}

/// Reads the weights of a model directory, one file or several with an index; every name and shape is checked.
pub(crate) fn read_weights(
    dir: &Path,
    layout: &Arc<Layout>,
    tied: bool,
    device: &Device,
) -> Result<Weights, EngineError> {
    let mut found: HashMap<String, Tensor<2>> = HashMap::new();
    for path in weight_files(dir)? {
        let bytes = fs::read(&path).map_err(|source| EngineError::Read { path: path.clone(), source })?;
        let file = tensors::parse(&path, &bytes)?;
        collect(&path, &file, layout, tied, device, &mut found)?;
    }
    let tensors = layout
        .tensors
        .iter()
        .map(|spec| {
            found.remove(&spec.name).ok_or_else(|| EngineError::Model {
                path: dir.join(WEIGHTS),
                what: format!("tensor `{}` {:?} is missing", spec.name, spec.shape),
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(Weights { layout: layout.clone(), tensors })
}

fn weight_files(dir: &Path) -> Result<Vec<PathBuf>, EngineError> {
    let index = dir.join(INDEX);
    if dir.join(WEIGHTS).exists() || !index.exists() {
        return Ok(vec![dir.join(WEIGHTS)]);
    }
    let json = read_object(&index)?;
    let Some(map) = json.get("weight_map").and_then(Value::as_object) else {
        return Err(EngineError::Model { path: index, what: "the object `weight_map` is missing".to_owned() });
    };
    let mut files: Vec<PathBuf> = map.values().filter_map(Value::as_str).map(|file| dir.join(file)).collect();
    files.sort();
    files.dedup();
    Ok(files)
}

fn collect(
    path: &Path,
    file: &SafeTensors<'_>,
    layout: &Layout,
    tied: bool,
    device: &Device,
    found: &mut HashMap<String, Tensor<2>>,
) -> Result<(), EngineError> {
    let wrong = |what: String| EngineError::Model { path: path.to_owned(), what };
    for (name, view) in file.tensors() {
        let Some(spec) = layout.tensors.iter().find(|spec| spec.name == name) else {
            let known = name.ends_with("rotary_emb.inv_freq") || (tied && name == "lm_head.weight");
            if known {
                continue;
            }
            return Err(wrong(format!(
                "tensor `{name}` does not belong to the architecture that config.json describes; check `architectures` and `tie_word_embeddings` there"
            )));
        };
        let values = tensors::read_f32(&name, &view, &spec.shape).map_err(wrong)?;
        found.insert(name, tensors::matrix(values, spec.matrix(), device));
    }
    Ok(())
}

/// Writes the optimiser state as a directory of its own.
pub(crate) fn write_optimizer(dir: &Path, layout: &Layout, state: &OptimizerState) -> Result<(), EngineError> {
    let wrong = |what: String| EngineError::OptimizerState { path: dir.to_owned(), what };
    let mut stored = BTreeMap::new();
    for (kind, moments) in [("exp_avg", &state.mean), ("exp_avg_sq", &state.square)] {
        for (spec, tensor) in layout.tensors.iter().zip(moments) {
            let values = tensors::values(tensor).map_err(wrong)?;
            stored.insert(format!("{kind}.{}", spec.name), Stored::new(&values, &spec.shape, SaveDtype::F32));
        }
    }
    let metadata = HashMap::from([("step".to_owned(), state.step.to_string())]);
    let bytes = tensors::serialize(stored, metadata).map_err(wrong)?;
    write_directory(dir, &[(OPTIMIZER, &bytes)])
}

/// Reads what [`write_optimizer`] wrote.
pub(crate) fn read_optimizer(dir: &Path, layout: &Layout, device: &Device) -> Result<OptimizerState, EngineError> {
    let path = dir.join(OPTIMIZER);
    let wrong = |what: String| EngineError::OptimizerState { path: path.clone(), what };
    let bytes = fs::read(&path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    let file = tensors::parse(&path, &bytes)?;
    let step = SafeTensors::read_metadata(&bytes)
        .ok()
        .and_then(|(_, metadata)| metadata.metadata().as_ref()?.get("step")?.parse().ok())
        .ok_or_else(|| wrong("the metadata entry `step` is missing".to_owned()))?;
    let moments = |kind: &str| {
        layout
            .tensors
            .iter()
            .map(|spec| {
                let name = format!("{kind}.{}", spec.name);
                let view = file.tensor(&name).map_err(|_| wrong(format!("tensor `{name}` is missing")))?;
                let values = tensors::read_f32(&name, &view, &spec.shape).map_err(wrong)?;
                Ok(tensors::matrix(values, spec.matrix(), device))
            })
            .collect::<Result<Vec<_>, EngineError>>()
    };
    Ok(OptimizerState { step, mean: moments("exp_avg")?, square: moments("exp_avg_sq")? })
}

fn read_object(path: &Path) -> Result<Map<String, Value>, EngineError> {
    let bytes = fs::read(path).map_err(|source| EngineError::Read { path: path.to_owned(), source })?;
    parse_object(path, &bytes)
}

fn parse_object(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, EngineError> {
    serde_json::from_slice(bytes)
        .map_err(|error| EngineError::Model { path: path.to_owned(), what: format!("not a JSON object: {error}") })
}
