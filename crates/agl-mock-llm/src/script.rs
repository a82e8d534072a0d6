//! What the server answers, and when it fails.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The whole behaviour of a mock server. Its JSON form is the script file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Script {
    /// The model's name in `/v1/models` and in answers. Requests may name any model.
    pub model: String,
    /// The answers, in order. Without any the server echoes.
    pub answers: Vec<Answer>,
    /// Which answer a request gets.
    pub select: Select,
    /// What follows after the last answer.
    pub when_done: WhenDone,
    /// Skip answers that call a tool which the request does not offer: harnesses ask for titles and summaries in between.
    pub only_offered_tools: bool,
    /// Given as `policy_version` in every answer, as agl's own model server does.
    pub policy_version: Option<u64>,
    /// When to fail.
    pub faults: Vec<FaultRule>,
    /// Decides faults with a probability.
    pub seed: u64,
    /// How many of the newest requests `/mock/requests` keeps.
    pub keep_requests: usize,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            model: "policy".to_owned(),
            answers: Vec::new(),
            select: Select::default(),
            when_done: WhenDone::default(),
            only_offered_tools: false,
            policy_version: None,
            faults: Vec::new(),
            seed: 0,
            keep_requests: 4096,
        }
    }
}

impl Script {
    /// A script that gives these texts, one after the other.
    pub fn texts<T: Into<String>>(texts: impl IntoIterator<Item = T>) -> Self {
        Self { answers: texts.into_iter().map(|text| Answer::Text(text.into())).collect(), ..Self::default() }
    }

    /// The same script with one more fault.
    #[must_use]
    pub fn with_fault(mut self, rule: FaultRule) -> Self {
        self.faults.push(rule);
        self
    }
}

/// Which answer of the script a request gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Select {
    /// The next one, whoever asks.
    #[default]
    Next,
    /// The one at the number of `assistant` messages in the request: every conversation plays the script from its start.
    Turn,
}

/// What follows after the last answer of the script.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhenDone {
    /// The text of the last message comes back.
    #[default]
    Echo,
    /// The last answer again.
    RepeatLast,
    /// The first answer again, and so on.
    Cycle,
    /// Status 500, saying that the script is at its end.
    Fail,
    /// First a call of a harmless tool, where one is offered; then a last word. See [`crate::probe`].
    Probe,
}

/// One scripted answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Answer {
    /// Plain content.
    Text(String),
    /// Tool calls, with or without content.
    Tools {
        /// Content before the calls.
        #[serde(default)]
        text: String,
        /// The calls.
        tool_calls: Vec<ToolCall>,
    },
    /// A body given as it is.
    Raw {
        /// The bytes of the body.
        raw: String,
        /// HTTP status.
        #[serde(default = "ok")]
        status: u16,
    },
}

fn ok() -> u16 {
    200
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolCall {
    /// Which tool.
    pub name: String,
    /// Its arguments: an object, or a string that is given as it is (it need not be JSON).
    pub arguments: Value,
}

impl ToolCall {
    /// The arguments as the text that a client gets.
    #[must_use]
    pub fn arguments_text(&self) -> String {
        match &self.arguments {
            Value::String(text) => text.clone(),
            value => value.to_string(),
        }
    }
}

/// A fault and the requests that it strikes. Of several rules that apply the first wins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultRule {
    /// What happens.
    pub fault: Fault,
    /// Strikes the requests of these numbers, counted from 0 since the start of the server.
    #[serde(default)]
    pub at: Vec<u64>,
    /// Strikes other requests too with this probability, by the script's seed and the number of the request.
    #[serde(default)]
    pub probability: f64,
}

impl FaultRule {
    /// Strikes the requests of these numbers.
    #[must_use]
    pub fn at(fault: Fault, positions: impl IntoIterator<Item = u64>) -> Self {
        Self { fault, at: positions.into_iter().collect(), probability: 0.0 }
    }

    /// Strikes any request with this probability; 1.0 is always.
    #[must_use]
    pub fn with_probability(fault: Fault, probability: f64) -> Self {
        Self { fault, at: Vec::new(), probability }
    }
}

/// What may go wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Fault {
    /// The answer comes, but late.
    Delay {
        /// How late.
        seconds: f64,
    },
    /// An error status.
    Status {
        /// Which.
        status: u16,
        /// The value of the `Retry-After` header, in seconds.
        #[serde(default)]
        retry_after: Option<u64>,
    },
    /// The connection is reset (RST) instead of an answer.
    Reset,
    /// Status 200 and a body that is no JSON.
    WrongJson,
    /// Half of the body, then the connection ends.
    Truncated,
    /// A good answer without `prompt_token_ids` and `token_ids`, as a server that does not know `return_token_ids`.
    MissingIds,
    /// A good answer without log-probs.
    MissingLogprobs,
    /// One log-prob fewer than there are token ids.
    CountMismatch,
    /// No answer, ever; the connection stays open.
    Hang,
}
