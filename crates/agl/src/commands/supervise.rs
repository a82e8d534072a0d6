//! `agl supervise`: what the controller re-executes for every attempt.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

/// See [`agl_controller::supervisor`].
#[derive(Args)]
pub struct SuperviseArgs {
    /// The attempt's folder.
    dir: PathBuf,
}

/// Runs one attempt to its end.
pub fn supervise(args: &SuperviseArgs) -> ExitCode {
    agl_controller::supervisor::main(&args.dir)
}
