//! What an attempt is called in a cluster or an engine, and the labels that say whose it is. Pure.

use agl_core::attempt::FIRST_ATTEMPT_ID;
use sha2::{Digest, Sha256};

/// What Kubernetes allows as a label's value and as a Job's name.
pub(super) const LONGEST: usize = 63;
/// Whose attempt an object is.
pub(super) const ROLLOUT_ID: &str = "agl/rollout-id";
/// See [`ROLLOUT_ID`].
pub(super) const ATTEMPT_ID: &str = "agl/attempt-id";
/// The label that tells the objects of several gateways or controllers apart.
pub(super) const INSTANCE: &str = "app.kubernetes.io/instance";
/// The label of all that we make.
pub(super) const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// What an object is for; the network policy of rollouts goes by it.
pub(super) const ROLE: &str = "agl/role";

/// The name of an attempt's Job and Secret, or container: `agl-rollout-{id}`, and `-{n}` for later attempts.
///
/// An id that Kubernetes does not take as it is, that makes the name too long, or that ends like an attempt's number is
/// shortened and told apart by a hash, so that no two attempts have one name.
#[must_use]
pub fn job_name(rollout_id: &str, attempt_id: &str) -> String {
    let suffix = if attempt_id == FIRST_ATTEMPT_ID { String::new() } else { format!("-{attempt_id}") };
    let plain = format!("agl-rollout-{rollout_id}{suffix}");
    let looks_like_a_retry =
        rollout_id.rsplit_once('-').is_some_and(|(_, last)| last.bytes().all(|byte| byte.is_ascii_digit()));
    let fits = plain.len() <= LONGEST
        && plain.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        && !plain.ends_with('-');
    if fits && !looks_like_a_retry {
        return plain;
    }
    let hash = short_hash(rollout_id);
    let room = LONGEST.saturating_sub("agl-rollout--".len() + hash.len() + suffix.len());
    let head: String = rollout_id
        .chars()
        .map(|character| character.to_ascii_lowercase())
        .map(|character| if character.is_ascii_lowercase() || character.is_ascii_digit() { character } else { '-' })
        .take(room)
        .collect();
    let head = head.trim_matches('-');
    let between = if head.is_empty() { "" } else { "-" };
    format!("agl-rollout-{head}{between}{hash}{suffix}")
}

/// Enough of a hash to tell ids apart.
pub(super) fn short_hash(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_a_name(name: &str) -> bool {
        let inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        name.len() <= LONGEST && name.bytes().all(inside) && !name.ends_with('-')
    }

    #[test]
    fn an_ordinary_id_names_its_job_and_its_retries() {
        assert_eq!(job_name("0198c7", "0"), "agl-rollout-0198c7");
        assert_eq!(job_name("0198c7", "2"), "agl-rollout-0198c7-2");
    }

    #[test]
    fn any_id_gives_a_name_that_kubernetes_takes_and_that_no_other_attempt_has() {
        let long = "x".repeat(200);
        let ids =
            ["a", "a-1", "A", "a_1", "a.1", "ä", "", "-", "a-", &long, &(long.clone() + "y"), "a/../b", "step-3-7"];
        let mut names = std::collections::HashSet::new();
        for id in ids {
            for attempt in ["0", "1", "12"] {
                let name = job_name(id, attempt);
                assert!(is_a_name(&name), "{name}");
                assert!(names.insert(name.clone()), "{name} is the name of two attempts");
            }
        }
    }
}
