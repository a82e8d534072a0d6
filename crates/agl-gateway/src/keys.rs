//! Who may do what.
//!
//! The server key opens everything. Each attempt has two keys of its own, which open nothing but that attempt's proxy and
//! event URLs: they are HMACs over (rollout, attempt, scope), so that checking one needs no look-up before its signature has
//! been found right, and a gateway that is restarted on the same store with the same server key mints the same.

use agl_core::attempt::Attempt;
use axum::http::{HeaderMap, Uri, header};
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

use crate::error::ApiError;

/// What an attempt's key opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The attempt's proxy and its events. Ends with the agent's process.
    Agent,
    /// The attempt's events, for its evaluator. Ends with the attempt.
    Reward,
}

impl Scope {
    const ALL: [Self; 2] = [Self::Agent, Self::Reward];

    fn prefix(self) -> &'static str {
        match self {
            Self::Agent => "agl-agent-",
            Self::Reward => "agl-reward-",
        }
    }

    /// Why the key of this scope no longer works, if it does not.
    pub(crate) fn ended(self, attempt: &Attempt) -> Option<String> {
        let over = match self {
            Self::Agent => attempt.agent_ended || attempt.state.is_terminal(),
            Self::Reward => attempt.state.is_terminal(),
        };
        let whose = match self {
            Self::Agent => "agent",
            Self::Reward => "evaluator",
        };
        over.then(|| {
            format!(
                "The {whose} of attempt {} of rollout {} has ended, and its key with it",
                attempt.attempt_id, attempt.rollout_id
            )
        })
    }
}

/// What a request may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Everything.
    Full,
    /// Nobody asked for a key, as none is set: everything but the reward that only the evaluator may give.
    Anonymous,
    /// What the scope allows on the attempt it was checked for.
    Attempt(Scope),
}

impl Access {
    /// True for the agent's key, and for a caller that shows none: it may be the agent.
    pub(crate) fn is_agent(self) -> bool {
        matches!(self, Self::Attempt(Scope::Agent) | Self::Anonymous)
    }
}

/// The secrets of this gateway.
pub(crate) struct Keys {
    /// Empty: no authentication.
    server: String,
    secret: [u8; 32],
}

impl Keys {
    /// `stored` is the store's random secret. With it in the signature, whoever has an attempt's key cannot try out server
    /// keys on it; with the server key in it, a new server key ends the attempt keys made under the old one.
    pub(crate) fn new(server: String, stored: [u8; 32]) -> Self {
        let hash = Sha256::new().chain_update(b"agl attempt keys\0").chain_update(stored);
        let secret = hash.chain_update(server.as_bytes()).finalize().into();
        Self { server, secret }
    }

    /// The key of an attempt; always the same one.
    pub(crate) fn mint(&self, scope: Scope, rollout_id: &str, attempt_id: &str) -> String {
        let tag = self.sign(scope, rollout_id, attempt_id).finalize().into_bytes();
        let mut key = scope.prefix().to_owned();
        for byte in tag {
            key.push(char::from(HEX[usize::from(byte >> 4)]));
            key.push(char::from(HEX[usize::from(byte & 15)]));
        }
        key
    }

    /// What these credentials open on management URLs (`attempt` is `None`) or on those of one attempt.
    pub(crate) fn check(&self, presented: &[String], attempt: Option<(&str, &str)>) -> Result<Access, ApiError> {
        if presented.iter().any(|key| !self.server.is_empty() && self.is_server_key(key)) {
            return Ok(Access::Full);
        }
        if let Some((rollout_id, attempt_id)) = attempt {
            let scope = Scope::ALL.into_iter().find(|scope| {
                let tag = presented.iter().filter_map(|key| unhex(key.strip_prefix(scope.prefix())?));
                tag.into_iter().any(|tag| self.sign(*scope, rollout_id, attempt_id).verify_slice(&tag).is_ok())
            });
            if let Some(scope) = scope {
                return Ok(Access::Attempt(scope));
            }
        }
        // Without a server key anybody is welcome, except somebody who shows the key of another attempt.
        let shows_attempt_key =
            presented.iter().any(|key| Scope::ALL.iter().any(|scope| key.starts_with(scope.prefix())));
        if self.server.is_empty() && !shows_attempt_key { Ok(Access::Anonymous) } else { Err(ApiError::unauthorized()) }
    }

    /// Compares MACs of both, in constant time, so that neither length nor content can be found out by timing.
    fn is_server_key(&self, presented: &str) -> bool {
        let mac = |key: &str| keyed(&self.secret).chain_update(b"server\0").chain_update(key.as_bytes());
        mac(presented).verify_slice(&mac(&self.server).finalize().into_bytes()).is_ok()
    }

    fn sign(&self, scope: Scope, rollout_id: &str, attempt_id: &str) -> Hmac<Sha256> {
        // Lengths go before the names: no two pairs of names give the same message.
        keyed(&self.secret)
            .chain_update(scope.prefix().as_bytes())
            .chain_update((rollout_id.len() as u64).to_le_bytes())
            .chain_update(rollout_id.as_bytes())
            .chain_update(attempt_id.as_bytes())
    }
}

const HEX: &[u8; 16] = b"0123456789abcdef";

fn keyed(secret: &[u8; 32]) -> Hmac<Sha256> {
    #[expect(clippy::expect_used, reason = "HMAC takes a key of any length")]
    Hmac::new_from_slice(secret).expect("HMAC takes a key of any length")
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let digit = |byte: u8| HEX.iter().position(|&known| known == byte);
    let byte = |pair: &[u8; 2]| u8::try_from(digit(pair[0])? * 16 + digit(pair[1])?).ok();
    if rest.is_empty() { pairs.iter().map(byte).collect() } else { None }
}

/// Every key that a request shows: `Authorization: Bearer`, `x-api-key`, `x-goog-api-key` or `?key=`.
pub(crate) fn presented(headers: &HeaderMap, uri: &Uri) -> Vec<String> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text(header::AUTHORIZATION.as_str()).and_then(|value| value.strip_prefix("Bearer "));
    let query = uri.query().unwrap_or_default().as_bytes();
    let from_query =
        form_urlencoded::parse(query).filter(|(name, _)| name == "key").map(|(_, value)| value.into_owned());
    let from_headers = [bearer, text("x-api-key"), text("x-goog-api-key")].into_iter().flatten().map(str::to_owned);
    from_headers.chain(from_query).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(server: &str) -> Keys {
        Keys::new(server.to_owned(), [9; 32])
    }

    fn check(keys: &Keys, key: &str, attempt: Option<(&str, &str)>) -> Option<Access> {
        keys.check(&[key.to_owned()], attempt).ok()
    }

    #[test]
    fn the_server_key_opens_everything_and_nothing_like_it_does() {
        let keys = keys("s3cret");
        assert_eq!(check(&keys, "s3cret", None), Some(Access::Full));
        assert_eq!(check(&keys, "s3cret", Some(("r", "0"))), Some(Access::Full));
        for wrong in ["", "s3cre", "s3cret ", "S3CRET"] {
            assert_eq!(check(&keys, wrong, None), None, "{wrong:?}");
        }
        assert!(keys.check(&[], None).is_err());
    }

    #[test]
    fn an_attempt_key_opens_its_own_attempt_only() {
        let keys = keys("s3cret");
        let agent = keys.mint(Scope::Agent, "r", "0");
        let reward = keys.mint(Scope::Reward, "r", "0");
        assert_eq!(check(&keys, &agent, Some(("r", "0"))), Some(Access::Attempt(Scope::Agent)));
        assert_eq!(check(&keys, &reward, Some(("r", "0"))), Some(Access::Attempt(Scope::Reward)));
        assert_eq!(check(&keys, &agent, Some(("r", "1"))), None);
        assert_eq!(check(&keys, &agent, Some(("s", "0"))), None);
        assert_eq!(check(&keys, &agent, None), None);
        assert_eq!(check(&keys, &agent.replace("agent", "reward"), Some(("r", "0"))), None);
    }

    #[test]
    fn names_that_run_together_have_different_keys() {
        let keys = keys("s3cret");
        assert_ne!(keys.mint(Scope::Agent, "r1", "0"), keys.mint(Scope::Agent, "r", "10"));
    }

    #[test]
    fn an_attempt_key_depends_on_the_server_key_and_on_the_stores_secret_and_survives_a_restart() {
        let mint = |server: &str, stored| Keys::new(server.to_owned(), stored).mint(Scope::Agent, "r", "0");
        assert_eq!(mint("s3cret", [9; 32]), mint("s3cret", [9; 32]));
        assert_ne!(mint("s3cret", [9; 32]), mint("s3cret", [8; 32]));
        assert_ne!(mint("s3cret", [9; 32]), mint("other", [9; 32]));
    }

    #[test]
    fn without_a_server_key_everybody_may_do_everything_except_with_a_wrong_attempt_key() {
        let keys = keys("");
        assert_eq!(keys.check(&[], None).unwrap(), Access::Anonymous);
        let agent = keys.mint(Scope::Agent, "r", "0");
        assert_eq!(check(&keys, &agent, Some(("r", "0"))), Some(Access::Attempt(Scope::Agent)));
        assert_eq!(check(&keys, &agent, Some(("other", "0"))), None);
    }

    #[test]
    fn keys_are_taken_from_every_place_an_sdk_puts_them() {
        let mut headers = HeaderMap::new();
        headers.insert("authorization", "Bearer a".parse().unwrap());
        headers.insert("x-api-key", "b".parse().unwrap());
        headers.insert("x-goog-api-key", "c".parse().unwrap());
        assert_eq!(presented(&headers, &"/x?key=d%20e".parse().unwrap()), ["a", "b", "c", "d e"]);
    }
}
