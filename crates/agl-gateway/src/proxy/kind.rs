//! What inference servers understand beyond the common interface: how they are asked for token ids and log-probs, and whether they
//! take a seed. Where the answers have them is [`answer`](super::answer)'s business; it looks in every known place.

use serde_json::{Value, json};

use super::request::{Mode, UpstreamPath};
use crate::config::DefaultProxyConfig;

/// A kind of server, by the name it is registered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Anything that takes vLLM's extensions; what is registered without a kind.
    OpenAi,
    /// vLLM, 0.10.2 or later.
    Vllm,
    /// SGLang, with `return_token_ids` (July 2026 or later).
    Sglang,
    /// `agl models serve`, and the trainer's own server.
    Agl,
    /// Somebody else's API: it gets what the harness sent, and no field that it might refuse.
    External,
}

impl Kind {
    pub(crate) const ALL: [Self; 5] = [Self::OpenAi, Self::Vllm, Self::Sglang, Self::Agl, Self::External];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Agl => "agl",
            Self::External => "external",
        }
    }

    /// The kind of that name.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// True where the same seed gives the same answer. Others refuse the field, or sample in batches that differ.
    pub(crate) fn takes_seed(self) -> bool {
        self == Self::Agl
    }

    /// True where answers can be trained on unless the registration says otherwise.
    pub(crate) fn gives_ids(self) -> bool {
        self != Self::External
    }

    /// The fields that ask for token ids and log-probs.
    pub(crate) fn extras(
        self,
        mode: Mode,
        path: UpstreamPath,
        config: &DefaultProxyConfig,
    ) -> Vec<(&'static str, Value)> {
        let mut extras = Vec::new();
        if !self.gives_ids() {
            return extras;
        }
        if config.override_return_token_ids {
            extras.push(("return_token_ids", json!(true)));
        }
        if mode == Mode::Train && config.include_log_probs && config.override_logprobs {
            // A number for completions: how many alternatives.
            let wanted = if path == UpstreamPath::ChatCompletions { json!(true) } else { json!(1) };
            extras.push(("logprobs", wanted));
        }
        extras
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extras(kind: Kind, mode: Mode, path: UpstreamPath) -> Value {
        let extras = kind.extras(mode, path, &DefaultProxyConfig::default());
        extras.into_iter().map(|(key, value)| (key.to_owned(), value)).collect::<serde_json::Map<_, _>>().into()
    }

    #[test]
    fn training_asks_for_ids_and_log_probs_validation_for_ids_and_an_external_api_is_asked_for_neither() {
        let chat = UpstreamPath::ChatCompletions;
        assert_eq!(extras(Kind::Vllm, Mode::Train, chat), json!({"return_token_ids": true, "logprobs": true}));
        assert_eq!(extras(Kind::Vllm, Mode::Val, chat), json!({"return_token_ids": true}));
        assert_eq!(extras(Kind::External, Mode::Train, chat), json!({}));
    }

    #[test]
    fn completions_take_log_probs_as_a_number() {
        let asked = extras(Kind::OpenAi, Mode::Train, UpstreamPath::Completions);
        assert_eq!(asked, json!({"return_token_ids": true, "logprobs": 1}));
    }

    #[test]
    fn what_is_asked_for_can_be_turned_off() {
        let off = DefaultProxyConfig {
            override_return_token_ids: false,
            override_logprobs: false,
            ..DefaultProxyConfig::default()
        };
        assert_eq!(Kind::Vllm.extras(Mode::Train, UpstreamPath::ChatCompletions, &off), []);
    }
}
