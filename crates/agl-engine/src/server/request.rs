//! What both kinds of completion requests have in common.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::ApiError;
use crate::SamplingParams;

/// Most choices per prompt.
const MAX_CHOICES: usize = 128;

/// Parses a body; the error names the field and what is wrong with it.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let deserializer = &mut serde_json::Deserializer::from_slice(body);
    serde_path_to_error::deserialize(deserializer).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        if path == "." || !inner.is_data() {
            ApiError::bad_body(format!("the body is not a valid request: {inner}"))
        } else {
            ApiError::invalid(path.clone(), format!("`{path}`: {inner}"))
        }
    })
}

/// One text or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "a string or a list of strings")]
pub(super) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// Fields of sampling, named as OpenAI and vLLM name them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Sampling {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub seed: Option<i64>,
    pub max_tokens: Option<usize>,
    pub n: Option<usize>,
    pub stop: Option<OneOrMany>,
    pub stop_token_ids: Option<Vec<u32>>,
    pub ignore_eos: Option<bool>,
    pub return_token_ids: Option<bool>,
    pub stream: Option<bool>,
    pub min_p: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub logit_bias: Option<Map<String, Value>>,
    // It would change what is sampled, and the engine does not have it: refused unless neutral.
    best_of: Option<usize>,
}

impl Sampling {
    /// The engine's parameters and the number of choices.
    pub(super) fn params(&self, top_logprobs: usize) -> Result<(SamplingParams, usize), ApiError> {
        self.refuse_what_is_missing()?;
        let n = self.n.unwrap_or(1);
        if !(1..=MAX_CHOICES).contains(&n) {
            return Err(ApiError::invalid("n", format!("`n` must be from 1 to {MAX_CHOICES}, but it is {n}")));
        }
        let params = SamplingParams {
            temperature: self.temperature.unwrap_or(1.0),
            top_p: self.top_p.unwrap_or(1.0),
            // vLLM writes −1 for all.
            top_k: usize::try_from(self.top_k.unwrap_or(0)).unwrap_or(0),
            min_p: self.min_p.unwrap_or(0.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
            logit_bias: self.logit_bias()?,
            seed: self.seed.map(i64::cast_unsigned),
            max_tokens: self.max_tokens,
            stop: match &self.stop {
                None => Vec::new(),
                Some(OneOrMany::One(text)) => vec![text.clone()],
                Some(OneOrMany::Many(texts)) => texts.clone(),
            },
            stop_token_ids: self.stop_token_ids.clone().unwrap_or_default(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            top_logprobs,
        };
        Ok((params, n))
    }

    fn refuse_what_is_missing(&self) -> Result<(), ApiError> {
        if self.stream == Some(true) {
            let message = "`stream: true` is not served here: ask without it, or through the gateway, which makes a stream of the whole answer";
            return Err(ApiError::invalid("stream", message));
        }
        if self.best_of.is_some_and(|value| value != 1) {
            return Err(unsupported("best_of"));
        }
        Ok(())
    }

    /// `{"15496": -100}`: JSON has token ids as texts.
    fn logit_bias(&self) -> Result<Vec<(u32, f32)>, ApiError> {
        let wrong = |what: String| ApiError::invalid("logit_bias", format!("`logit_bias`: {what}"));
        let entry = |(id, bias): (&String, &Value)| {
            let id = id.parse().map_err(|_| wrong(format!("\"{id}\" is not a token id")))?;
            let bias = bias.as_f64().ok_or_else(|| wrong(format!("the bias of token id {id} is not a number")))?;
            Ok((id, bias as f32))
        };
        self.logit_bias.iter().flatten().map(entry).collect()
    }

    /// The parameters of choice number `choice`: a given seed is counted up, so that choices differ but can be repeated.
    pub(super) fn for_choice(params: &SamplingParams, choice: usize) -> SamplingParams {
        SamplingParams { seed: params.seed.map(|seed| seed.wrapping_add(choice as u64)), ..params.clone() }
    }
}

/// 400: a field this server cannot honour, and which it would be wrong to ignore.
pub(super) fn unsupported(field: &'static str) -> ApiError {
    ApiError::invalid(field, format!("`{field}` is not supported by this server; leave it out"))
}
