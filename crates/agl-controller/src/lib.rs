//! Turns queued rollouts into running agents and reports what became of them.
//!
//! The controller watches the gateway. For every queued rollout it makes an attempt and gives it to its runner. The process
//! runner makes a small supervisor process, which owns the agent: it limits its time and its logs, runs the evaluator after
//! it, and keeps the outcome on disk. A controller that is killed loses nothing: its successor finds what it started, in the
//! work directory or in the cluster.
//!
//! * [`config`] — what can be set.
//! * [`controller`] — a controller from its beginning to its end.
//! * [`reconcile`] — the loop: what changed, what is due, who has ended.
//! * [`pace`] — how fast attempts may begin. Pure.
//! * [`plan`] — what a controller would do if it were started now.
//! * [`attempt`] — the life of one attempt, from its keys to its verdict.
//! * [`runner`] — who runs attempts, and where.
//! * [`address`] — where an agent finds the gateway. Pure.
//! * [`launch`] — a rollout's configuration as commands and environments. Pure.
//! * [`isolation`] — what stands between an agent and the machine, as it is configured. Pure.
//! * [`verdict`] — whose failure it was, and what follows. Pure.
//! * [`supervisor`] — the supervisor process.
//! * [`zygote`] — warm starts: a Python that has imported already is forked for every attempt.
//! * [`work_dir`] — where everything lies on disk.
//! * [`process_id`] — a process that cannot be mistaken for a later one of the same number.

pub mod address;
pub mod attempt;
pub mod config;
pub mod controller;
pub mod error;
pub mod isolation;
pub mod launch;
pub mod pace;
pub mod plan;
pub mod process_id;
pub mod reconcile;
pub mod runner;
pub mod supervisor;
pub mod verdict;
pub mod work_dir;
pub mod zygote;

pub use config::{ControllerConfig, OnShutdown, RunnerKind};
pub use controller::Controller;
pub use error::ControllerError;
pub use isolation::Isolation;
