//! The training loop: enqueue groups of rollouts, wait for whole groups, credit, update, publish, go on.
//!
//! * [`train`] — the loop itself; what happens in a step stands there, top to bottom.
//! * [`run`] — what a run is configured by, and what it tells and leaves behind.
//! * [`serving`] — the policy's model server, and its place in the gateway.
//! * [`evaluate`] — rollouts without training: validation, and `agl eval`.
//! * [`config`] — every key of the `[data]`, `[rollout]`, `[algorithm]`, `[actor]` and `[trainer]` sections.
//! * [`data`] — tasks from jsonl and parquet files, and the order they are taken in.
//! * [`collect`] — rollouts from their creation to their training sequences.
//! * [`measure`] — what the policy before the update and the reference policy say of the sampled tokens; [`correction`] — what is
//!   done where the sampling policy is another.
//! * [`update`] — from collected rollouts to the rows of the optimiser's updates.
//! * [`checkpoint`] — what is on disk, and how a run goes on from it.
//! * `describe` — from rollouts, credit and updates to the metrics of a step; [`alarms`] — which of them a person should look at.
//! * [`metrics`], [`tensorboard`], [`picture`] — what a person sees of it.

pub mod alarms;
pub mod checkpoint;
pub mod collect;
pub mod config;
pub mod correction;
pub mod data;
mod describe;
pub mod error;
pub mod evaluate;
pub mod measure;
pub mod metrics;
pub mod picture;
pub mod run;
pub mod serving;
pub mod tensorboard;
pub mod train;
pub mod update;

pub use config::{ActorConfig, AlgorithmConfig, DataConfig, ModelConfig, RolloutSection, TrainerConfig};
pub use error::TrainerError;
pub use run::{Progress, RunSummary, Settings};
pub use train::Trainer;
