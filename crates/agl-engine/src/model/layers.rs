//! What differs from layer to layer: how far back attention sees, and how it knows positions.

use serde_json::Value;

use super::config::Family;
use super::keys::Keys;
use super::rope::{GLOBAL, LOCAL};
use crate::EngineError;

/// One layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerPlan {
    /// Positions seen at most, the own one included; all of them if absent.
    pub window: Option<usize>,
    /// Which of the model's rotary embeddings; none if absent.
    pub rope: Option<usize>,
}

/// Reads `layer_types` or what older configurations say in its place, and where SmolLM3 leaves out the rotation.
pub(super) fn layer_plans(keys: &Keys<'_>, family: Family, layers: usize) -> Result<Vec<LayerPlan>, EngineError> {
    let rotated = rotated_layers(keys, family, layers)?;
    let window = window(keys, family)?;
    let local = match keys.per_layer("layer_types", layers, is_local, "full_attention and sliding_attention")? {
        Some(stated) => stated,
        None => local_layers(keys, family, window.is_some(), &rotated)?,
    };
    let plan = |(local, rotated): (bool, bool)| {
        let rope = if local && family == Family::Gemma3 { LOCAL } else { GLOBAL };
        LayerPlan { window: window.filter(|_| local), rope: rotated.then_some(rope) }
    };
    if window.is_none() && local.contains(&true) {
        return Err(keys.wrong(match family {
            Family::Llama => "`layer_types` contains sliding_attention, which LlamaForCausalLM does not have".to_owned(),
            _ => "`layer_types` contains sliding_attention, but `use_sliding_window` is not true or `sliding_window` is missing"
                .to_owned(),
        }));
    }
    Ok(local.into_iter().zip(rotated).map(plan).collect())
}

fn is_local(entry: &Value) -> Option<bool> {
    match entry.as_str()? {
        "sliding_attention" => Some(true),
        "full_attention" => Some(false),
        _ => None,
    }
}

/// The window of the model's local layers.
fn window(keys: &Keys<'_>, family: Family) -> Result<Option<usize>, EngineError> {
    match family {
        Family::Llama => Ok(None),
        Family::Gemma3 => Ok(Some(keys.size_or("sliding_window", 4096)?)),
        Family::Qwen3 | Family::Qwen2 | Family::SmolLm3 => match keys.flag_or("use_sliding_window", false)? {
            true => keys.size_if_present("sliding_window"),
            false => Ok(None),
        },
    }
}

/// Which layers are local in a configuration without `layer_types`.
fn local_layers(keys: &Keys<'_>, family: Family, has_window: bool, rotated: &[bool]) -> Result<Vec<bool>, EngineError> {
    let numbers = 0..rotated.len();
    Ok(match family {
        _ if !has_window => vec![false; rotated.len()],
        Family::Llama => vec![false; rotated.len()],
        Family::Qwen3 | Family::Qwen2 => {
            let whole = match keys.value("max_window_layers") {
                Some(value) if value.as_u64() == Some(0) => 0,
                _ => keys.size_or("max_window_layers", 28)?,
            };
            numbers.map(|layer| layer >= whole).collect()
        }
        Family::SmolLm3 => rotated.iter().map(|rotated| !rotated).collect(),
        Family::Gemma3 => {
            let pattern = keys.size_or("sliding_window_pattern", 6)?;
            numbers.map(|layer| !(layer + 1).is_multiple_of(pattern)).collect()
        }
    })
}

/// Which layers rotate queries and keys.
fn rotated_layers(keys: &Keys<'_>, family: Family, layers: usize) -> Result<Vec<bool>, EngineError> {
    if family != Family::SmolLm3 {
        return Ok(vec![true; layers]);
    }
    // In spite of its name an entry of 1 means that the layer has rotary embedding.
    let flag = |entry: &Value| entry.as_u64().filter(|flag| *flag <= 1).map(|flag| flag == 1).or(entry.as_bool());
    if let Some(stated) = keys.per_layer("no_rope_layers", layers, flag, "0 and 1")? {
        return Ok(stated);
    }
    let interval = keys.size_or("no_rope_layer_interval", 4)?;
    Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect())
}
