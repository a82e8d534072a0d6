//! The numbers of a step: one line of `metrics.jsonl`, and the same as TensorBoard scalars.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::TrainerError;
use crate::tensorboard::EventWriter;

/// The scalars of one step, by name. Names are paths such as `reward/mean` and `timing/update_seconds`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The training step; 0 is before the first.
    pub step: u64,
    /// By name.
    #[serde(flatten)]
    pub scalars: BTreeMap<String, f64>,
}

impl StepMetrics {
    /// No scalars yet.
    #[must_use]
    pub fn new(step: u64) -> Self {
        Self { step, scalars: BTreeMap::new() }
    }

    /// Sets a scalar. JSON has no infinities and no NaN, so these are left out, with a warning.
    pub fn set(&mut self, name: &str, value: f64) {
        if value.is_finite() {
            self.scalars.insert(name.to_owned(), value);
        } else {
            tracing::warn!(name, value, step = self.step, "a metric is not finite and is left out");
        }
    }

    /// A scalar, if it was set.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<f64> {
        self.scalars.get(name).copied()
    }
}

/// Writes `metrics.jsonl` and TensorBoard event files.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    events: EventWriter,
}

impl MetricsLog {
    /// Opens the log for a run that has done `step` steps; lines of later steps, from a run that was killed, are removed.
    ///
    /// # Errors
    /// Where the files cannot be written, or a line of an existing log is not readable.
    pub fn open(folder: &Path, step: u64) -> Result<Self, TrainerError> {
        let path = folder.join("metrics.jsonl");
        if path.exists() {
            let kept: Vec<StepMetrics> = read(&path)?.into_iter().filter(|line| line.step <= step).collect();
            let text: String = kept.iter().map(|line| to_line(&path, line)).collect::<Result<_, _>>()?;
            let fresh = path.with_extension("new");
            fs::write(&fresh, text).and_then(|()| fs::rename(&fresh, &path)).map_err(TrainerError::io(&path))?;
        }
        Ok(Self { events: EventWriter::create(&folder.join("tensorboard"))?, path })
    }

    /// Appends a step.
    ///
    /// # Errors
    /// Where the files cannot be written.
    pub fn append(&mut self, metrics: &StepMetrics) -> Result<(), TrainerError> {
        let line = to_line(&self.path, metrics)?;
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.path)
            .and_then(|mut file| file.write_all(line.as_bytes()))
            .map_err(TrainerError::io(&self.path))?;
        self.events.scalars(metrics.step, &metrics.scalars)
    }

    /// All steps of the run so far.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn steps(&self) -> Result<Vec<StepMetrics>, TrainerError> {
        read(&self.path)
    }
}

fn to_line(path: &Path, metrics: &StepMetrics) -> Result<String, TrainerError> {
    serde_json::to_string(metrics)
        .map(|line| line + "\n")
        .map_err(|error| TrainerError::State { path: path.to_owned(), what: error.to_string() })
}

/// Reads a `metrics.jsonl`. A last line that a crash cut short is left out.
///
/// # Errors
/// Where the file cannot be read, or another line is not readable.
pub fn read(path: &Path) -> Result<Vec<StepMetrics>, TrainerError> {
    let text = fs::read_to_string(path).map_err(TrainerError::io(path))?;
    let mut steps = Vec::new();
    for (number, line) in text.lines().enumerate() {
        match serde_json::from_str(line) {
            Ok(step) => steps.push(step),
            Err(_) if !text.ends_with('\n') && number + 1 == text.lines().count() => {}
            Err(error) => {
                return Err(TrainerError::State {
                    path: path.to_owned(),
                    what: format!("line {}: {error}", number + 1),
                });
            }
        }
    }
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, reward: f64) -> StepMetrics {
        let mut metrics = StepMetrics::new(step);
        metrics.set("reward/mean", reward);
        metrics
    }

    #[test]
    fn a_resumed_run_forgets_what_is_newer_than_its_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = MetricsLog::open(folder.path(), 0).unwrap();
        for number in 1..=4 {
            log.append(&step(number, number as f64)).unwrap();
        }
        let mut file = OpenOptions::new().append(true).open(folder.path().join("metrics.jsonl")).unwrap();
        file.write_all(b"{\"step\": 5, \"rew").unwrap();
        let mut log = MetricsLog::open(folder.path(), 2).unwrap();
        log.append(&step(3, 30.0)).unwrap();
        assert_eq!(log.steps().unwrap(), [step(1, 1.0), step(2, 2.0), step(3, 30.0)]);
    }
}
