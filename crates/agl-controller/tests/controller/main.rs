//! The controller with real processes.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "the lints exempt test functions, but not the functions that they share"
)]

mod agents;
mod end_to_end;
mod gateway;
mod isolation;
mod recovery;
mod scenarios;
mod stage;
