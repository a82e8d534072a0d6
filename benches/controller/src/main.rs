//! What the controller adds to an agent's own start, and what a zygote takes off it.
//!
//! * Part one plays rollouts through gateway (SQLite, as `agl up` runs it), controller and `process` runner, one by one and
//!   several at a time, and times each from before the request that creates it to the arrival of its agent's first call at
//!   the model server. The same command started by nothing but this program, as many at a time, is what it costs by itself.
//! * Part two starts an agent on the `openai` package by a supervisor, without a gateway, cold and from a zygote by turns.
//!
//! This program is also the supervisor that the controller starts.

mod figures;
mod model;
mod starts;
mod whole;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use agl_controller::supervisor;
use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measures.
    Run(Options),
    /// What the controller starts for every attempt.
    Supervise {
        /// The attempt's folder.
        dir: PathBuf,
    },
}

/// What is measured.
#[derive(clap::Args)]
pub struct Options {
    /// A Python that has the `openai` package.
    #[arg(long)]
    python: PathBuf,
    /// Where the agents lie.
    #[arg(long, default_value = "benches/controller/agents")]
    agents: PathBuf,
    /// Rollouts, or starts, of each kind.
    #[arg(long, default_value_t = 100)]
    count: usize,
    /// How many at a time under load.
    #[arg(long, default_value_t = 16)]
    load: usize,
}

fn main() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Command::Supervise { dir } => Ok(supervisor::main(&dir)),
        Command::Run(options) => tokio::runtime::Runtime::new()?.block_on(run(&options)).map(|()| ExitCode::SUCCESS),
    }
}

async fn run(options: &Options) -> anyhow::Result<()> {
    let mut report = std::io::stdout();
    whole::measure(options, &mut report).await?;
    starts::measure(options, &mut report).await?;
    Ok(report.flush()?)
}
