//! Traces over OTLP: what a collector hears of a call, and that a call does not hear of the collector.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agl_mock_llm::{Fault, FaultRule, MockLlm, Script};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use prost::Message;
use serde_json::{Value, json};

use crate::support::{Running, agl, eventually, free_port, get};

const LIMIT: Duration = Duration::from_secs(60);
const KEY: &str = "the-server-key";
const QUESTION: &str = "a question that is nobody's business";
const ANSWER: &str = "an answer that is nobody's business";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

/// Takes what is exported.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<(HeaderMap, ExportTraceServiceRequest)>>>);

impl Collector {
    async fn start() -> (Self, SocketAddr) {
        let collector = Self::default();
        let take = async |State(collector): State<Self>, headers: HeaderMap, body: Bytes| {
            let sent = ExportTraceServiceRequest::decode(body).unwrap();
            collector.0.lock().unwrap().push((headers, sent));
            [("content-type", "application/x-protobuf")]
        };
        let router = Router::new().route("/v1/traces", post(take)).with_state(collector.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        (collector, address)
    }

    fn spans(&self) -> Vec<Span> {
        let taken = self.0.lock().unwrap();
        let scopes = taken.iter().flat_map(|(_, sent)| &sent.resource_spans).flat_map(|resource| &resource.scope_spans);
        scopes.flat_map(|scope| &scope.spans).cloned().map(Span).collect()
    }
}

#[derive(Clone, Debug)]
struct Span(opentelemetry_proto::tonic::trace::v1::Span);

impl Span {
    fn id(&self) -> String {
        hex(&self.0.span_id)
    }

    fn parent(&self) -> String {
        hex(&self.0.parent_span_id)
    }

    fn is_error(&self) -> bool {
        self.0.status.as_ref().is_some_and(|status| status.code() == StatusCode::Error)
    }

    fn attributes(&self) -> Value {
        attributes(&self.0.attributes)
    }
}

fn attributes(pairs: &[KeyValue]) -> Value {
    let value = |pair: &KeyValue| match pair.value.as_ref()?.value.as_ref()? {
        Any::StringValue(text) => Some(json!(text)),
        Any::IntValue(number) => Some(json!(number)),
        Any::BoolValue(truth) => Some(json!(truth)),
        _ => None,
    };
    let named: Value = pairs.iter().map(|pair| (pair.key.clone(), value(pair).unwrap_or_default())).collect();
    assert_eq!(
        named.as_object().map(serde_json::Map::len),
        Some(pairs.len()),
        "an attribute is there twice: {pairs:?}"
    );
    named
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A gateway with a model server behind it.
struct Stage {
    url: String,
    gateway: Running,
    model: MockLlm,
    http: reqwest::Client,
    runtime: tokio::runtime::Runtime,
    _folder: tempfile::TempDir,
}

impl Stage {
    fn start(runtime: tokio::runtime::Runtime, args: &[String], variables: &[(&str, String)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = runtime.block_on(MockLlm::start(Script::texts([ANSWER; 9]))).unwrap();
        let url = format!("http://127.0.0.1:{}", free_port());
        let mut command = agl();
        command.args(["serve", "--key", KEY, "--store", "memory", "--listen", url.trim_start_matches("http://")]);
        command.args(["--set", "gateway.upstream.backoff_seconds=0.01", "--set", "gateway.hangup_grace_seconds=0.1"]);
        command.args(args).env("OTEL_BSP_SCHEDULE_DELAY", "20").envs(variables.iter().cloned());
        let gateway = Running::start(&mut command, "serve", folder.path());
        eventually("the gateway is up", LIMIT, || get(&format!("{url}/healthz")).is_some());
        let stage = Self { url, gateway, model, http: reqwest::Client::new(), runtime, _folder: folder };
        stage.post("api/models", json!([{"model": "policy", "endpoint": stage.model.endpoint(), "version": 7}]));
        stage.post("api/rollouts", json!([{"rollout_id": "the-rollout", "input": {}}]));
        stage
    }

    fn post(&self, path: &str, body: Value) -> (u16, String) {
        self.runtime.block_on(post_to(&self.http, &format!("{}/{path}", self.url), body))
    }

    fn ask(&self, stream: bool) -> (u16, String) {
        self.post(CALL, asked(stream))
    }

    fn state(&self) -> Value {
        let answer = self.runtime.block_on(async {
            self.http.get(format!("{}/proxy/state", self.url)).bearer_auth(KEY).send().await.unwrap().text().await
        });
        serde_json::from_str(&answer.unwrap()).unwrap()
    }

    fn traceparent(&self) -> Option<String> {
        self.model.requests().last().unwrap().traceparent.clone()
    }
}

const CALL: &str = "proxy/rollout/the-rollout/attempt/0/mode/train/agent/solver/openai/v1/chat/completions";

fn asked(stream: bool) -> Value {
    json!({"messages": [{"role": "user", "content": QUESTION}], "stream": stream})
}

/// As a harness whose own client is traced.
async fn post_to(http: &reqwest::Client, url: &str, body: Value) -> (u16, String) {
    let request = http.post(url).bearer_auth(KEY).header("traceparent", format!("00-{TRACE}-{CALLER}-01")).json(&body);
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.text().await.unwrap())
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Runtime::new().unwrap()
}

fn traced() -> (Stage, Collector) {
    let runtime = runtime();
    let (collector, address) = runtime.block_on(Collector::start());
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{address}")),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=team-a".to_owned()),
        ("OTEL_SERVICE_NAME", "gateway-7".to_owned()),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test".to_owned()),
    ];
    (Stage::start(runtime, &[], &variables), collector)
}

/// The spans of a name, once as many have come.
fn named(collector: &Collector, name: &str, count: usize) -> Vec<Span> {
    let found = || collector.spans().into_iter().filter(|span| span.0.name == name).collect::<Vec<_>>();
    eventually(&format!("{count} spans {name}"), LIMIT, || found().len() >= count);
    found()
}

#[test]
fn a_call_is_one_trace_from_the_harness_to_the_model_server() {
    let (stage, collector) = traced();
    let (status, answer) = stage.ask(false);
    assert!(status == 200 && answer.contains(ANSWER), "{answer}\n{}", stage.gateway.output());
    let call = &named(&collector, "chat policy", 1)[0];
    assert_eq!((hex(&call.0.trace_id), call.parent()), (TRACE.to_owned(), CALLER.to_owned()));
    assert_eq!((call.0.kind(), call.is_error()), (SpanKind::Server, false));
    let told = call.attributes();
    let usage = serde_json::from_str::<Value>(&answer).unwrap()["usage"].clone();
    for (name, value) in [
        ("gen_ai.operation.name", json!("chat")),
        ("gen_ai.request.model", json!("policy")),
        ("gen_ai.usage.input_tokens", usage["prompt_tokens"].clone()),
        ("gen_ai.usage.output_tokens", usage["completion_tokens"].clone()),
        ("agl.rollout_id", json!("the-rollout")),
        ("agl.attempt_id", json!("0")),
        ("agl.agent", json!("solver")),
        ("agl.mode", json!("train")),
        ("agl.policy_version", json!(7)),
        ("http.response.status_code", json!(200)),
    ] {
        assert_eq!(told[name], value, "{name}: {told}");
    }
    assert!(told["agl.call_id"].as_str().is_some_and(|id| id.starts_with("call-")), "{told}");
    for child in ["upstream", "record", "reply"] {
        let spans = named(&collector, child, 1);
        assert_eq!((spans.len(), spans[0].parent()), (1, call.id()), "{child}");
        let (begin, end) = (spans[0].0.start_time_unix_nano, spans[0].0.end_time_unix_nano);
        assert!(
            call.0.start_time_unix_nano <= begin && end <= call.0.end_time_unix_nano,
            "{child} is outside its call"
        );
    }
    let upstream = &named(&collector, "upstream", 1)[0];
    assert_eq!(stage.traceparent(), Some(format!("00-{TRACE}-{}-01", upstream.id())));
    let sent = upstream.attributes();
    assert_eq!(upstream.0.kind(), SpanKind::Client);
    assert_eq!(
        (&sent["server.address"], &sent["server.port"], &sent["http.response.status_code"]),
        (&json!("127.0.0.1"), &json!(stage.model.address().port()), &json!(200))
    );
    assert!(!collector.spans().iter().any(|span| span.0.name == "wait"), "it waited for nothing");
}

#[test]
fn the_management_interface_is_traced_by_route() {
    let (stage, collector) = traced();
    stage.post("api/rollouts/the-rollout/attempts", json!({}));
    let span = &named(&collector, "POST /api/rollouts/{rollout_id}/attempts", 1)[0];
    let told = span.attributes();
    assert_eq!((&told["agl.rollout_id"], &told["http.response.status_code"]), (&json!("the-rollout"), &json!(201)));
    assert_eq!(span.parent(), CALLER);
}

#[test]
fn the_collector_is_told_who_speaks_and_never_what_was_said() {
    let (mut stage, collector) = traced();
    stage.ask(false);
    stage.ask(true);
    assert!(stage.gateway.terminate().success());
    let taken = collector.0.lock().unwrap();
    let (headers, first) = &taken[0];
    assert_eq!(headers["x-tenant"], "team-a");
    let resource = attributes(&first.resource_spans[0].resource.as_ref().unwrap().attributes);
    assert_eq!(
        (&resource["service.name"], &resource["deployment.environment.name"]),
        (&json!("gateway-7"), &json!("test"))
    );
    let everything = format!("{taken:?}");
    assert!(everything.contains("the-rollout"));
    for secret in [KEY, "nobody's business", "Bearer"] {
        assert!(!everything.contains(secret), "{secret:?} was exported");
    }
}

#[test]
fn a_trace_shows_what_a_call_waited_for_and_each_of_its_tries() {
    let (stage, collector) = traced();
    let rule = |fault| FaultRule { fault, at: vec![0], probability: 0.0 };
    stage.model.set_faults(vec![rule(Fault::Status { status: 503, retry_after: None })]);
    stage.post("proxy/pause", json!({}));
    let (http, url) = (stage.http.clone(), format!("{}/{CALL}", stage.url));
    let call = stage.runtime.spawn(async move { post_to(&http, &url, asked(true)).await });
    eventually("the call is held", LIMIT, || stage.state()["held"] == 1);
    stage.post("proxy/resume", json!({}));
    let (status, answer) = stage.runtime.block_on(call).unwrap();
    assert!(status == 200 && answer.ends_with("data: [DONE]\n\n"), "{answer}");

    let call = &named(&collector, "chat policy", 1)[0];
    let waits = named(&collector, "wait", 2);
    let of: Vec<Value> = waits.iter().map(|wait| wait.attributes()["agl.wait.for"].clone()).collect();
    assert_eq!(of, [json!("resume"), json!("another try")]);
    let tries = named(&collector, "upstream", 2);
    assert_eq!(tries.iter().map(Span::is_error).collect::<Vec<_>>(), [true, false]);
    assert_eq!(
        (&tries[0].attributes()["error.type"], &tries[1].attributes()["http.request.resend_count"]),
        (&json!("503"), &json!(1))
    );
    assert_eq!(named(&collector, "reply", 1)[0].attributes()["agl.delivered"], true);
    let children = collector.spans().into_iter().filter(|span| span.parent() == call.id()).count();
    assert_eq!(children, 6, "two waits, two tries, the record and the reply");
}

#[test]
fn a_call_that_fails_is_an_error_of_its_span() {
    let (stage, collector) = traced();
    stage.post("api/models", json!([{"model": "policy", "endpoint": format!("http://127.0.0.1:{}/v1", free_port())}]));
    let always = FaultRule { fault: Fault::Status { status: 500, retry_after: None }, at: vec![], probability: 1.0 };
    stage.model.set_faults(vec![always]);
    let (status, _) = stage.ask(false);
    assert!(status >= 500);
    let call = &named(&collector, "chat policy", 1)[0];
    assert!(call.is_error());
    assert_eq!(call.attributes()["http.response.status_code"], status);
    assert_eq!(call.attributes()["error.type"], status.to_string());
}

#[test]
fn a_harness_that_hangs_up_is_an_error_of_its_call() {
    let (stage, collector) = traced();
    let hang = FaultRule { fault: Fault::Hang, at: vec![0], probability: 0.0 };
    stage.model.set_faults(vec![hang]);
    let (http, url) = (stage.http.clone(), format!("{}/{CALL}", stage.url));
    let call = stage.runtime.spawn(async move { post_to(&http, &url, asked(false)).await });
    eventually("the server is asked", LIMIT, || stage.model.in_flight() == 1);
    call.abort();
    let call = &named(&collector, "chat policy", 1)[0];
    assert!(call.is_error());
    assert_eq!(call.attributes()["error.type"], "client_closed");
}

#[test]
fn without_a_collector_no_trace_goes_upstream() {
    let stage = Stage::start(runtime(), &[], &[]);
    assert_eq!(stage.ask(false).0, 200);
    assert_eq!(stage.traceparent(), None);
}

#[test]
fn what_the_sampler_leaves_out_is_not_exported() {
    let runtime = runtime();
    let (collector, address) = runtime.block_on(Collector::start());
    let sampler = [("OTEL_TRACES_SAMPLER", "always_off".to_owned())];
    let mut stage = Stage::start(runtime, &["--otlp-endpoint".to_owned(), format!("http://{address}/")], &sampler);
    assert_eq!(stage.ask(false).0, 200);
    assert!(stage.traceparent().is_some_and(|traceparent| traceparent.contains(TRACE) && traceparent.ends_with("-00")));
    assert!(stage.gateway.terminate().success());
    assert_eq!(collector.spans().len(), 0);
}

#[test]
fn a_collector_that_is_not_there_costs_a_line_in_the_log() {
    let endpoint = format!("http://127.0.0.1:{}", free_port());
    let mut stage = Stage::start(runtime(), &["--otlp-endpoint".to_owned(), endpoint], &[]);
    let warned = |stage: &Stage| stage.gateway.output().matches("traces do not reach the collector").count();
    for _ in 0..3 {
        assert_eq!(stage.ask(false).0, 200);
        eventually("it is said", LIMIT, || warned(&stage) > 0);
    }
    assert!(stage.gateway.terminate().success());
    assert_eq!(warned(&stage), 1, "{}", stage.gateway.output());
}

#[test]
fn a_collector_that_never_answers_keeps_nobody() {
    // The system takes the connections, and nobody reads them.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let variables = [
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", format!("http://{}/v1/traces", silent.local_addr().unwrap())),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "3600000".to_owned()),
    ];
    let mut stage = Stage::start(runtime(), &[], &variables);
    for _ in 0..3 {
        assert_eq!(stage.ask(true).0, 200);
    }
    assert!(stage.gateway.terminate().success(), "{}", stage.gateway.output());
}

#[test]
fn an_address_that_is_none_is_wrong_usage() {
    let output = agl().args(["serve", "--otlp-endpoint", "localhost:4318"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("http://127.0.0.1:4318"));
}
