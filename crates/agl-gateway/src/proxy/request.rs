//! The body a harness sent, rewritten without being understood: only the keys we set are touched, and everything else leaves
//! byte for byte as it came, number formats and unknown keys included.

use bytes::Bytes;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::routes::Target;
use crate::config::DefaultProxyConfig;
use crate::error::ApiError;

/// The mode segment of the proxy's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Train,
    Val,
}

impl Mode {
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        match name {
            "train" => Some(Self::Train),
            "val" => Some(Self::Val),
            _ => None,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Val => "val",
        }
    }
}

/// Which completion interface is called. The path below the server's base URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpstreamPath {
    ChatCompletions,
    Completions,
}

impl UpstreamPath {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat/completions",
            Self::Completions => "completions",
        }
    }
}

/// A JSON object whose values stay as they were written. As in Python, of equal keys the last value counts.
#[derive(Clone, Debug)]
pub(crate) struct RequestBody {
    entries: Vec<(String, Box<RawValue>)>,
}

impl RequestBody {
    /// Reads what a harness sent; nothing at all is an empty object.
    pub(crate) fn parse(raw: &[u8]) -> Result<Self, ApiError> {
        if raw.is_empty() {
            return Ok(Self { entries: Vec::new() });
        }
        let whole: &RawValue =
            serde_json::from_slice(raw).map_err(|_| ApiError::bad_request("Invalid JSON in request body"))?;
        serde_json::from_str(whole.get()).map_err(|_| ApiError::bad_request("Request body must be a JSON object"))
    }

    /// A body that was put together here.
    pub(crate) fn of(fields: &Map<String, Value>) -> Self {
        let raw = |value| serde_json::value::to_raw_value(value).ok();
        Self { entries: fields.iter().filter_map(|(key, value)| Some((key.clone(), raw(value)?))).collect() }
    }

    fn get(&self, key: &str) -> Option<&RawValue> {
        self.entries.iter().find(|(name, _)| name == key).map(|(_, value)| &**value)
    }

    /// The text under the key, if it is one.
    pub(crate) fn text(&self, key: &str) -> Option<String> {
        serde_json::from_str(self.get(key)?.get()).ok()
    }

    /// The whole number under the key, if it is one.
    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        serde_json::from_str(self.get(key)?.get()).ok()
    }

    /// The value under the key, if it is there.
    pub(crate) fn value(&self, key: &str) -> Option<Value> {
        serde_json::from_str(self.get(key)?.get()).ok()
    }

    /// The values under the key, if it holds a list.
    pub(crate) fn list(&self, key: &str) -> Option<Vec<Value>> {
        serde_json::from_str(self.get(key)?.get()).ok()
    }

    /// True where the key holds something that Python takes for true.
    pub(crate) fn is_truthy(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| !matches!(value.get(), "false" | "null" | "0" | "0.0" | "\"\"" | "[]" | "{}"))
    }

    /// True where the key holds an object in which `inner` is true.
    pub(crate) fn is_true_in(&self, key: &str, inner: &str) -> bool {
        let object: Option<Value> = self.get(key).and_then(|value| serde_json::from_str(value.get()).ok());
        object.is_some_and(|object| object[inner] == true)
    }

    /// Takes the key out.
    pub(crate) fn remove(&mut self, key: &str) {
        self.entries.retain(|(name, _)| name != key);
    }

    /// True where the key is there and not null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| value.get() != "null")
    }

    /// Replaces the value in place, or adds the key at the end.
    pub(crate) fn set(&mut self, key: &str, value: &impl Serialize) {
        // What is set here always serialises: bools, finite numbers, texts, and values that were read.
        let Ok(value) = serde_json::value::to_raw_value(value) else { return };
        match self.entries.iter_mut().find(|(name, _)| name == key) {
            Some((_, slot)) => *slot = value,
            None => self.entries.push((key.to_owned(), value)),
        }
    }

    /// Sets the model and, for the policy, the temperature of the mode, as Agent Lightning v1.0 does; each override can be off.
    pub(crate) fn prepare(&mut self, target: &Target, mode: Mode, config: &DefaultProxyConfig) {
        if self.text("model").as_ref() != Some(&target.model) {
            self.set("model", &target.model);
        }
        if config.override_temperature && target.is_policy {
            let sampling = match mode {
                Mode::Train => config.train,
                Mode::Val => config.val,
            };
            self.set("temperature", &sampling.temperature);
        }
    }

    /// The body to send, with `extras` in place of what it has under their keys.
    pub(crate) fn to_bytes(&self, extras: &[(&str, Value)]) -> Bytes {
        struct With<'a>(&'a RequestBody, &'a [(&'a str, Value)]);
        impl Serialize for With<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let mut map = serializer.serialize_map(None)?;
                let kept = self.0.entries.iter().filter(|(name, _)| self.1.iter().all(|(key, _)| key != name));
                kept.into_iter().try_for_each(|(key, value)| map.serialize_entry(key, value))?;
                self.1.iter().try_for_each(|(key, value)| map.serialize_entry(key, value))?;
                map.end()
            }
        }
        // Keys are texts and values are valid already: writing to memory cannot fail.
        serde_json::to_vec(&With(self, extras)).unwrap_or_default().into()
    }
}

/// Tells a retry from another call: the same bytes to the same place, which names mode, dialect, form and agent.
pub(crate) fn digest(raw: &[u8], place: &str) -> [u8; 32] {
    Sha256::new()
        .chain_update((place.len() as u64).to_le_bytes())
        .chain_update(place)
        .chain_update(raw)
        .finalize()
        .into()
}

impl<'de> Deserialize<'de> for RequestBody {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RequestBody;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RequestBody, A::Error> {
                let mut entries: Vec<(String, Box<RawValue>)> = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, Box<RawValue>>()? {
                    match entries.iter_mut().find(|(name, _)| *name == key) {
                        Some((_, slot)) => *slot = value,
                        None => entries.push((key, value)),
                    }
                }
                Ok(RequestBody { entries })
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(raw: &str, mode: Mode, config: &DefaultProxyConfig) -> String {
        let mut body = RequestBody::parse(raw.as_bytes()).unwrap();
        let model = if config.override_model { "policy".to_owned() } else { body.text("model").unwrap() };
        body.prepare(&Target { is_policy: model == "policy", model, trainable: None }, mode, config);
        String::from_utf8(body.to_bytes(&[]).to_vec()).unwrap()
    }

    #[test]
    fn training_sets_model_and_temperature_and_keeps_the_rest_as_written() {
        let raw = r#"{"model":"gpt-4o", "top_p": 1e0, "x":{"b":1.50,"a":"\u00e9"},"n":12345678901234567890123}"#;
        assert_eq!(
            prepared(raw, Mode::Train, &DefaultProxyConfig::default()),
            r#"{"model":"policy","top_p":1e0,"x":{"b":1.50,"a":"\u00e9"},"n":12345678901234567890123,"temperature":1.0}"#
        );
    }

    #[test]
    fn validation_has_its_own_temperature() {
        let sent = prepared(r#"{"temperature":2}"#, Mode::Val, &DefaultProxyConfig::default());
        assert_eq!(sent, r#"{"temperature":0.7,"model":"policy"}"#);
    }

    #[test]
    fn what_another_model_is_sent_stays_as_the_harness_wrote_it() {
        let config = DefaultProxyConfig { override_model: false, ..DefaultProxyConfig::default() };
        let raw = r#"{"model":"mine","temperature":0.1,"logprobs":false}"#;
        assert_eq!(prepared(raw, Mode::Train, &config), raw);
    }

    #[test]
    fn extras_stand_in_place_of_what_was_there() {
        let body = RequestBody::parse(br#"{"logprobs":false,"a":1}"#).unwrap();
        let extras = [("logprobs", Value::Bool(true)), ("seed", 5.into())];
        assert_eq!(body.to_bytes(&extras), r#"{"a":1,"logprobs":true,"seed":5}"#);
    }

    #[test]
    fn of_equal_keys_the_last_counts() {
        let body = RequestBody::parse(br#"{"a":1,"b":2,"a":3}"#).unwrap();
        assert_eq!(body.to_bytes(&[]), r#"{"a":3,"b":2}"#);
    }

    #[test]
    fn what_is_no_object_is_refused() {
        let detail = |raw: &str| RequestBody::parse(raw.as_bytes()).unwrap_err().body["detail"].clone();
        assert_eq!(detail("{\"a\":"), "Invalid JSON in request body");
        assert_eq!(detail("{\"a\":tru}"), "Invalid JSON in request body");
        assert_eq!(detail("[1]"), "Request body must be a JSON object");
        assert_eq!(RequestBody::parse(b"").unwrap().to_bytes(&[]), "{}");
    }

    #[test]
    fn streaming_is_noticed_as_python_would() {
        let truthy = |raw: &str| RequestBody::parse(raw.as_bytes()).unwrap().is_truthy("stream");
        assert!(truthy(r#"{"stream":true}"#) && truthy(r#"{"stream":1}"#));
        assert!(!truthy(r#"{"stream":false}"#) && !truthy(r#"{"stream":null}"#) && !truthy("{}"));
    }
}
