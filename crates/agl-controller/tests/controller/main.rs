//! The controller with real processes, and with an API server of Kubernetes and an engine of containers that the tests play.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "the lints exempt test functions, but not the functions that they share"
)]

mod agents;
mod cluster;
mod container;
mod container_real;
mod container_recovery;
mod dock;
mod end_to_end;
mod engine;
mod fleet;
mod gateway;
mod isolation;
mod kubernetes;
mod kubernetes_recovery;
mod rate;
mod recovery;
mod scenarios;
mod stage;
mod zygote;
