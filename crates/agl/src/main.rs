//! `agl`: harnessed agentic RL. See `agl --help`.

mod commands;
mod failure;
mod log;
mod output;
mod progress;
mod run_file;
mod stack;
mod traces;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

/// Many tensors are made and dropped in a step, and many large bodies pass the gateway: an allocator that reuses what was freed at once, and
/// gives back a little later what nobody asked for (`.cargo/config.toml`).
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Harnessed agentic RL: an agent that already works gets better at its own harness.
#[derive(Parser)]
#[command(name = "agl", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// What is logged on standard error, such as `info` or `agl_gateway=debug`; `warn` if absent, and nothing under the doctor.
    #[arg(long, global = true, env = "AGL_LOG", value_name = "FILTER")]
    log: Option<String>,
    /// How it is logged.
    #[arg(long, global = true, env = "AGL_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    log_format: log::Format,
}

#[derive(Subcommand)]
enum Command {
    /// Train the calculator agent on this machine, nothing to configure.
    Quickstart(commands::quickstart::QuickstartArgs),
    /// Gateway, controller and trainer in one process.
    Up(commands::run::UpArgs),
    /// The gateway alone.
    Serve(commands::run::ServeArgs),
    /// The controller alone.
    Control(commands::run::ControlArgs),
    /// The trainer alone.
    Train(commands::run::TrainArgs),
    /// Rollouts of a checkpoint without training: a table and per-task results.
    Eval(commands::eval::EvalArgs),
    /// Supervised start of a policy from chat transcripts.
    Sft(commands::sft::SftArgs),
    /// One rollout of your harness, checked end to end: calls captured, ids, log-probs, turns merged, reward.
    ///
    /// The harness runs once, against a model of this machine or a probe that needs none. The checklist says whether its calls were
    /// captured, in which dialect, with token ids and log-probs, whether consecutive turns merge into one training row (and if not,
    /// the first tokens that differ), whether a reward was posted, and where the time went. Nothing is trained, and no other gateway is
    /// touched. Exit code 1 where training would not work.
    Doctor(commands::doctor::DoctorArgs),
    /// Write a run file, a sample of tasks and an evaluator for your own agent.
    Init(commands::init::InitArgs),
    /// Look at rollouts, repeat or cancel them.
    #[command(subcommand)]
    Rollouts(commands::rollouts::RolloutsCommand),
    /// Serve a model directory, or change what the gateway knows of model servers.
    #[command(subcommand)]
    Models(commands::models::ModelsCommand),
    /// Kubernetes manifests of gateway and controller, NetworkPolicies included.
    Manifests(commands::manifests::ManifestsArgs),
    /// Runs one attempt; the controller starts it.
    #[command(hide = true)]
    Supervise(commands::supervise::SuperviseArgs),
    /// Leads from a container to the gateway; the controller starts it.
    #[command(hide = true)]
    Relay(commands::relay::RelayArgs),
    /// Puts walls around one attempt's agent; the supervisor starts it.
    #[command(hide = true)]
    Isolate(commands::isolate::IsolateArgs),
}

impl Command {
    /// Of the commands with a gateway inside: it is what has spans.
    fn traces(&self) -> Option<&traces::TraceArgs> {
        match self {
            Self::Quickstart(args) => Some(&args.traces),
            Self::Up(args) => Some(&args.traces),
            Self::Serve(args) => Some(&args.traces),
            Self::Eval(args) => Some(&args.traces),
            _ => None,
        }
    }
}

/// Which gateway to talk to.
#[derive(Args, Clone, Debug)]
pub struct GatewayArgs {
    /// The gateway's address.
    #[arg(long, env = "AGL_GATEWAY", default_value = "http://127.0.0.1:8080", value_name = "URL")]
    gateway: String,
    /// The gateway's server key.
    #[arg(long, env = "AGL_SERVER_KEY", default_value = "", hide_env_values = true, hide_default_value = true)]
    key: String,
}

impl GatewayArgs {
    fn client(&self) -> anyhow::Result<agl_client::GatewayClient> {
        // A person at a terminal wants to know soon that nobody answers.
        let client = agl_client::GatewayClient::new(&self.gateway, &self.key)?;
        Ok(client.with_patience(std::time::Duration::from_secs(3)))
    }
}

/// A run file and what overrides it.
#[derive(Args, Clone, Debug)]
pub struct RunFileArgs {
    /// The run file.
    #[arg(value_name = "RUN.TOML")]
    run_file: Option<PathBuf>,
    /// Sets a key of the run file, such as `actor.optim.lr=1e-4`; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    // The supervisor has its own log and no runtime: it must stay small, there is one for every attempt.
    if let Command::Supervise(args) = &cli.command {
        return commands::supervise::supervise(args);
    }
    if let Command::Relay(args) = &cli.command {
        return commands::relay::relay(args);
    }
    // Namespaces are made by a process with a single thread.
    if let Command::Isolate(args) = &cli.command {
        return commands::isolate::isolate(args);
    }
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::note(format!("agl: {error:#}"));
            failure::exit_code(&error)
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    // The doctor's checklist says it all.
    let default = if matches!(cli.command, Command::Doctor(_)) { "off" } else { "warn" };
    let filter = cli.log.as_deref().unwrap_or(default);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let traces = match cli.command.traces() {
        Some(args) => traces::Traces::start(args, runtime.handle())?,
        None => None,
    };
    log::start(filter, cli.log_format, traces.as_ref())?;
    if let Some(traces) = &traces {
        traces.announce();
    }
    let result = runtime.block_on(async {
        match cli.command {
            Command::Quickstart(args) => commands::quickstart::quickstart(args).await,
            Command::Up(args) => commands::run::up(args).await,
            Command::Serve(args) => commands::run::serve(args).await,
            Command::Control(args) => commands::run::control(args).await,
            Command::Train(args) => commands::run::train(args).await,
            Command::Eval(args) => commands::eval::eval(args).await,
            Command::Sft(args) => commands::sft::sft(args).await,
            Command::Doctor(args) => commands::doctor::doctor(args).await,
            Command::Init(args) => commands::init::init(&args),
            Command::Rollouts(command) => commands::rollouts::rollouts(command).await,
            Command::Models(command) => commands::models::models(command).await,
            Command::Manifests(args) => commands::manifests::manifests(&args),
            Command::Supervise(_) | Command::Isolate(_) | Command::Relay(_) => Ok(()),
        }
    });
    if let Some(traces) = traces {
        traces.end();
    }
    // A blocking task, such as an update that Ctrl-C came into, is not waited for.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    result
}
