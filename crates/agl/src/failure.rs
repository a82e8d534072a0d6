//! Exit codes: 0 fine, 1 failed, 2 wrong usage, 130 interrupted.

use std::process::ExitCode;

/// A mistake in what the command was given: an argument, or a key of a run file.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct UsageError(String);

/// Ctrl-C, or a request to end.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Interrupted(String);

/// An error that ends with exit code 2.
pub fn usage(message: impl Into<String>) -> anyhow::Error {
    UsageError(message.into()).into()
}

/// An error that ends with exit code 130.
pub fn interrupted(message: impl Into<String>) -> anyhow::Error {
    Interrupted(message.into()).into()
}

/// The exit code of an error.
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    if error.is::<UsageError>() {
        ExitCode::from(2)
    } else if error.is::<Interrupted>() {
        ExitCode::from(130)
    } else {
        ExitCode::FAILURE
    }
}
