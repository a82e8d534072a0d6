//! `agl up`, and its three parts `agl serve`, `agl control` and `agl train`.

use std::path::Path;
use std::time::Duration;

use agl_client::GatewayClient;
use agl_controller::Controller;
use agl_controller::plan::Action;
use agl_gateway::Gateway;
use agl_trainer::TrainerError;
use agl_trainer::run::RunSummary;
use agl_trainer::train::Trainer;
use clap::Args;

use crate::RunFileArgs;
use crate::failure::{interrupted, usage};
use crate::output::{clipped, json, line, note, table};
use crate::progress::RunView;
use crate::run_file::{RunFile, store_path};
use crate::stack::{Stack, interrupt};
use crate::traces::TraceArgs;

/// The settings of a run, in its folder. Not called `run.toml`: that may be the user's own file.
pub const SETTINGS: &str = "settings.toml";

/// A killed gateway is waited for this long before the trainer or the controller gives up.
const PATIENCE: Duration = Duration::from_secs(600);

/// See `agl up --help`.
#[derive(Args)]
pub struct UpArgs {
    #[command(flatten)]
    file: RunFileArgs,
    /// Continue the run in `trainer.default_local_dir` from its newest checkpoint.
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    pub(crate) traces: TraceArgs,
}

/// See `agl serve --help`.
#[derive(Args)]
pub struct ServeArgs {
    #[command(flatten)]
    file: RunFileArgs,
    /// Where to listen; wins over `gateway.listen`.
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// `memory`, `sqlite:PATH` or `postgres://USER@HOST:PORT/DATABASE`; wins over `gateway.store`.
    #[arg(long)]
    store: Option<String>,
    /// The server key; wins over `gateway.key`.
    #[arg(long, env = "AGL_SERVER_KEY", hide_env_values = true)]
    key: Option<String>,
    #[command(flatten)]
    pub(crate) traces: TraceArgs,
}

/// How `agl control` and `agl train` find the gateway.
#[derive(Args)]
pub struct ElsewhereArgs {
    /// The gateway's address; from `gateway.listen` if absent.
    #[arg(long, env = "AGL_GATEWAY", value_name = "URL")]
    gateway: Option<String>,
    /// The gateway's server key; from `gateway.key` if absent.
    #[arg(long, env = "AGL_SERVER_KEY", hide_env_values = true)]
    key: Option<String>,
}

/// See `agl control --help`.
#[derive(Args)]
pub struct ControlArgs {
    #[command(flatten)]
    file: RunFileArgs,
    #[command(flatten)]
    elsewhere: ElsewhereArgs,
    /// Print what it would do now, and do nothing.
    #[arg(long)]
    dry_run: bool,
    /// With --dry-run: as JSON, commands and manifests included.
    #[arg(long, requires = "dry_run")]
    json: bool,
}

/// See `agl train --help`.
#[derive(Args)]
pub struct TrainArgs {
    #[command(flatten)]
    file: RunFileArgs,
    #[command(flatten)]
    elsewhere: ElsewhereArgs,
    /// Continue the run in `trainer.default_local_dir` from its newest checkpoint.
    #[arg(long)]
    resume: bool,
}

impl ElsewhereArgs {
    fn client(&self, file: &RunFile) -> anyhow::Result<GatewayClient> {
        let url = self.gateway.clone().unwrap_or_else(|| file.gateway_url());
        let key = self.key.as_deref().unwrap_or(&file.gateway.key);
        Ok(GatewayClient::new(&url, key)?.with_patience(PATIENCE))
    }
}

/// Gateway, controller and trainer in one process.
pub async fn up(args: UpArgs) -> anyhow::Result<()> {
    let Some(path) = &args.file.run_file else {
        return Err(usage("agl up needs a run file; recipes/calculator/run.toml is one"));
    };
    let file = RunFile::read(Some(path), &args.file.set)?;
    let again = format!("agl up {} --resume", path.display());
    let summary = run_here(&file, args.resume, &again).await?;
    print_summary(&summary, &file);
    Ok(())
}

/// Runs all three parts in this process to the end of the training run. `again` is the command that continues it.
pub async fn run_here(file: &RunFile, resume: bool, again: &str) -> anyhow::Result<RunSummary> {
    create(&file.trainer.default_local_dir)?;
    let mut stack = Stack::start(file.gateway.clone(), file.controller.clone()).await?;
    let client = stack.client.clone();
    let result = tokio::select! {
        result = train_with(file, client, resume, again) => result,
        error = stack.failed() => Err(error),
    };
    let stopped = stack.stop().await;
    let summary = result?;
    stopped?;
    Ok(summary)
}

/// Trains to the end, or to Ctrl-C. `again` is the command that continues the run.
async fn train_with(file: &RunFile, client: GatewayClient, resume: bool, again: &str) -> anyhow::Result<RunSummary> {
    let folder = &file.trainer.default_local_dir;
    // First, so that whatever there is of a run can be continued with its settings; a run that is there keeps its own.
    if !folder.join("run.json").exists() {
        file.write(&folder.join(SETTINGS))?;
    }
    let mut interrupts = std::pin::pin!(interrupt());
    let trainer = tokio::select! {
        trainer = Trainer::prepare(file.settings(), client, resume) => trainer?,
        () = &mut interrupts => return Err(interrupted("interrupted before the run began")),
    };
    let mut view = RunView::new();
    let result = trainer.run(|progress| view.show(progress), interrupts).await;
    view.finish();
    match result {
        Err(TrainerError::Interrupted { .. }) => Err(interrupted(format!("interrupted; continue with: {again}"))),
        result => Ok(result?),
    }
}

fn create(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).map_err(|error| anyhow::anyhow!("cannot create {}: {error}", folder.display()))
}

/// What a run came to.
pub fn print_summary(summary: &RunSummary, file: &RunFile) {
    let reward = |value: Option<f64>| value.map_or_else(|| "not measured".to_owned(), |value| format!("{value:.3}"));
    let folder = &file.trainer.default_local_dir;
    line(format!(
        "validation reward {} → {} in {} steps, {} rollouts, {} model calls, {:.0} s",
        reward(summary.initial_val_reward),
        reward(summary.final_val_reward),
        summary.steps,
        summary.rollouts,
        summary.model_calls,
        summary.wall_seconds,
    ));
    line(format!(
        "sampled {:.0} tokens/s, trained {:.0} tokens/s, {:.2} rows per rollout",
        summary.sampled_tokens_per_second, summary.trained_tokens_per_second, summary.rows_per_rollout,
    ));
    line(format!("reward curve  {}", folder.join("reward.svg").display()));
    line(format!("summary       {}", folder.join("summary.json").display()));
    line(format!("checkpoint    {}", summary.checkpoint.join("policy").display()));
}

/// The gateway alone.
pub async fn serve(args: ServeArgs) -> anyhow::Result<()> {
    let mut file = RunFile::read(args.file.run_file.as_deref(), &args.file.set)?;
    if let Some(listen) = args.listen {
        file.gateway.listen = listen;
    }
    if let Some(store) = args.store {
        file.gateway.store = store;
    }
    if let Some(key) = args.key {
        file.gateway.key = key;
    }
    // The gateway may be the first part of a run to start.
    if let Some(folder) = store_path(&file.gateway.store).and_then(|path| Path::new(path).parent()) {
        create(folder)?;
    }
    let gateway = Gateway::bind(file.gateway.clone()).await?;
    note(format!("gateway on http://{}, store {}", gateway.addr(), file.gateway.shown_store()));
    gateway.serve(interrupt()).await?;
    Ok(())
}

/// The controller alone.
pub async fn control(args: ControlArgs) -> anyhow::Result<()> {
    let file = RunFile::read(args.file.run_file.as_deref(), &args.file.set)?;
    let client = args.elsewhere.client(&file)?;
    if args.dry_run {
        return print_plan(Controller::new(file.controller.clone(), client), args.json).await;
    }
    note(format!("controller for {}, work in {}", client.base_url(), file.controller.work_dir.display()));
    Controller::new(file.controller.clone(), client).run(interrupt()).await?;
    Ok(())
}

async fn print_plan(controller: Controller, as_json: bool) -> anyhow::Result<()> {
    let planned = controller.plan().await?;
    if as_json {
        return json(&planned);
    }
    let rows: Vec<Vec<String>> = planned
        .iter()
        .map(|planned| {
            let (action, what) = match &planned.action {
                Action::Start { what } => ("start", clipped(&what.to_string(), 80)),
                Action::Fail { why } => ("fail", clipped(why, 80)),
                Action::TakeUp => ("take up", String::new()),
                Action::Leave => ("leave", "for another runner".to_owned()),
                Action::End => ("end", "no rollout wants it".to_owned()),
            };
            vec![action.to_owned(), planned.rollout_id.clone(), planned.attempt_id.clone(), what]
        })
        .collect();
    table(&["would", "rollout", "attempt", "what"], &rows);
    Ok(())
}

/// The trainer alone.
pub async fn train(args: TrainArgs) -> anyhow::Result<()> {
    let Some(path) = &args.file.run_file else {
        return Err(usage("agl train needs a run file; recipes/calculator/run.toml is one"));
    };
    let file = RunFile::read(Some(path), &args.file.set)?;
    let client = args.elsewhere.client(&file)?;
    let folder = &file.trainer.default_local_dir;
    create(folder)?;
    let again = format!("agl train {} --resume", path.display());
    let summary = train_with(&file, client, args.resume, &again).await?;
    print_summary(&summary, &file);
    Ok(())
}
