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
    /// llama.cpp's server; see [`llamacpp`](super::llamacpp).
    LlamaCpp,
    /// Somebody else's API: it gets what the harness sent, and no field that it might refuse.
    External,
}

impl Kind {
    pub(crate) const ALL: [Self; 6] =
        [Self::OpenAi, Self::Vllm, Self::Sglang, Self::Agl, Self::LlamaCpp, Self::External];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Agl => "agl",
            Self::LlamaCpp => "llamacpp",
            Self::External => "external",
        }
    }

    /// The kind of that name.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        let name = if name == "llama.cpp" { Self::LlamaCpp.name() } else { name };
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

    /// True where a server may stream and lose nothing. Ours does not stream; llama.cpp's leaves tokens out that end inside a
    /// character.
    pub(crate) fn streams(self) -> bool {
        !matches!(self, Self::Agl | Self::LlamaCpp)
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
        if config.override_return_token_ids && self == Self::LlamaCpp {
            extras.extend([("return_tokens", json!(true)), ("verbose", json!(true))]);
        } else if config.override_return_token_ids {
            extras.push(("return_token_ids", json!(true)));
        }
        if mode == Mode::Train && config.include_log_probs && config.override_logprobs {
            // A number for completions: how many alternatives.
            let wanted = if path == UpstreamPath::ChatCompletions { json!(true) } else { json!(1) };
            extras.push(("logprobs", wanted));
        }
        extras
    }

    /// The fields that are set where the harness has not: they make the server do what others do by themselves.
    pub(crate) fn defaults(self, mode: Mode) -> &'static [(&'static str, u32)] {
        match (self, mode) {
            // Its samplers cut the distribution unless told otherwise, while its log-probs are those of the whole one; and it sends
            // twenty alternatives with each.
            (Self::LlamaCpp, Mode::Train) => &[("top_k", 0), ("top_p", 1), ("min_p", 0), ("top_logprobs", 1)],
            _ => &[],
        }
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
    fn llama_cpp_is_asked_in_its_own_words_and_goes_by_two_names() {
        let asked = extras(Kind::LlamaCpp, Mode::Train, UpstreamPath::ChatCompletions);
        assert_eq!(asked, json!({"return_tokens": true, "verbose": true, "logprobs": true}));
        assert_eq!(Kind::from_name("llama.cpp"), Some(Kind::LlamaCpp));
        assert_eq!(Kind::LlamaCpp.defaults(Mode::Val), []);
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
