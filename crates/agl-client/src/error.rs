//! What can go wrong between us and the gateway.

use std::time::Duration;

/// A call to the gateway that did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address of the gateway is no HTTP address.
    #[error("the gateway's address {url:?} is not usable: {reason}; write it as http://HOST:PORT")]
    Address {
        /// As it was given.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Nobody answered, or the connection broke and the call may not be repeated.
    #[error(
        "the gateway does not answer at {url} (tried for {:.1} s): {source}; is `agl serve` running, and is the address right?",
        waited.as_secs_f64()
    )]
    Unreachable {
        /// What was asked for.
        url: String,
        /// How long we tried.
        waited: Duration,
        /// The last thing that went wrong.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The gateway answered with an error status.
    #[error("the gateway refused {method} {url} with {status}: {detail}{}", remedy(*status))]
    Refused {
        /// HTTP status.
        status: u16,
        /// HTTP method.
        method: String,
        /// What was asked for.
        url: String,
        /// The `detail` of its answer.
        detail: String,
    },
    /// The gateway's answer is not of the form we know.
    #[error(
        "the answer of {url} is not what this version of agl expects: {source}; gateway and client should be the same version"
    )]
    Decode {
        /// What was asked for.
        url: String,
        /// Where it deviates.
        source: serde_json::Error,
    },
    /// What we were given to send cannot be written as JSON.
    #[error("the request for {url} cannot be written as JSON: {source}")]
    Encode {
        /// What was asked for.
        url: String,
        /// Why.
        source: serde_json::Error,
    },
}

impl ClientError {
    /// The HTTP status, where the gateway refused.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// True where what was asked for does not exist (any more).
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.status() == Some(404)
    }

    /// True where the state machine refused the step.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        self.status() == Some(409)
    }
}

fn remedy(status: u16) -> &'static str {
    match status {
        401 => "; give the key that the gateway was started with",
        403 => "; this key does not open that: use the gateway's server key",
        _ => "",
    }
}
