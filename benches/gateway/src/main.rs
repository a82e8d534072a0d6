//! The three programs that `benches/gateway/run.py` puts together: the gateway, a canned inference server, and whoever calls.
//!
//! * `serve` — the gateway as `agl serve` runs it, with the same allocator, but without the engine, so that it builds in minutes.
//! * [`upstream`] — a server that answers turn after turn of a [`script`], always the same.
//! * [`load`] — callers that play rollouts through whatever stands before that server, as fast as it can or at a given rate.

mod http;
mod load;
mod rollouts;
mod script;
mod upstream;

use agl_gateway::{Gateway, GatewayConfig};
use anyhow::Context;
use clap::{Parser, Subcommand};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// The gateway.
    Serve {
        /// Its configuration as JSON.
        config: String,
    },
    /// The canned inference server.
    Upstream(upstream::UpstreamArgs),
    /// Callers; prints what they measured as JSON.
    Load(load::LoadArgs),
    /// What a shape comes to in bytes and tokens, as JSON.
    Shape {
        /// Which one.
        shape: script::Shape,
    },
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Serve { config } => serve(&config),
        Command::Upstream(args) => single_threaded()?.block_on(upstream::serve(args)),
        Command::Load(args) => single_threaded()?.block_on(load::run(args)),
        Command::Shape { shape } => print(&script::Script::of(shape)?.summary()),
    }
}

fn serve(config: &str) -> anyhow::Result<()> {
    let config: GatewayConfig = serde_json::from_str(config).context("the gateway's configuration")?;
    // As `agl` does without `--log`.
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new("warn"))
        .with_writer(std::io::stderr)
        .init();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut end = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        let gateway = Gateway::bind(config).await?;
        gateway
            .serve(async move {
                let _signal = end.recv().await;
            })
            .await?;
        Ok(())
    })
}

/// Callers and server are there to be out of the way: one thread each.
fn single_threaded() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn print(value: &impl serde::Serialize) -> anyhow::Result<()> {
    use std::io::Write;
    writeln!(std::io::stdout(), "{}", serde_json::to_string(value)?)?;
    Ok(())
}
