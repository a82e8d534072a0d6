//! Taking a request apart so that nothing is dropped in silence: what nobody has taken is named.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// A request that cannot be translated: what is wrong with it, for the harness's author.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unreadable(pub(crate) String);

/// The fields that a translation had no place for, such as `messages[].content[].cache_control`.
pub(crate) type LeftOut = BTreeSet<String>;

/// The fields of one JSON object, taken one by one. Names are looked up as written.
pub(crate) struct Fields {
    map: Map<String, Value>,
    path: String,
}

impl Fields {
    /// The fields of `value`, which stands at `path` in the request; the whole request has the empty path.
    pub(crate) fn of(value: Value, path: &str) -> Result<Self, Unreadable> {
        match value {
            Value::Object(map) => Ok(Self { map, path: path.to_owned() }),
            _ if path.is_empty() => Err(Unreadable("Request body must be a JSON object".to_owned())),
            _ => Err(Unreadable(format!("{path} must be an object"))),
        }
    }

    /// Where the field stands in the request.
    pub(crate) fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The value, unless it is missing or null.
    pub(crate) fn take(&mut self, key: &str) -> Option<Value> {
        self.map.shift_remove(key).filter(|value| !value.is_null())
    }

    /// As [`Self::take`], for an interface that spells its names in two ways.
    pub(crate) fn take_either(&mut self, key: &str, other: &str) -> Option<Value> {
        let second = self.take(other);
        self.take(key).or(second)
    }

    pub(crate) fn text(&mut self, key: &str) -> Result<Option<String>, Unreadable> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(Unreadable(format!("{} must be a text", self.path(key)))),
        }
    }

    pub(crate) fn needed_text(&mut self, key: &str) -> Result<String, Unreadable> {
        self.text(key)?.ok_or_else(|| Unreadable(format!("{} is missing", self.path(key))))
    }

    pub(crate) fn list(&mut self, key: &str) -> Result<Option<Vec<Value>>, Unreadable> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(_) => Err(Unreadable(format!("{} must be a list", self.path(key)))),
        }
    }

    pub(crate) fn is_true(&mut self, key: &str) -> bool {
        self.take(key) == Some(Value::Bool(true))
    }

    /// Moves a field into `chat`, whatever it holds.
    pub(crate) fn carry(&mut self, key: &str, chat: &mut Map<String, Value>, chat_key: &str) {
        if let Some(value) = self.take(key) {
            chat.insert(chat_key.to_owned(), value);
        }
    }

    /// Names what nobody took.
    pub(crate) fn finish(self, left_out: &mut LeftOut) {
        let rest = self.map.iter().filter(|(_, value)| !value.is_null());
        left_out.extend(rest.map(|(key, _)| self.path(key)));
    }
}
