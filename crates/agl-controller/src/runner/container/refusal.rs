//! What an error of the engine means for a request. Pure.

use bollard::errors::Error;

/// Words of an engine that name a start that no repetition would change.
const NEVER_STARTS: [&str; 12] = [
    "executable file not found",
    "no such file or directory",
    "permission denied",
    "not a directory",
    "is a directory",
    "exec format error",
    "bind source path does not exist",
    "duplicate mount point",
    "unknown or invalid runtime",
    "unable to find user",
    "unable to find group",
    "network not found",
];
/// Words of a registry that name an image that no repetition would bring.
const NO_SUCH_IMAGE: [&str; 9] = [
    "pull access denied",
    "repository does not exist",
    "not found",
    "manifest unknown",
    "name unknown",
    "unauthorized",
    "requested access to the resource is denied",
    "invalid reference format",
    "did not resolve to an alias",
];

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The engine does not answer. It will come back.
    Away(String),
    /// There is no such thing.
    NotFound(String),
    /// There is one of this name, or it is in the wrong state.
    Conflict(String),
    /// What we asked for is wrong and stays so.
    Wrong(String),
    /// The engine could not do it.
    Failed(String),
}

impl Refusal {
    pub(super) fn of(error: &Error) -> Self {
        match error {
            Error::DockerResponseServerError { status_code, message } => {
                let message = match message.trim() {
                    "" => format!("status {status_code}"),
                    message => message.to_owned(),
                };
                match status_code {
                    404 => Self::NotFound(message),
                    409 => Self::Conflict(message),
                    400..=499 => Self::Wrong(message),
                    502..=504 => Self::Away(message),
                    _ => Self::Failed(message),
                }
            }
            Error::DockerStreamError { error } => Self::Failed(error.trim().to_owned()),
            // It answered, if not in words that we know.
            Error::JsonDataError { .. } | Error::JsonSerdeError { .. } => Self::Failed(with_causes(error)),
            Error::DockerContainerWaitError { error, .. } => Self::Failed(error.clone()),
            other => Self::Away(with_causes(other)),
        }
    }

    /// What the engine said.
    pub(super) fn message(&self) -> &str {
        match self {
            Self::Away(message)
            | Self::NotFound(message)
            | Self::Conflict(message)
            | Self::Wrong(message)
            | Self::Failed(message) => message,
        }
    }

    /// True where another try at making or starting a container would end the same way.
    pub(super) fn is_permanent(&self) -> bool {
        match self {
            Self::NotFound(_) | Self::Wrong(_) => true,
            Self::Failed(message) => says(message, &NEVER_STARTS),
            Self::Away(_) | Self::Conflict(_) => false,
        }
    }

    /// True where an image cannot be had from its registry however often it is asked for.
    pub(super) fn is_no_such_image(&self) -> bool {
        match self {
            Self::NotFound(_) | Self::Wrong(_) => true,
            Self::Failed(message) => says(message, &NO_SUCH_IMAGE),
            Self::Away(_) | Self::Conflict(_) => false,
        }
    }
}

fn says(message: &str, words: &[&str]) -> bool {
    let message = message.to_ascii_lowercase();
    words.iter().any(|words| message.contains(words))
}

/// An error with what caused it: the outermost alone often says only that something went wrong.
fn with_causes(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(status_code: u16, message: &str) -> Refusal {
        Refusal::of(&Error::DockerResponseServerError { status_code, message: message.to_owned() })
    }

    #[test]
    fn an_error_says_whether_to_wait_to_try_again_or_to_give_up() {
        assert!(matches!(of(503, "starting"), Refusal::Away(_)));
        assert!(matches!(Refusal::of(&Error::RequestTimeoutError), Refusal::Away(_)));
        assert!(matches!(of(409, "name in use"), Refusal::Conflict(_)));
        for (status, message, permanent) in [
            (400, "invalid mount config", true),
            (404, "network mine not found", true),
            (500, "exec: \"agnt\": executable file not found in $PATH: unknown", true),
            (500, "cannot allocate memory", false),
        ] {
            assert_eq!(of(status, message).is_permanent(), permanent, "{message}");
        }
    }

    #[test]
    fn an_image_that_does_not_exist_is_told_from_a_registry_that_is_away() {
        for (status, message, gone) in [
            (404, "pull access denied for nope, repository does not exist", true),
            (500, "manifest for alpine:nope not found: manifest unknown", true),
            (500, "unauthorized: authentication required", true),
            (500, "Get \"https://registry/v2/\": dial tcp: lookup registry: no such host", false),
            (500, "received unexpected HTTP status: 503 Service Unavailable", false),
            (500, "toomanyrequests: You have reached your pull rate limit", false),
        ] {
            assert_eq!(of(status, message).is_no_such_image(), gone, "{message}");
        }
    }
}
