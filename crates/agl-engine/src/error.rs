//! Everything that can go wrong in the engine, worded for the person who must act on it.

use std::path::PathBuf;

/// An error of the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A file of a model directory cannot be read.
    #[error("cannot read {path}: {source}; a model directory needs config.json, model.safetensors (or its index) and tokenizer.json", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A checkpoint cannot be written.
    #[error("cannot write {path}: {source}; check free space and permissions of the folder", path = path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file of a model directory says something the engine cannot use.
    #[error("{path}: {what}", path = path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// What is wrong and what would be right.
        what: String,
    },
    /// The chat template failed on a conversation.
    #[error("the chat template cannot render these messages: {0}")]
    ChatTemplate(String),
    /// The tokenizer failed on a text.
    #[error("the tokenizer cannot process this text: {0}")]
    Tokenizer(String),
    /// A configuration value is out of range.
    #[error("engine setting `{key}` is {value}, but it must be {expected}")]
    Setting {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// A training row is malformed.
    #[error("training row {row}: {what}")]
    Row {
        /// Index of the row in the call.
        row: usize,
        /// What is wrong with it.
        what: String,
    },
    /// The reference policy was asked for log-probs.
    #[error("no reference policy is kept: keep_reference or load_reference comes first")]
    NoReference,
    /// An update had nothing to learn from.
    #[error(
        "none of the {rows} rows has a trained token: an update needs at least one position with mask true and a weight other than 0"
    )]
    NothingToTrain {
        /// Rows passed.
        rows: usize,
    },
    /// The loss or its gradient is not a number.
    #[error(
        "the update was refused: {what} is {value}; parameters and optimiser state are unchanged. Lower the learning rate or look at the advantages and log-probs of these rows"
    )]
    NotFinite {
        /// Which quantity.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// A request asks for what the engine cannot do.
    #[error("{what}")]
    Request {
        /// The field at fault, if one is.
        param: Option<&'static str>,
        /// What is wrong and what would be right.
        what: String,
    },
    /// A prompt does not fit.
    #[error(
        "this model's maximum context length is {max_model_len} tokens, but the prompt has {prompt} tokens and at least one must be left for the answer; shorten the messages or raise `max_model_len`"
    )]
    PromptTooLong {
        /// Tokens in the prompt.
        prompt: usize,
        /// The limit.
        max_model_len: usize,
    },
    /// The sampler thread cannot be started.
    #[error("the sampler thread cannot be started: {0}; the system allows no more threads, see `ulimit -u`")]
    NoSampler(std::io::Error),
    /// The sampler thread has ended.
    #[error("the sampler has stopped; its log says why. Restart the engine")]
    SamplerStopped,
    /// A saved optimiser state does not belong to this model.
    #[error("{path}: {what}; resume with the checkpoint this optimiser state was saved with", path = path.display())]
    OptimizerState {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        what: String,
    },
}
