//! Text to token ids and back.

use std::path::PathBuf;

use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use super::template::ChatTemplate;
use crate::EngineError;
use crate::checkpoint::directory::ModelFiles;
use crate::model::config::token_ids;

/// The tokenizer of a model with its chat template.
#[derive(Debug)]
pub struct ChatTokenizer {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    eos_token_ids: Vec<u32>,
    directory: PathBuf,
}

impl ChatTokenizer {
    /// Reads tokenizer, template and the ids that end an answer (those of `generation_config.json` before `from_config`).
    pub(crate) fn new(files: &ModelFiles, from_config: &[u32]) -> Result<Self, EngineError> {
        let Some((path, bytes)) = files.companion("tokenizer.json") else {
            return Err(EngineError::Tokenizer("tokenizer.json is missing".to_owned()));
        };
        let tokenizer = Tokenizer::from_bytes(bytes).map_err(|error| EngineError::Model {
            path: path.clone(),
            what: format!("not a tokenizer that can be read: {error}"),
        })?;
        let settings = files.companion_json("tokenizer_config.json")?;
        let template = match template_source(files, &settings)? {
            Some((path, source)) => Some(ChatTemplate::new(&path, &source, special_tokens(&settings))?),
            None => None,
        };
        let generation = files.companion_json("generation_config.json")?;
        let mut eos_token_ids = token_ids(generation.get("eos_token_id"));
        if eos_token_ids.is_empty() {
            eos_token_ids = from_config.to_vec();
        }
        if eos_token_ids.is_empty() {
            let named = token_text(settings.get("eos_token")).and_then(|token| tokenizer.token_to_id(&token));
            eos_token_ids.extend(named);
        }
        let directory = path.parent().map(PathBuf::from).unwrap_or_default();
        Ok(Self { tokenizer, template, eos_token_ids, directory })
    }

    /// Token ids of `text` alone: nothing is added before or after.
    ///
    /// # Errors
    /// [`EngineError::Tokenizer`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        self.encode_with(text, false)
    }

    /// Token ids of `text` with what the tokenizer puts around a whole text, such as a BOS token.
    ///
    /// # Errors
    /// [`EngineError::Tokenizer`].
    pub fn encode_whole(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        self.encode_with(text, true)
    }

    fn encode_with(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, EngineError> {
        let encoding = self.tokenizer.encode_fast(text, add_special_tokens);
        encoding.map(|e| e.get_ids().to_vec()).map_err(|error| EngineError::Tokenizer(error.to_string()))
    }

    /// Text of token ids, special tokens left out if `skip_special_tokens`. Ids beyond the vocabulary have no text.
    ///
    /// # Errors
    /// [`EngineError::Tokenizer`].
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, EngineError> {
        self.tokenizer.decode(ids, skip_special_tokens).map_err(|error| EngineError::Tokenizer(error.to_string()))
    }

    /// The prompt text of a conversation in OpenAI's message format, as `transformers` renders it.
    ///
    /// # Errors
    /// [`EngineError::ChatTemplate`] if the model has no template or the template refuses the messages.
    pub fn apply_chat_template(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        add_generation_prompt: bool,
    ) -> Result<String, EngineError> {
        self.apply_chat_template_with(messages, tools, add_generation_prompt, &Map::new())
    }

    /// The same with further template variables, the `chat_template_kwargs` of a request.
    ///
    /// # Errors
    /// As [`Self::apply_chat_template`].
    pub fn apply_chat_template_with(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<String, EngineError> {
        let Some(template) = &self.template else {
            return Err(EngineError::ChatTemplate(format!(
                "{} has no chat template (chat_template.jinja, or the key `chat_template` of tokenizer_config.json); use /v1/completions",
                self.directory.display()
            )));
        };
        template.render(messages, tools, add_generation_prompt, variables)
    }

    /// Ids that end an answer.
    #[must_use]
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    /// The id of a token by its text, as in the vocabulary.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// Entries of the vocabulary, added tokens included.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    /// The same without added tokens.
    pub(crate) fn trained_vocab_size(&self) -> usize {
        self.tokenizer.get_vocab_size(false)
    }
}

/// `chat_template.jinja` before the key `chat_template`, which is a text or a list of named ones.
fn template_source(
    files: &ModelFiles,
    settings: &Map<String, Value>,
) -> Result<Option<(PathBuf, String)>, EngineError> {
    if let Some((path, bytes)) = files.companion("chat_template.jinja") {
        let source = String::from_utf8(bytes.to_vec())
            .map_err(|error| EngineError::Model { path: path.clone(), what: format!("not UTF-8 text: {error}") })?;
        return Ok(Some((path, source)));
    }
    let path = || files.companion("tokenizer_config.json").map(|(path, _)| path).unwrap_or_default();
    let source = match settings.get("chat_template") {
        Some(Value::String(source)) => Some(source.as_str()),
        Some(Value::Array(named)) => named
            .iter()
            .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))
            .and_then(|entry| entry.get("template"))
            .and_then(Value::as_str),
        _ => None,
    };
    Ok(source.map(|source| (path(), source.to_owned())))
}

/// `bos_token`, `eos_token` and the like, which templates may name.
fn special_tokens(settings: &Map<String, Value>) -> Map<String, Value> {
    settings
        .iter()
        .filter(|(key, _)| key.ends_with("_token"))
        .filter_map(|(key, value)| Some((key.clone(), Value::String(token_text(Some(value))?))))
        .collect()
}

/// A token entry is its text or an object with `content`.
fn token_text(value: Option<&Value>) -> Option<String> {
    match value? {
        Value::String(text) => Some(text.clone()),
        Value::Object(token) => token.get("content").and_then(Value::as_str).map(str::to_owned),
        _ => None,
    }
}
