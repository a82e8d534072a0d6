//! What is on disk, and how a run goes on from it.
//!
//! ```text
//! OUT/run.json                      run id, and how often it was resumed
//! OUT/policy_version                the highest version ever published; written before it is used
//! OUT/checkpoints/step-000040/      appears whole or not at all
//!     policy/                       Hugging Face directory
//!     optimizer/                    AdamW moments
//!     state.json                    step, policy version, the rollouts consumed since the checkpoint before
//! ```

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use agl_engine::Engine;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::TrainerError;

/// Who the run is. Written once, and at every resume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunIdentity {
    /// Unique; begins the id of every rollout of the run.
    pub run_id: String,
    /// Counts the starts, from 0, so that a resumed run uses new rollout ids.
    pub generation: u64,
}

/// What a checkpoint knows beside weights and moments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointState {
    /// The run.
    pub run_id: String,
    /// Training steps done.
    pub step: u64,
    /// The policy's version.
    pub policy_version: u64,
    /// The step of the checkpoint that this one continues; `None` for the first.
    pub parent: Option<u64>,
    /// Every rollout trained on since then.
    pub consumed: Vec<String>,
    /// Model calls, rollouts, tokens and seconds of the run so far.
    pub totals: Totals,
    /// Validation reward before the first step.
    pub initial_val_reward: Option<f64>,
}

/// What a run has spent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Training rollouts.
    pub rollouts: u64,
    /// Training rows.
    pub rows: u64,
    /// Their model calls.
    pub model_calls: u64,
    /// Tokens sampled in training and validation rollouts.
    pub sampled_tokens: u64,
    /// Tokens sampled in training rollouts that an update computed the gradient of.
    pub trained_tokens: u64,
    /// Tokens that went through the training forward and backward, context included.
    pub update_tokens: u64,
    /// Seconds spent waiting for rollouts.
    pub sampling_seconds: f64,
    /// Seconds spent in updates.
    pub update_seconds: f64,
    /// Seconds of the whole run.
    pub wall_seconds: f64,
}

/// The folder of a run. Holds a lock: one trainer works in it at a time.
#[derive(Debug)]
pub struct RunFolder {
    root: PathBuf,
    _lock: File,
}

impl RunFolder {
    /// Opens a folder, creating it if need be.
    ///
    /// # Errors
    /// [`TrainerError::Locked`] where another trainer is at work in it.
    pub fn open(root: &Path) -> Result<Self, TrainerError> {
        fs::create_dir_all(root.join("checkpoints")).map_err(TrainerError::io(root))?;
        let path = root.join(".lock");
        let lock = File::create(&path).map_err(TrainerError::io(&path))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { root: root.to_owned(), _lock: lock }),
            Err(fs::TryLockError::WouldBlock) => Err(TrainerError::Locked { path: root.to_owned() }),
            Err(fs::TryLockError::Error(source)) => Err(TrainerError::Io { path, source }),
        }
    }

    /// A file of the run.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Starts the run of this folder, or continues it.
    ///
    /// # Errors
    /// [`TrainerError::RunExists`] and [`TrainerError::NothingToResume`].
    pub fn identify(&self, resume: bool) -> Result<RunIdentity, TrainerError> {
        let path = self.file("run.json");
        let identity = match (path.exists(), resume) {
            (true, false) => return Err(TrainerError::RunExists { path: self.root.clone() }),
            (false, true) => return Err(TrainerError::NothingToResume { path: self.root.clone() }),
            (false, false) => {
                let id = uuid::Uuid::now_v7().simple().to_string();
                RunIdentity { run_id: format!("run-{}", &id[..12]), generation: 0 }
            }
            (true, true) => {
                let before: RunIdentity = read_json(&path)?;
                RunIdentity { generation: before.generation + 1, ..before }
            }
        };
        write_json(&path, &identity)?;
        Ok(identity)
    }

    /// The highest policy version ever published by this run, 0 before the first.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn published_version(&self) -> Result<u64, TrainerError> {
        let path = self.file("policy_version");
        if !path.exists() { Ok(0) } else { read_json(&path) }
    }

    /// Notes a policy version before it is used, so that a crash cannot make it be used twice.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn reserve_version(&self, version: u64) -> Result<(), TrainerError> {
        write_json(&self.file("policy_version"), &version)
    }

    /// The folder of the checkpoint of `step`.
    #[must_use]
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.root.join("checkpoints").join(format!("step-{step:06}"))
    }

    /// Steps that have a checkpoint, ascending.
    ///
    /// # Errors
    /// Where the folder cannot be listed.
    pub fn checkpoints(&self) -> Result<Vec<u64>, TrainerError> {
        let folder = self.root.join("checkpoints");
        let mut steps = Vec::new();
        for entry in fs::read_dir(&folder).map_err(TrainerError::io(&folder))? {
            let name = entry.map_err(TrainerError::io(&folder))?.file_name();
            steps.extend(name.to_str().and_then(|name| name.strip_prefix("step-")?.parse::<u64>().ok()));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// Writes a checkpoint, whole or not at all, and returns its folder.
    ///
    /// # Errors
    /// Where something cannot be written; what was there before stays.
    pub fn save(&self, engine: &Engine, state: &CheckpointState) -> Result<PathBuf, TrainerError> {
        let target = self.checkpoint(state.step);
        let fresh = self.root.join("checkpoints").join(format!(".new-{:06}", state.step));
        remove(&fresh)?;
        fs::create_dir_all(&fresh).map_err(TrainerError::io(&fresh))?;
        engine.save(&fresh.join("policy"))?;
        engine.save_optimizer(&fresh.join("optimizer"))?;
        write_json(&fresh.join("state.json"), state)?;
        sync(&fresh)?;
        remove(&target)?;
        fs::rename(&fresh, &target).map_err(TrainerError::io(&target))?;
        sync(&self.root.join("checkpoints"))?;
        Ok(target)
    }

    /// The state of the checkpoint of `step`.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn state(&self, step: u64) -> Result<CheckpointState, TrainerError> {
        read_json(&self.checkpoint(step).join("state.json"))
    }

    /// Removes all but the newest `keep` checkpoints.
    ///
    /// # Errors
    /// Where one cannot be removed.
    pub fn prune(&self, keep: usize) -> Result<(), TrainerError> {
        let steps = self.checkpoints()?;
        for step in &steps[..steps.len().saturating_sub(keep.max(1))] {
            // The list of consumed rollouts stays: the lineage must be whole.
            let folder = self.checkpoint(*step);
            for part in ["policy", "optimizer"] {
                remove(&folder.join(part))?;
            }
        }
        Ok(())
    }

    /// The newest step whose checkpoint still has its weights.
    ///
    /// # Errors
    /// Where the folder cannot be listed.
    pub fn newest(&self) -> Result<Option<u64>, TrainerError> {
        Ok(self.checkpoints()?.into_iter().rev().find(|step| self.checkpoint(*step).join("policy").is_dir()))
    }
}

fn remove(folder: &Path) -> Result<(), TrainerError> {
    match fs::remove_dir_all(folder) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(TrainerError::Io { path: folder.to_owned(), source })
        }
        _ => Ok(()),
    }
}

fn sync(folder: &Path) -> Result<(), TrainerError> {
    File::open(folder).and_then(|opened| opened.sync_all()).map_err(TrainerError::io(folder))
}

/// Writes a small file durably: beside the old one, then in its place.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), TrainerError> {
    let text = serde_json::to_vec_pretty(value)
        .map_err(|error| TrainerError::State { path: path.to_owned(), what: error.to_string() })?;
    let fresh = path.with_extension("new");
    let write = || {
        let mut file = File::create(&fresh)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&fresh, path)
    };
    write().map_err(TrainerError::io(path))?;
    path.parent().map_or(Ok(()), sync)
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, TrainerError> {
    let text = fs::read(path).map_err(TrainerError::io(path))?;
    serde_json::from_slice(&text)
        .map_err(|error| TrainerError::State { path: path.to_owned(), what: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_serves_one_trainer_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let first = RunFolder::open(folder.path()).unwrap();
        assert!(matches!(RunFolder::open(folder.path()), Err(TrainerError::Locked { .. })));
        drop(first);
        RunFolder::open(folder.path()).unwrap();
    }

    #[test]
    fn a_run_is_resumed_only_when_asked_and_under_a_new_generation() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder::open(folder.path()).unwrap();
        assert!(matches!(run.identify(true), Err(TrainerError::NothingToResume { .. })));
        let first = run.identify(false).unwrap();
        assert!(matches!(run.identify(false), Err(TrainerError::RunExists { .. })));
        let second = run.identify(true).unwrap();
        assert_eq!((second.run_id, second.generation), (first.run_id, 1));
    }

    #[test]
    fn a_reserved_version_survives() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder::open(folder.path()).unwrap();
        assert_eq!(run.published_version().unwrap(), 0);
        run.reserve_version(7).unwrap();
        assert_eq!(run.published_version().unwrap(), 7);
    }
}
