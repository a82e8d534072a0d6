//! What is logged on standard error.

use std::io::IsTerminal;

use agl_gateway::traces::TARGET;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::failure::usage;
use crate::traces::Traces;

/// How it is logged.
#[derive(Clone, Copy, clap::ValueEnum)]
pub enum Format {
    /// For a person.
    Text,
    /// A JSON object on each line; the ids of rollout and attempt stand in its `span`.
    Json,
}

/// Logs from now on, and gives the spans of traces to whoever exports them.
///
/// # Errors
/// Where the filter is none.
pub fn start(filter: &str, format: Format, traces: Option<&Traces>) -> anyhow::Result<()> {
    // The spans of traces are not the log's: whatever the filter says, it does without them.
    let filter = EnvFilter::try_new(format!("{filter},{TARGET}=off"))
        .map_err(|error| usage(format!("--log {filter}: {error}")))?;
    let lines =
        tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    let lines: Box<dyn Layer<Registry> + Send + Sync> = match format {
        Format::Text => lines.boxed(),
        Format::Json => lines.json().with_span_list(false).boxed(),
    };
    match traces {
        // The filter is everybody's then, so that what it leaves out costs no more than looking at its level.
        None => tracing_subscriber::registry().with(lines).with(filter).init(),
        Some(traces) => {
            tracing_subscriber::registry().with(lines.with_filter(filter)).with(traces.layer()).init();
        }
    }
    Ok(())
}
