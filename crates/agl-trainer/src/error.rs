//! What can stop a training run, worded for the person who must act on it.

use std::path::PathBuf;

use agl_client::ClientError;
use agl_engine::EngineError;

/// An error of the trainer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainerError {
    /// A key of the configuration cannot be used.
    #[error("`{key}` {what}")]
    Config {
        /// The key.
        key: &'static str,
        /// What is wrong with it and what would be right.
        what: String,
    },
    /// A data file cannot be used.
    #[error("{path}: {what}", path = path.display())]
    Data {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the line where there is one.
        what: String,
    },
    /// A file of the run cannot be read or written.
    #[error("{path}: {source}; check the folder's permissions and free space", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file of the run does not say what it should.
    #[error("{path} is not readable as a file of this run: {what}", path = path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The output folder holds a run already.
    #[error("{path} holds a run already; continue it with --resume, or choose another folder (trainer.default_local_dir, or --out of the quickstart)", path = path.display())]
    RunExists {
        /// The folder.
        path: PathBuf,
    },
    /// There is nothing to resume.
    #[error("{path} holds no run to resume; start one without --resume", path = path.display())]
    NothingToResume {
        /// The folder.
        path: PathBuf,
    },
    /// Another trainer works in the folder.
    #[error("{path} is in use by another trainer; stop it, or choose another folder (trainer.default_local_dir, or --out of the quickstart)", path = path.display())]
    Locked {
        /// The folder.
        path: PathBuf,
    },
    /// Rollouts did not end in time.
    #[error(
        "{open} of {all} rollouts did not end within {waited} s ({example} for one); is a controller running, and does it reach the gateway?"
    )]
    Waited {
        /// How many are open.
        open: usize,
        /// Of how many.
        all: usize,
        /// How long was waited.
        waited: u64,
        /// One of them.
        example: String,
    },
    /// Calls at the upstream did not end.
    #[error("{inflight} model calls are still at the server after {waited} s of pause; the update cannot begin")]
    Drain {
        /// How many.
        inflight: u64,
        /// How long was waited.
        waited: u64,
    },
    /// Every rollout of a step was unusable.
    #[error("none of the {rollouts} rollouts of step {step} can be trained on: {why}")]
    NothingUsable {
        /// The step.
        step: u64,
        /// How many rollouts it had.
        rollouts: usize,
        /// The commonest reasons, and what to do.
        why: String,
    },
    /// Every rollout of a validation was unusable.
    #[error("none of the {rollouts} rollouts of the validation after step {step} counts: {why}")]
    NothingEvaluated {
        /// The step.
        step: u64,
        /// How many rollouts it had.
        rollouts: usize,
        /// The commonest reasons, and what to do.
        why: String,
    },
    /// Somebody asked the run to stop.
    #[error("the run was interrupted after step {step}; --resume goes on from its newest checkpoint")]
    Interrupted {
        /// Steps done.
        step: u64,
    },
    /// The picture could not be drawn.
    #[error("{path} cannot be drawn: {what}", path = path.display())]
    Picture {
        /// The file.
        path: PathBuf,
        /// Why.
        what: String,
    },
    /// The model server of the engine cannot listen.
    #[error("the policy's model server cannot listen on {address}: {source}; choose another with model.listen")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The gateway.
    #[error(transparent)]
    Gateway(#[from] ClientError),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A worker thread ended without an answer.
    #[error("a worker of the trainer ended early: {0}")]
    Worker(#[from] tokio::task::JoinError),
}

impl TrainerError {
    /// For `map_err` on file operations.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}
