//! Traces over OTLP: which spans there are is the gateway's business ([`agl_gateway::traces`]); here they leave the process.
//!
//! The SDK reads OpenTelemetry's own variables: service name, resource, headers, sampler, timeout, the sizes of its queue. A thread
//! of its own sends what the queue holds; a full queue drops spans, so that no call ever waits for the collector.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use agl_gateway::traces::{Propagation, TARGET};
use axum::http::HeaderMap;
use clap::Args;
use opentelemetry::Context;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::TracerProvider;
use opentelemetry_http::{Bytes, HeaderExtractor, HeaderInjector, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use tokio::runtime::Handle;
use tracing::{Span, Subscriber};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::registry::LookupSpan;

use crate::failure::usage;

/// Whether traces are exported, and where to.
#[derive(Args, Clone, Debug)]
pub struct TraceArgs {
    /// Exports traces over OTLP/HTTP to this collector, such as `http://127.0.0.1:4318`; wins over `OTEL_EXPORTER_OTLP_ENDPOINT`.
    /// Without either there are none.
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
}

/// What is still queued at the end may take so long to be sent.
const LAST_SENDING: Duration = Duration::from_secs(5);
/// A collector that cannot be reached is named no more often than this.
const WARN_EVERY: Duration = Duration::from_secs(60);
/// How long one sending may take, where `OTEL_EXPORTER_OTLP_TIMEOUT` does not say.
const TIMEOUT: Duration = Duration::from_secs(10);

impl TraceArgs {
    /// True where the flag or the environment names a collector.
    fn is_wanted(&self) -> bool {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let is = |name: &str, wanted: &str| set(name).is_some_and(|value| value.eq_ignore_ascii_case(wanted));
        let named = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
        let off = is("OTEL_SDK_DISABLED", "true") || is("OTEL_TRACES_EXPORTER", "none");
        self.otlp_endpoint.is_some() || (!off && named.into_iter().any(|name| set(name).is_some()))
    }
}

/// Spans on their way to the collector.
pub struct Traces(SdkTracerProvider);

impl Traces {
    /// Starts the thread that exports; `None` where nobody wants traces. What it sends, it sends on the runtime.
    ///
    /// # Errors
    /// Where the address, or a variable of OpenTelemetry, cannot be used.
    pub fn start(args: &TraceArgs, runtime: &Handle) -> anyhow::Result<Option<Self>> {
        if !args.is_wanted() {
            return Ok(None);
        }
        let unusable = |error: &dyn std::fmt::Display| usage(format!("traces cannot be exported: {error}"));
        let client = reqwest::Client::builder().timeout(timeout()).build().map_err(|error| unusable(&error))?;
        let client = Client { client, runtime: runtime.clone() };
        let mut exporter = opentelemetry_otlp::SpanExporter::builder().with_http().with_http_client(client);
        if let Some(endpoint) = &args.otlp_endpoint {
            let url = reqwest::Url::parse(endpoint).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
            let Some(url) = url else {
                return Err(usage(format!("--otlp-endpoint {endpoint}: it is no URL such as http://127.0.0.1:4318")));
            };
            exporter = exporter.with_endpoint(format!("{}/v1/traces", url.as_str().trim_end_matches('/')));
        }
        let exporter = Patient { inner: exporter.build().map_err(|error| unusable(&error))?, news: Mutex::default() };
        let provider = SdkTracerProvider::builder().with_resource(resource()).with_batch_exporter(exporter).build();
        agl_gateway::traces::propagate(Box::new(W3c(TraceContextPropagator::new())));
        Ok(Some(Self(provider)))
    }

    /// Says that there are traces, and which wish is not granted. For once there is a log.
    pub fn announce(&self) {
        let names = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
        let protocol = names.into_iter().find_map(|name| std::env::var(name).ok()).unwrap_or_default();
        if matches!(protocol.as_str(), "" | "http/protobuf") {
            tracing::info!("traces are exported");
        } else {
            tracing::warn!(
                protocol,
                "traces are sent as http/protobuf all the same: is the endpoint the collector's for HTTP (port 4318)?"
            );
        }
    }

    /// What takes the spans up, and nothing else.
    pub fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        tracing_opentelemetry::layer()
            .with_tracer(self.0.tracer("agl"))
            // The spans are never entered; and where in the source they begin is nobody's business.
            .with_context_activation(false)
            .with_tracked_inactivity(false)
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_filter(Targets::new().with_target(TARGET, LevelFilter::INFO))
    }

    /// Sends what is still queued, in bounded time.
    pub fn end(self) {
        if let Err(error) = self.0.shutdown_with_timeout(LAST_SENDING) {
            tracing::warn!(%error, "the last traces may not have reached the collector");
        }
    }
}

/// `service.name` is `agl` where the environment does not say otherwise.
fn resource() -> Resource {
    let named = Resource::builder().build();
    let unnamed = named.get(&"service.name".into()).is_none_or(|name| name.as_str().starts_with("unknown_service"));
    if unnamed { Resource::builder().with_service_name("agl").build() } else { named }
}

fn timeout() -> Duration {
    let milliseconds = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"]
        .into_iter()
        .find_map(|name| std::env::var(name).ok()?.parse().ok());
    milliseconds.map_or(TIMEOUT, Duration::from_millis)
}

/// Traces as the W3C carries them: `traceparent` and `tracestate`.
struct W3c(TraceContextPropagator);

impl Propagation for W3c {
    fn take_up(&self, span: &Span, headers: &HeaderMap) {
        let parent = self.0.extract_with_context(&Context::new(), &HeaderExtractor(headers));
        // Fails only for a span that has begun already or that nobody hears of.
        let _begun = span.set_parent(parent);
    }

    fn hand_on(&self, span: &Span, headers: &mut HeaderMap) {
        self.0.inject_context(&span.context(), &mut HeaderInjector(headers));
    }
}

/// Our own HTTP client for the exporter, whose thread is none of the runtime's.
#[derive(Debug)]
struct Client {
    client: reqwest::Client,
    runtime: Handle,
}

#[async_trait::async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (client, request) = (self.client.clone(), reqwest::Request::try_from(request)?);
        let sent = self.runtime.spawn(async move {
            let answer = client.execute(request).await?;
            let (status, headers) = (answer.status(), answer.headers().clone());
            Ok::<_, reqwest::Error>((status, headers, answer.bytes().await?))
        });
        let (status, headers, body) = sent.await??;
        let mut response = Response::new(body);
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        Ok(response)
    }
}

/// Says now and then that the collector does not take what it is sent; the SDK would say so for every batch.
#[derive(Debug)]
struct Patient<E> {
    inner: E,
    news: Mutex<News>,
}

#[derive(Debug, Default)]
struct News {
    said: Option<Instant>,
    lost: usize,
}

impl<E: SpanExporter> SpanExporter for Patient<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let exported = self.inner.export(batch).await;
        // Two fields that are set together: whole after every statement.
        let mut news = self.news.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match &exported {
            Ok(()) => *news = News::default(),
            Err(error) => {
                news.lost += spans;
                if news.said.is_none_or(|said| said.elapsed() >= WARN_EVERY) {
                    news.said = Some(Instant::now());
                    tracing::warn!(%error, lost_spans = news.lost, "traces do not reach the collector; calls are not concerned");
                }
            }
        }
        exported
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}
