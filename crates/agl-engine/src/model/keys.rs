//! The keys of a `config.json`, read with errors that name file and key.

use std::path::Path;

use serde_json::{Map, Value};

use crate::EngineError;

/// The object of a `config.json` and the path to name in errors.
pub(super) struct Keys<'a> {
    pub path: &'a Path,
    pub json: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    pub(super) fn wrong(&self, what: String) -> EngineError {
        EngineError::Model { path: self.path.to_owned(), what }
    }

    /// The value of a key; `null` counts as absent.
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn size(&self, key: &str) -> Result<usize, EngineError> {
        self.size_if_present(key)?.ok_or_else(|| self.wrong(format!("the key `{key}` is missing")))
    }

    pub(super) fn size_or(&self, key: &str, default: usize) -> Result<usize, EngineError> {
        Ok(self.size_if_present(key)?.unwrap_or(default))
    }

    pub(super) fn size_if_present(&self, key: &str) -> Result<Option<usize>, EngineError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_u64() {
            Some(size) if size > 0 => Ok(Some(size as usize)),
            _ => Err(self.wrong(format!("`{key}` is {value}, but it must be a whole number above 0"))),
        }
    }

    pub(super) fn number_or(&self, key: &str, default: f64) -> Result<f64, EngineError> {
        let Some(value) = self.value(key) else { return Ok(default) };
        match value.as_f64() {
            Some(number) if number > 0.0 => Ok(number),
            _ => Err(self.wrong(format!("`{key}` is {value}, but it must be a number above 0"))),
        }
    }

    pub(super) fn flag_or(&self, key: &str, default: bool) -> Result<bool, EngineError> {
        let Some(value) = self.value(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.wrong(format!("`{key}` is {value}, but it must be true or false")))
    }

    pub(super) fn text(&self, key: &str) -> Option<&'a str> {
        self.value(key).and_then(Value::as_str)
    }

    /// A list with one entry per layer.
    pub(super) fn per_layer<T>(
        &self,
        key: &str,
        layers: usize,
        read: impl Fn(&Value) -> Option<T>,
        expected: &str,
    ) -> Result<Option<Vec<T>>, EngineError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let entries = value.as_array().filter(|entries| entries.len() == layers).ok_or_else(|| {
            self.wrong(format!("`{key}` must be a list of `num_hidden_layers` ({layers}) entries, but it is {value}"))
        })?;
        let entry = |entry| {
            read(entry).ok_or_else(|| self.wrong(format!("`{key}` contains {entry}, but supported are {expected}")))
        };
        entries.iter().map(entry).collect::<Result<_, _>>().map(Some)
    }
}
