//! What a caller asks of the sampler and what comes back.

use crate::EngineError;

/// How tokens are drawn, spelt and ordered as in vLLM: biases and penalties change the logits, which are divided by the
/// temperature, then min-p, top-k and top-p leave tokens out.
///
/// Only the temperature changes what is *recorded*: see [`GenerateOutput::log_probs`].
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Logits are divided by this; 0 takes the likeliest token.
    pub temperature: f32,
    /// Draw from the smallest set of tokens whose probability reaches this.
    pub top_p: f32,
    /// Draw from this many likeliest tokens; 0 means all.
    pub top_k: usize,
    /// Leave out tokens whose probability is below this share of the likeliest one's. In [0, 1]; 0 leaves out none.
    pub min_p: f32,
    /// Taken from the logits of tokens that the answer has already. In [−2, 2].
    pub presence_penalty: f32,
    /// Taken from a token's logit once for every time the answer has it. In [−2, 2].
    pub frequency_penalty: f32,
    /// Logits of tokens that prompt or answer have are divided by this if positive, multiplied by it if not. Above 0; 1
    /// changes nothing.
    pub repetition_penalty: f32,
    /// Added to the logits of these ids, in [−100, 100].
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of this request's own generator. Without one, the engine's seed and a running number are used.
    pub seed: Option<u64>,
    /// Longest answer in tokens; as many as fit if absent.
    pub max_tokens: Option<usize>,
    /// The answer ends where one of these texts appears; it is not part of the text returned.
    pub stop: Vec<String>,
    /// Token ids that end the answer, besides the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The model's own end tokens do not end the answer.
    pub ignore_eos: bool,
    /// Log-probs of this many likeliest tokens are reported per position.
    pub top_logprobs: usize,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: None,
            max_tokens: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            top_logprobs: 0,
        }
    }
}

/// Most entries of `top_logprobs`.
const MAX_TOP_LOGPROBS: usize = 20;

impl SamplingParams {
    /// Names the first value that is out of range; ids are of a vocabulary of `vocab`.
    pub(crate) fn check(&self, vocab: usize) -> Result<(), EngineError> {
        let require = |holds: bool, param: &'static str, rule: &str, found: String| {
            if holds {
                Ok(())
            } else {
                Err(EngineError::Request {
                    param: Some(param),
                    what: format!("`{param}` must be {rule}, but it is {found}"),
                })
            }
        };
        let t = self.temperature;
        require(t.is_finite() && t >= 0.0, "temperature", "0 or more", t.to_string())?;
        require(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p.to_string())?;
        require((0.0..=1.0).contains(&self.min_p), "min_p", "from 0 to 1", self.min_p.to_string())?;
        for (param, penalty) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            require((-2.0..=2.0).contains(&penalty), param, "from -2 to 2", penalty.to_string())?;
        }
        let penalty = self.repetition_penalty;
        require(penalty.is_finite() && penalty > 0.0, "repetition_penalty", "above 0", penalty.to_string())?;
        for (id, bias) in &self.logit_bias {
            let (allowed, found) = ("numbers from -100 to 100", format!("{bias} for token id {id}"));
            require((-100.0..=100.0).contains(bias), "logit_bias", allowed, found)?;
            let inside = "of token ids in the vocabulary";
            require((*id as usize) < vocab, "logit_bias", inside, format!("of {id}, and there are {vocab}"))?;
        }
        require(self.max_tokens != Some(0), "max_tokens", "at least 1", "0".to_owned())?;
        require(!self.stop.iter().any(String::is_empty), "stop", "texts that are not empty", "\"\"".to_owned())?;
        let top = self.top_logprobs;
        require(top <= MAX_TOP_LOGPROBS, "top_logprobs", "at most 20", top.to_string())
    }
}

/// A prompt to continue.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateRequest {
    /// Token ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// How to continue it.
    pub sampling: SamplingParams,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token or a stop text.
    Stop,
    /// `max_tokens` or the model's maximum length.
    Length,
}

/// What ended an answer that stopped, if it was not one of the model's own end tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// An id of `stop_token_ids`.
    Token(u32),
    /// A text of `stop`.
    Text(String),
}

/// An answer. All vectors have one entry per sampled token, the one that ended the answer included.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOutput {
    /// Sampled ids.
    pub token_ids: Vec<u32>,
    /// log softmax(logits / temperature) of each sampled id: the quantity the training forward computes. At temperature 0
    /// those of temperature 1. Biases, penalties, min-p, top-k and top-p change which token is drawn and not this, so that with
    /// any of them the tokens do not come from the distribution whose probabilities are recorded.
    pub log_probs: Vec<f32>,
    /// The ids likeliest under that same distribution, at each position, with their log-probs; as many as were asked for.
    pub top_log_probs: Vec<Vec<(u32, f32)>>,
    /// Version of the policy that sampled each token.
    pub policy_versions: Vec<u64>,
    /// The text, without end token, stop text and special tokens.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What ended it, beyond the model's own end tokens.
    pub stop_reason: Option<StopReason>,
    /// Tokens of the prompt that were not processed, because another sequence had begun with them under the same policy.
    pub cached_tokens: usize,
}
