//! `agl-controller`: the controller as a program of its own, for hosts that only run agents. `agl control` is the same.

use std::path::PathBuf;
use std::process::ExitCode;

use agl_client::GatewayClient;
use agl_controller::runner::container::relay;
use agl_controller::{Controller, ControllerConfig, supervisor};
use anyhow::Context;
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};

#[derive(Debug, Parser)]
#[command(version, about = "Runs the rollouts of an agl gateway as processes of this host")]
enum Program {
    /// Runs rollouts until it gets SIGTERM or SIGINT.
    Run(Options),
    /// Owns one attempt's agent. The controller starts it.
    #[command(hide = true)]
    Supervise {
        /// The attempt's folder.
        dir: PathBuf,
    },
    /// Leads from a container to the gateway. The controller starts it.
    #[command(hide = true)]
    Relay {
        /// Which end, and what it needs.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Puts walls around one attempt's agent. The supervisor starts it.
    #[command(hide = true)]
    Isolate {
        /// Which part of the work.
        part: String,
    },
}

#[derive(Debug, clap::Args)]
struct Options {
    /// The gateway's address.
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    gateway: String,
    /// The gateway's server key.
    #[arg(long, env = "AGL_GATEWAY_KEY", hide_env_values = true, default_value = "")]
    key: String,
    /// Settings of the controller, as JSON.
    #[arg(long)]
    config: Option<PathBuf>,
}

fn main() -> anyhow::Result<ExitCode> {
    match Program::parse() {
        Program::Supervise { dir } => Ok(supervisor::main(&dir)),
        Program::Relay { words } => Ok(relay::main(&words)),
        Program::Isolate { part } => Ok(supervisor::isolation::main(&part)),
        Program::Run(options) => run(&options).map(|()| ExitCode::SUCCESS),
    }
}

#[tokio::main]
async fn run(options: &Options) -> anyhow::Result<()> {
    let filter =
        tracing_subscriber::EnvFilter::builder().with_default_directive(tracing::Level::INFO.into()).from_env_lossy();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let config: ControllerConfig = match &options.config {
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            serde_json::from_str(&text).with_context(|| format!("{} is no controller configuration", path.display()))?
        }
        None => ControllerConfig::default(),
    };
    let client = GatewayClient::new(&options.gateway, &options.key)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let shutdown = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    Controller::new(config, client).run(shutdown).await?;
    Ok(())
}
