//! What callers send, checked, with FastAPI's form of complaint: 422 and `{"detail": [{"type", "loc", "msg"}]}`.

use std::marker::PhantomData;
use std::str::FromStr;

use axum::http::{StatusCode, Uri};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::{Value, json};
use serde_path_to_error::Segment;

use crate::error::ApiError;

/// What must come as an object: serde takes a list of the values in the order of the fields too.
#[derive(Default)]
pub(super) struct Object<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = T;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields))
            }
        }
        deserializer.deserialize_map(Fields(PhantomData)).map(Self)
    }
}

/// Reads a JSON body that is an object.
pub(super) fn object<T: DeserializeOwned>(raw: &[u8]) -> Result<T, ApiError> {
    body::<Object<T>>(raw).map(|Object(fields)| fields)
}

/// Reads a JSON body that is a list of objects.
pub(super) fn objects<T: DeserializeOwned>(raw: &[u8]) -> Result<Vec<T>, ApiError> {
    let list: Vec<Object<T>> = body(raw)?;
    Ok(list.into_iter().map(|Object(fields)| fields).collect())
}

fn body<T: DeserializeOwned>(raw: &[u8]) -> Result<T, ApiError> {
    if raw.is_empty() {
        return Err(ApiError::invalid(vec!["body".into()], "Field required", "missing"));
    }
    let mut reader = serde_json::Deserializer::from_slice(raw);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| complaint(&error))?;
    reader.end().map_err(|error| syntax(&error))?;
    Ok(value)
}

fn syntax(error: &serde_json::Error) -> ApiError {
    ApiError::invalid(vec!["body".into(), error.column().into()], format!("JSON decode error: {error}"), "json_invalid")
}

fn complaint(error: &serde_path_to_error::Error<serde_json::Error>) -> ApiError {
    if !error.inner().is_data() {
        return syntax(error.inner());
    }
    let mut loc: Vec<Value> = vec!["body".into()];
    loc.extend(error.path().iter().filter_map(|segment| match segment {
        Segment::Seq { index } => Some(Value::from(*index)),
        Segment::Map { key } => Some(Value::from(key.as_str())),
        Segment::Enum { .. } | Segment::Unknown => None,
    }));
    let message = error.inner().to_string();
    let message = message.rsplit_once(" at line ").map_or(message.as_str(), |(text, _)| text);
    let quoted = || message.split('`').nth(1).map(Value::from);
    if message.starts_with("missing field") {
        loc.extend(quoted());
        return ApiError::invalid(loc, "Field required", "missing");
    }
    if message.starts_with("unknown field") {
        // The path already ends with the unknown key, except where serde had no value to point at.
        let name = quoted().filter(|name| loc.last() != Some(name));
        loc.extend(name);
        return ApiError::invalid(loc, format!("Extra inputs are not permitted: {message}"), "extra_forbidden");
    }
    let kind = if message.starts_with("unknown variant") { "enum" } else { "value_error" };
    ApiError::invalid(loc, message, kind)
}

/// The parameters of a query string.
pub(super) struct Query(Vec<(String, String)>);

impl Query {
    pub(super) fn of(uri: &Uri) -> Self {
        Self(form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).into_owned().collect())
    }

    /// The last value of that name, as FastAPI takes it.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.all(name).last()
    }

    pub(super) fn all<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The value of that name as an integer.
    pub(super) fn integer(&self, name: &'static str) -> Result<Option<i64>, ApiError> {
        self.parsed(name, "Input should be a valid integer, unable to parse string as an integer", "int_parsing")
    }

    pub(super) fn parsed<T: FromStr>(
        &self,
        name: &'static str,
        msg: &'static str,
        kind: &'static str,
    ) -> Result<Option<T>, ApiError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| ApiError::invalid(vec!["query".into(), name.into()], msg, kind))
    }

    pub(super) fn missing(name: &'static str) -> ApiError {
        ApiError::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            json!([{"type": "missing", "loc": ["query", name], "msg": "Field required", "input": null}]),
        )
    }
}

/// Refuses an id that could not stand in a URL path, or that would lead a controller out of its folder.
pub(super) fn check_id(id: &str, loc: Vec<Value>) -> Result<(), ApiError> {
    let usable = !id.is_empty()
        && id.len() <= 200
        && id != "."
        && id != ".."
        && !id.chars().any(|c| c.is_control() || matches!(c, '/' | '\\'));
    if usable {
        return Ok(());
    }
    let msg = "An id has 1 to 200 bytes, no '/', no '\\' and no control characters, and is not '.' or '..'";
    Err(ApiError::invalid(loc, msg, "value_error"))
}

#[cfg(test)]
mod tests {
    use agl_core::rollout::{RolloutCreate, StatusPatch};

    use super::*;

    fn detail<T: DeserializeOwned>(raw: &str) -> Value {
        let error = body::<T>(raw.as_bytes()).err().unwrap();
        assert_eq!(error.status, StatusCode::UNPROCESSABLE_ENTITY);
        error.body["detail"][0].clone()
    }

    #[test]
    fn complaints_say_where_and_what_as_fastapi_does() {
        let missing = detail::<Vec<RolloutCreate>>(r#"[{"input": 1}, {}]"#);
        assert_eq!(missing, json!({"type": "missing", "loc": ["body", 1, "input"], "msg": "Field required"}));
        let unknown = detail::<StatusPatch>(r#"{"foo": 1}"#);
        assert_eq!((&unknown["type"], &unknown["loc"]), (&json!("extra_forbidden"), &json!(["body", "foo"])));
        let variant = detail::<StatusPatch>(r#"{"state": "done"}"#);
        assert_eq!((&variant["type"], &variant["loc"]), (&json!("enum"), &json!(["body", "state"])));
        let kind = detail::<Vec<RolloutCreate>>(r#"[{"input": 1, "is_train": "maybe"}]"#);
        assert_eq!(kind["loc"], json!(["body", 0, "is_train"]));
        assert_eq!(detail::<StatusPatch>("{")["type"], "json_invalid");
        assert_eq!(detail::<StatusPatch>("")["type"], "missing");
        assert_eq!(detail::<StatusPatch>("{} x")["type"], "json_invalid");
    }

    #[test]
    fn a_list_is_no_object_even_where_its_values_would_fit() {
        assert_eq!(body::<StatusPatch>(b"[\"running\"]").unwrap().state.map(|state| state.as_str()), Some("running"));
        assert!(object::<StatusPatch>(b"[\"running\"]").is_err());
        assert!(objects::<RolloutCreate>(b"[[1]]").is_err());
        let loc = detail::<Vec<Object<RolloutCreate>>>(r#"[{"input": 1}, {"input": 1, "is_train": 2}]"#);
        assert_eq!(loc["loc"], json!(["body", 1, "is_train"]));
    }

    #[test]
    fn query_values_are_decoded_and_the_last_counts() {
        let query = Query::of(&"/x?a=1&b=%20&a=2".parse().unwrap());
        assert_eq!(query.integer("a").unwrap(), Some(2));
        assert_eq!(query.text("b"), Some(" "));
        assert_eq!(query.all("a").count(), 2);
        assert!(query.integer("b").is_err());
        assert_eq!(query.integer("c").unwrap(), None);
    }

    #[test]
    fn ids_that_would_leave_their_folder_are_refused() {
        for id in ["", ".", "..", "a/b", "a\\b", "a\nb"] {
            assert!(check_id(id, vec![]).is_err(), "{id:?}");
        }
        for id in ["r", "7", "task.1:é ü", "..."] {
            assert!(check_id(id, vec![]).is_ok(), "{id:?}");
        }
    }
}
