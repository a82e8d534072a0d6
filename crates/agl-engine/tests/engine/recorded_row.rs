//! A training row as `scripts/parity` writes it; shared with `examples/parity_probe.rs`.

use agl_engine::TrainRow;
use serde::Deserialize;

#[derive(Clone, Deserialize)]
pub struct RecordedRow {
    pub ids: Vec<u32>,
    mask: Vec<bool>,
    weights: Vec<f32>,
    advantages: Vec<f32>,
    old_log_probs: Vec<f32>,
    importance_weights: Vec<f32>,
    ref_log_probs: Vec<f32>,
}

impl From<RecordedRow> for TrainRow {
    fn from(row: RecordedRow) -> Self {
        Self {
            ids: row.ids,
            mask: row.mask,
            weights: row.weights,
            advantages: row.advantages,
            old_log_probs: row.old_log_probs,
            importance_weights: Some(row.importance_weights),
            ref_log_probs: Some(row.ref_log_probs),
        }
    }
}
