//! `GET /openapi.json`: the whole HTTP interface, described. Needs no key: what there is to ask is no secret.
//!
//! * [`routes`] — every operation. A test compares them with the router.
//! * [`schemas`] — what goes in and comes out.

use axum::Json;
use serde_json::{Map, Value, json};

mod routes;
mod schemas;

/// How a key may come. Any one will do.
const KEYS: [&str; 4] = ["bearer", "x-api-key", "x-goog-api-key", "key"];

/// See the [module](self).
pub(super) async fn get() -> Json<Value> {
    Json(document())
}

fn document() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for route in routes::all() {
        let (path, method, operation) = route.described();
        paths.entry(path).or_insert_with(|| json!({}))[method] = operation;
    }
    let schemas: Map<String, Value> =
        schemas::all().into_iter().map(|(name, schema)| (name.to_owned(), schema)).collect();
    let header = |name: &str| json!({"type": "apiKey", "in": "header", "name": name});
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "agl gateway",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Rollouts, attempts, events and models; and the proxy that harnesses call, in the words of OpenAI, \
                Anthropic and Google. The server key opens everything, an attempt's keys open its own proxy and event URLs.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": header("x-api-key"),
                "x-goog-api-key": header("x-goog-api-key"),
                "key": {"type": "apiKey", "in": "query", "name": "key"},
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::api::router;
    use crate::app::App;
    use crate::config::GatewayConfig;
    use agl_core::attempt::AttemptPatch;
    use agl_core::event::{Event, EventCreate};
    use agl_core::rollout::{Rollout, RolloutCreate, StatusPatch};
    use agl_store::{AttemptDetail, RegisteredModel, TerminalPage};
    use axum::Router;
    use axum::body::{Body, to_bytes};
    use axum::extract::Request;
    use axum::response::Response;
    use hyper::service::Service;
    use hyper_util::service::TowerToHyperService;
    use serde::Serialize;
    use serde::de::DeserializeOwned;

    async fn served() -> Router {
        router(App::open(GatewayConfig { store: "memory".to_owned(), ..GatewayConfig::default() }).await.unwrap())
    }

    async fn sent(router: &Router, method: &str, path: &str, body: &str) -> Response {
        let request = Request::builder().method(method).uri(path).body(Body::from(body.to_owned())).unwrap();
        TowerToHyperService::new(router.clone()).call(request).await.unwrap()
    }

    /// Every operation of the document: its path and its method.
    fn operations(document: &Value) -> Vec<(String, String)> {
        let paths = document["paths"].as_object().unwrap();
        let of = |(path, item): (&String, &Value)| {
            item.as_object().unwrap().keys().map(|method| (path.clone(), method.to_uppercase())).collect::<Vec<_>>()
        };
        paths.iter().flat_map(of).collect()
    }

    #[tokio::test]
    async fn the_document_has_every_route_of_the_router_and_no_other() {
        let router = served().await;
        // The router does not tell its paths, except to whoever debugs it.
        let printed = format!("{router:?}");
        let printed = printed.split("fallback_router").next().unwrap();
        let paths: BTreeSet<&str> =
            printed.split('"').filter(|part| part.starts_with('/') && !part.contains("__private")).collect();
        assert!(paths.len() > 30, "{paths:?}");
        let mut routed = BTreeSet::new();
        for path in &paths {
            let filled: String = path
                .split('/')
                .map(|segment| if segment.starts_with('{') { "x" } else { segment })
                .collect::<Vec<_>>()
                .join("/");
            let refused = sent(&router, "OPTIONS", &filled, "").await;
            let allowed = refused.headers()["allow"].to_str().unwrap().to_owned();
            routed.extend(
                allowed
                    .split(',')
                    .filter(|method| *method != "HEAD")
                    .map(|method| ((*path).to_owned(), method.to_owned())),
            );
        }
        let document = document();
        let reached: BTreeSet<_> = operations(&document)
            .into_iter()
            .map(|(path, method)| {
                let open_ended =
                    || paths.iter().find(|known| path.starts_with(known.strip_suffix("{*path}").unwrap_or("-")));
                let route = paths.get(path.as_str()).or_else(open_ended);
                ((*route.unwrap_or_else(|| panic!("{path} leads nowhere"))).to_owned(), method)
            })
            .collect();
        assert_eq!(reached, routed);
    }

    #[tokio::test]
    async fn no_operation_of_the_document_ends_in_nothing() {
        let router = served().await;
        for (path, method) in operations(&document()) {
            let path = path.replace("{mode}", "train");
            let filled = path.split(['{', '}']).enumerate().map(|(at, part)| if at % 2 == 0 { part } else { "x" });
            let answer = sent(&router, &method, &filled.collect::<String>(), "[]").await;
            let status = answer.status();
            if path.contains("watch") {
                continue;
            }
            let body = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
            let said = String::from_utf8(body.to_vec()).unwrap();
            let leads_nowhere = said.contains("Not Found") || said.contains("Unsupported") || status == 405;
            assert!(!leads_nowhere, "{method} {path}: {status} {said}");
        }
    }

    fn schema(document: &Value, name: &str) -> Value {
        document["components"]["schemas"][name].clone()
    }

    /// An object in which every field of the schema is there.
    fn sample(document: &Value, schema: &Value) -> Value {
        if let Some(place) = schema["$ref"].as_str() {
            return sample(document, document.pointer(place.strip_prefix('#').unwrap()).unwrap());
        }
        if let Some(first) = schema["anyOf"].get(0) {
            return sample(document, first);
        }
        if let Some(first) = schema["enum"].get(0) {
            return first.clone();
        }
        let kind = schema["type"].as_str().or_else(|| schema["type"][0].as_str());
        match kind {
            Some("string") => "x".into(),
            Some("integer") => 1.into(),
            Some("number") => 0.5.into(),
            Some("boolean") => true.into(),
            Some("array") => json!([sample(document, &schema["items"])]),
            Some("object") => {
                let fields = schema["properties"].as_object().into_iter().flatten();
                Value::Object(fields.map(|(name, field)| (name.clone(), sample(document, field))).collect())
            }
            _ => json!({}),
        }
    }

    fn assert_same_fields(name: &str, schema: &Value, written: &Value) {
        let fields = |object: &Map<String, Value>| object.keys().cloned().collect::<BTreeSet<_>>();
        assert_eq!(
            fields(schema["properties"].as_object().unwrap()),
            fields(written.as_object().unwrap()),
            "the fields of {name}"
        );
    }

    #[test]
    fn what_is_described_is_what_the_types_read_and_write() {
        let document = document();
        fn both<T: Serialize + DeserializeOwned>(document: &Value, name: &str) {
            let schema = schema(document, name);
            let read: T =
                serde_json::from_value(sample(document, &schema)).unwrap_or_else(|error| panic!("{name}: {error}"));
            let written = serde_json::to_value(read).unwrap();
            assert_same_fields(name, &schema, &written);
            assert_eq!(written, sample(document, &schema), "{name} keeps what it is given");
        }
        both::<RolloutCreate>(&document, "RolloutCreate");
        both::<Rollout>(&document, "Rollout");
        both::<StatusPatch>(&document, "StatusPatch");
        both::<TerminalPage>(&document, "TerminalPage");
        both::<AttemptPatch>(&document, "AttemptPatch");
        both::<EventCreate>(&document, "EventCreate");
        both::<Event>(&document, "Event");
        both::<RegisteredModel>(&document, "Model");
        both::<agl_core::trajectory::Sequence>(&document, "Sequence");
        both::<agl_core::trajectory::PathBreak>(&document, "PathBreak");
        let attempt: AttemptDetail = serde_json::from_value(sample(&document, &schema(&document, "Attempt"))).unwrap();
        assert!(attempt.last_call.is_some());
    }

    #[tokio::test]
    async fn answers_have_the_fields_that_are_described() {
        let (router, document) = (served().await, document());
        sent(&router, "POST", "/api/rollouts", r#"[{"rollout_id": "r", "input": {}}]"#).await;
        for (method, path, name) in [
            ("POST", "/api/rollouts/r/attempts", "AttemptGrant"),
            ("GET", "/api/rollouts/r/attempts", "Attempt"),
            ("GET", "/api/rollouts/r", "RolloutDetail"),
            ("GET", "/api/rollouts/r/sequences", "Sequences"),
            ("GET", "/api/rollouts/terminal", "TerminalPage"),
            ("GET", "/proxy/state", "ProxyState"),
            ("GET", "/healthz", "Ok"),
        ] {
            let answer = sent(&router, method, path, "").await;
            let body = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
            let said: Value = serde_json::from_slice(&body).unwrap();
            let said = said.get(0).cloned().unwrap_or(said);
            assert_same_fields(name, &schema(&document, name), &said);
        }
    }
}
