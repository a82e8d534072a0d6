//! Where an attempt's agent finds the gateway. Pure.

use std::collections::BTreeMap;

use crate::runner::Order;
use crate::work_dir::escape;

/// Names of environment variables whose value is the attempt's key; the first is ours, the others SDKs read by themselves.
pub const KEY_NAMES: [&str; 4] = ["AGL_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"];

/// The gateway's URLs for one attempt.
#[derive(Clone, Debug)]
pub struct AgentAddress {
    /// `…/proxy/rollout/R/attempt/A/mode/M`.
    proxy: String,
    events: String,
}

impl AgentAddress {
    /// Those of an attempt; `agent_url` is the gateway as agents reach it, without a trailing slash.
    #[must_use]
    pub fn new(agent_url: &str, rollout_id: &str, attempt_id: &str, mode: &str) -> Self {
        let (rollout, attempt) = (escape(rollout_id), escape(attempt_id));
        Self {
            proxy: format!("{agent_url}/proxy/rollout/{rollout}/attempt/{attempt}/mode/{mode}"),
            events: format!("{agent_url}/api/rollouts/{rollout}/attempt/{attempt}/events"),
        }
    }

    /// Those of an attempt that is to be started.
    #[must_use]
    pub fn of(order: &Order) -> Self {
        let rollout = &order.rollout;
        Self::new(&order.agent_url, &rollout.rollout_id, &order.attempt_id, rollout.mode())
    }

    /// The base URL of a dialect: what its SDKs put their own paths behind.
    #[must_use]
    pub fn base_url(&self, dialect: &str) -> String {
        format!("{}/{dialect}", self.proxy)
    }

    /// Where events are posted.
    #[must_use]
    pub fn event_url(&self) -> &str {
        &self.events
    }

    /// The variables that tell an agent where to go; its key ([`KEY_NAMES`]) is not among them. With `sdk` also the names
    /// that SDKs read by themselves.
    #[must_use]
    pub fn environment(&self, sdk: bool) -> BTreeMap<String, String> {
        let openai = self.base_url("openai/v1");
        let ours = [("AGL_OPENAI_BASE_URL", openai.clone()), ("AGL_EVENT_URL", self.events.clone())];
        let theirs = [
            ("OPENAI_BASE_URL", openai.clone()),
            ("OPENAI_API_BASE", openai),
            ("ANTHROPIC_BASE_URL", self.base_url("anthropic")),
            ("GOOGLE_GEMINI_BASE_URL", self.base_url("gemini")),
        ];
        let theirs = theirs.into_iter().filter(|_| sdk);
        ours.into_iter().chain(theirs).map(|(name, url)| (name.to_owned(), url)).collect()
    }

    /// The names under which an agent gets its key.
    #[must_use]
    pub fn key_names(sdk: bool) -> &'static [&'static str] {
        if sdk { &KEY_NAMES } else { &KEY_NAMES[..1] }
    }
}
