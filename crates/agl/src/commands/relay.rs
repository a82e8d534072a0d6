//! `agl relay`: what leads from a container without network to the gateway.

use std::process::ExitCode;

use clap::Args;

/// See [`agl_controller::runner::container::relay`].
#[derive(Args)]
pub struct RelayArgs {
    /// Which end, and what it needs.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Runs one end until it is over.
pub fn relay(args: &RelayArgs) -> ExitCode {
    agl_controller::runner::container::relay::main(&args.words)
}
