//! What an error of the API server means for a request. Pure.

use std::time::Duration;

use kube::Error;

/// How long a namespace that is full is left alone.
const QUOTA_WAIT: Duration = Duration::from_secs(5);
/// How long an API server that is overloaded and does not say how long is left alone.
const OVERLOAD_WAIT: Duration = Duration::from_secs(1);

/// What to do about a request that failed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Nobody should ask for anything for so long: the API server is overloaded, or the namespace is full.
    Overloaded(Duration, String),
    /// It may go well the next time.
    Transient(String),
    /// There is one of this name already.
    Exists,
    /// There is none of this name.
    NotFound(String),
    /// Somebody changed it in between.
    Conflict,
    /// What we sent is wrong and stays so.
    Invalid(String),
    /// We may not, or the namespace does not exist.
    Forbidden(String),
}

impl Refusal {
    pub(super) fn of(error: &Error) -> Self {
        let Error::Api(status) = error else { return Self::Transient(error.to_string()) };
        let message = status.message.clone();
        let asked = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
        let wait = if asked == 0 { OVERLOAD_WAIT } else { Duration::from_secs(u64::from(asked)) };
        match (status.code, status.reason.as_str()) {
            (409, "AlreadyExists") => Self::Exists,
            (409, _) => Self::Conflict,
            (429, _) => Self::Overloaded(wait, message),
            (403, _) if message.contains("exceeded quota") => Self::Overloaded(QUOTA_WAIT, message),
            (404, _) => Self::NotFound(message),
            (401 | 403, _) => Self::Forbidden(message),
            (400 | 413 | 422, _) => Self::Invalid(message),
            _ => Self::Transient(format!("status {}: {message}", status.code)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;

    fn of(code: u16, reason: &str, message: &str) -> Refusal {
        let status = Status::failure(message, reason).with_code(code);
        Refusal::of(&Error::Api(status.boxed()))
    }

    #[test]
    fn an_error_says_whether_to_wait_to_try_again_or_to_give_up() {
        assert_eq!(of(409, "AlreadyExists", ""), Refusal::Exists);
        assert_eq!(of(409, "Conflict", ""), Refusal::Conflict);
        assert!(matches!(of(429, "TooManyRequests", "slow"), Refusal::Overloaded(OVERLOAD_WAIT, _)));
        assert!(matches!(of(403, "Forbidden", "exceeded quota: jobs"), Refusal::Overloaded(QUOTA_WAIT, _)));
        assert!(matches!(of(403, "Forbidden", "may not create"), Refusal::Forbidden(_)));
        assert!(matches!(of(422, "Invalid", "spec"), Refusal::Invalid(_)));
        assert!(matches!(of(503, "ServiceUnavailable", ""), Refusal::Transient(_)));
        assert!(matches!(of(404, "NotFound", "namespaces \"x\" not found"), Refusal::NotFound(_)));
    }
}
