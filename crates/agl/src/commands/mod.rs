//! One file per command.

pub mod doctor;
pub mod eval;
pub mod init;
pub mod isolate;
pub mod manifests;
pub mod models;
pub mod quickstart;
pub mod relay;
pub mod rollouts;
pub mod run;
pub mod sft;
pub mod supervise;
