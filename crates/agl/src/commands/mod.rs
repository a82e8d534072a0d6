//! One file per command.

pub mod eval;
pub mod models;
pub mod quickstart;
pub mod rollouts;
pub mod run;
pub mod sft;
pub mod supervise;
