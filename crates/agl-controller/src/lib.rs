//! Turns queued rollouts into running agents and reports what became of them.
//!
//! The controller watches the gateway. For every queued rollout it makes an attempt, and for every attempt a small
//! supervisor process, which owns the agent: it limits its time and its logs, runs the evaluator after it, and keeps the
//! outcome on disk. A controller that is killed loses nothing: its successor finds the supervisors and their records in
//! the work directory.
//!
//! * [`config`] — what can be set.
//! * [`reconcile`] — the loop: what changed, what is due, who has ended.
//! * [`attempt`] — the life of one attempt, from its keys to its verdict.
//! * [`launch`] — a rollout's configuration as commands and environments. Pure.
//! * [`isolation`] — what stands between an agent and the machine, as it is configured. Pure.
//! * [`verdict`] — whose failure it was, and what follows. Pure.
//! * [`supervised`] — the controller's end of a supervisor, its own or one that it found.
//! * [`supervisor`] — the supervisor process.
//! * [`work_dir`] — where everything lies on disk.
//! * [`process_id`] — a process that cannot be mistaken for a later one of the same number.

pub mod attempt;
pub mod config;
pub mod error;
pub mod isolation;
pub mod launch;
pub mod process_id;
pub mod reconcile;
pub mod supervised;
pub mod supervisor;
pub mod verdict;
pub mod work_dir;

pub use config::{ControllerConfig, OnShutdown};
pub use error::ControllerError;
pub use isolation::Isolation;
pub use reconcile::Controller;
