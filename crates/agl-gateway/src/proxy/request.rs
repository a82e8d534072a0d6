//! The body a harness sent, rewritten without being understood: only the keys we set are touched, and everything else leaves
//! byte for byte as it came, number formats and unknown keys included.

use bytes::Bytes;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::Serialize;
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
    /// Keys and valid JSON.
    entries: Vec<(String, Bytes)>,
}

impl RequestBody {
    /// Reads what a harness sent; nothing at all is an empty object.
    pub(crate) fn parse(raw: &Bytes) -> Result<Self, ApiError> {
        if raw.is_empty() {
            return Ok(Self { entries: Vec::new() });
        }
        let Ok(Entries(found)) = serde_json::from_slice(raw) else {
            let is_json = serde_json::from_slice::<&RawValue>(raw).is_ok();
            let what = if is_json { "Request body must be a JSON object" } else { "Invalid JSON in request body" };
            return Err(ApiError::bad_request(what));
        };
        let entries = found.into_iter().map(|(key, value)| (key, raw.slice_ref(value.get().as_bytes()))).collect();
        Ok(Self { entries })
    }

    /// A body that was put together here.
    pub(crate) fn of(fields: &Map<String, Value>) -> Self {
        let raw = |value| serde_json::to_vec(value).ok().map(Bytes::from);
        Self { entries: fields.iter().filter_map(|(key, value)| Some((key.clone(), raw(value)?))).collect() }
    }

    fn get(&self, key: &str) -> Option<&[u8]> {
        self.entries.iter().find(|(name, _)| name == key).map(|(_, value)| &**value)
    }

    /// The text under the key, if it is one.
    pub(crate) fn text(&self, key: &str) -> Option<String> {
        serde_json::from_slice(self.get(key)?).ok()
    }

    /// The whole number under the key, if it is one.
    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        serde_json::from_slice(self.get(key)?).ok()
    }

    /// The value under the key, if it is there.
    pub(crate) fn value(&self, key: &str) -> Option<Value> {
        serde_json::from_slice(self.get(key)?).ok()
    }

    /// The values under the key, if it holds a list.
    pub(crate) fn list(&self, key: &str) -> Option<Vec<Value>> {
        serde_json::from_slice(self.get(key)?).ok()
    }

    /// True where the key holds something that Python takes for true.
    pub(crate) fn is_truthy(&self, key: &str) -> bool {
        self.get(key)
            .is_some_and(|value| !matches!(value, b"false" | b"null" | b"0" | b"0.0" | b"\"\"" | b"[]" | b"{}"))
    }

    /// True where the key holds an object in which `inner` is true.
    pub(crate) fn is_true_in(&self, key: &str, inner: &str) -> bool {
        let object: Option<Value> = self.get(key).and_then(|value| serde_json::from_slice(value).ok());
        object.is_some_and(|object| object[inner] == true)
    }

    /// Takes the key out.
    pub(crate) fn remove(&mut self, key: &str) {
        self.entries.retain(|(name, _)| name != key);
    }

    /// True where the key is there and not null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| value != b"null")
    }

    /// Replaces the value in place, or adds the key at the end.
    pub(crate) fn set(&mut self, key: &str, value: &impl Serialize) {
        // What is set here always serialises: bools, finite numbers, texts, and values that were read.
        let Ok(value) = serde_json::to_vec(value).map(Bytes::from) else { return };
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
        let kept = self.entries.iter().filter(|(name, _)| extras.iter().all(|(key, _)| key != name));
        let kept = kept.map(|(key, value)| (key.as_str(), value.clone()));
        // A value in memory always serialises.
        let added = extras.iter().map(|(key, value)| (*key, value.to_string().into()));
        let fields: Vec<(String, Bytes)> =
            kept.chain(added).map(|(key, value)| (Value::from(key).to_string(), value)).collect();
        let length: usize = fields.iter().map(|(key, value)| key.len() + value.len() + 2).sum();
        // As long as it becomes: it is kept for a while.
        let mut body = Vec::with_capacity(length + 1 + usize::from(fields.is_empty()));
        for (index, (key, value)) in fields.iter().enumerate() {
            body.push(if index == 0 { b'{' } else { b',' });
            body.extend_from_slice(key.as_bytes());
            body.push(b':');
            body.extend_from_slice(value);
        }
        if fields.is_empty() {
            body.push(b'{');
        }
        body.push(b'}');
        body.into()
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

/// The keys and values of an object, each key once.
struct Entries<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Entries<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Entries<'de>;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<'de>, A::Error> {
                let mut entries: Vec<(String, &'de RawValue)> = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, &'de RawValue>()? {
                    match entries.iter_mut().find(|(name, _)| *name == key) {
                        Some((_, slot)) => *slot = value,
                        None => entries.push((key, value)),
                    }
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(raw: &str) -> Result<RequestBody, ApiError> {
        RequestBody::parse(&Bytes::copy_from_slice(raw.as_bytes()))
    }

    fn prepared(raw: &str, mode: Mode, config: &DefaultProxyConfig) -> String {
        let mut body = parse(raw).unwrap();
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
        let body = parse(r#"{"logprobs":false,"a":1}"#).unwrap();
        let extras = [("logprobs", Value::Bool(true)), ("seed", 5.into())];
        assert_eq!(body.to_bytes(&extras), r#"{"a":1,"logprobs":true,"seed":5}"#);
    }

    #[test]
    fn of_equal_keys_the_last_counts() {
        let body = parse(r#"{"a":1,"b":2,"a":3}"#).unwrap();
        assert_eq!(body.to_bytes(&[]), r#"{"a":3,"b":2}"#);
    }

    #[test]
    fn what_is_no_object_is_refused() {
        let detail = |raw: &str| parse(raw).unwrap_err().body["detail"].clone();
        assert_eq!(detail("{\"a\":"), "Invalid JSON in request body");
        assert_eq!(detail("{\"a\":tru}"), "Invalid JSON in request body");
        assert_eq!(detail("[1]"), "Request body must be a JSON object");
        assert_eq!(parse("").unwrap().to_bytes(&[]), "{}");
    }

    #[test]
    fn streaming_is_noticed_as_python_would() {
        let truthy = |raw: &str| parse(raw).unwrap().is_truthy("stream");
        assert!(truthy(r#"{"stream":true}"#) && truthy(r#"{"stream":1}"#));
        assert!(!truthy(r#"{"stream":false}"#) && !truthy(r#"{"stream":null}"#) && !truthy("{}"));
    }
}
