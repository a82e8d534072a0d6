//! `agl isolate`: what a supervisor re-executes for an agent behind walls.

use std::process::ExitCode;

use clap::Args;

/// See [`agl_controller::supervisor::isolation`].
#[derive(Args)]
pub struct IsolateArgs {
    /// Which part of the work.
    part: String,
}

/// Runs one part of an agent's isolation to its end.
pub fn isolate(args: &IsolateArgs) -> ExitCode {
    agl_controller::supervisor::isolation::main(&args.part)
}
