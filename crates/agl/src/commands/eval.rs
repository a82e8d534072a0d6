//! `agl eval`: rollouts of a checkpoint without training.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agl_client::GatewayClient;
use agl_engine::Engine;
use agl_trainer::collect::Collector;
use agl_trainer::data::Tasks;
use agl_trainer::evaluate::{Evaluation, EvaluationPlan, fresh_run_id};
use agl_trainer::serving::Serving;
use clap::Args;
use indicatif::ProgressBar;

use super::run::SETTINGS;
use crate::failure::{interrupted, usage};
use crate::output::{clipped, json, line, table};
use crate::run_file::RunFile;
use crate::stack::{Stack, interrupt};
use crate::traces::TraceArgs;

/// See `agl eval --help`.
#[derive(Args)]
pub struct EvalArgs {
    /// A checkpoint of a run, or a Hugging Face directory.
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,
    /// Tasks, `.jsonl` or `.parquet`; may be repeated. The run file's validation tasks if absent.
    #[arg(long = "data", value_name = "FILE")]
    data: Vec<PathBuf>,
    /// Which agent to run; the settings of the checkpoint's own run if absent.
    #[arg(long = "run", value_name = "RUN.TOML")]
    run_file: Option<PathBuf>,
    /// Sets a key of the run file; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Rollouts per task.
    #[arg(long, default_value_t = 1)]
    n: usize,
    /// Only the first so many tasks.
    #[arg(long)]
    limit: Option<usize>,
    /// Seed of the model calls.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where rollouts are kept (`gateway.db`, logs, `results.jsonl`); a temporary folder, removed at the end, if absent.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Everything as JSON on standard output.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(crate) traces: TraceArgs,
}

/// Runs the evaluation and prints it.
pub async fn eval(args: EvalArgs) -> anyhow::Result<()> {
    if args.n == 0 {
        return Err(usage("--n 0: a task needs at least one rollout"));
    }
    let policy = policy_of(&args.checkpoint)?;
    let run_file = match &args.run_file {
        Some(path) => path.clone(),
        None => run_file_of(&args.checkpoint)?,
    };
    let mut file = RunFile::read(Some(&run_file), &args.set)?;
    let files = if args.data.is_empty() { file.data.val_files.clone() } else { args.data.clone() };
    let tasks = Tasks::read(&files)?;
    let count = args.limit.unwrap_or(usize::MAX).min(tasks.len());
    if count == 0 {
        return Err(usage("there are no tasks; name a file with --data"));
    }
    let tasks: Vec<_> = (0..count).map(|index| tasks.task(index)).collect();

    let scratch = Scratch::new(args.out.as_deref())?;
    file.gateway.listen = "127.0.0.1:0".into();
    file.gateway.key = super::quickstart::fresh_key();
    // Wherever the run's own agents found their gateway: these find this one.
    (file.gateway.agent_url, file.controller.agent_url) = (None, None);
    file.gateway.store = match &args.out {
        Some(folder) => format!("sqlite:{}", folder.join("gateway.db").display()),
        None => "memory".into(),
    };
    file.controller.work_dir = scratch.folder.clone();
    let mut stack = Stack::start(file.gateway.clone(), file.controller.clone()).await?;
    let client = stack.client.clone();
    let evaluation = tokio::select! {
        evaluation = evaluate(&args, &file, &client, &policy, &tasks) => evaluation,
        error = stack.failed() => Err(error),
        () = interrupt() => Err(interrupted("interrupted")),
    };
    let stopped = stack.stop().await;
    let evaluation = evaluation?;
    stopped?;
    if let Some(folder) = &args.out {
        let lines: Result<Vec<_>, _> = evaluation.tasks.iter().map(serde_json::to_string).collect();
        let path = folder.join("results.jsonl");
        std::fs::write(&path, lines?.join("\n") + "\n")
            .map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
    }
    if args.json {
        json(&evaluation)
    } else {
        print(&evaluation);
        Ok(())
    }
}

async fn evaluate(
    args: &EvalArgs,
    file: &RunFile,
    client: &GatewayClient,
    policy: &Path,
    tasks: &[agl_trainer::data::Task],
) -> anyhow::Result<Evaluation> {
    let run_id = fresh_run_id();
    let (weights, config) = (policy.to_owned(), file.engine.clone());
    let engine = tokio::task::spawn_blocking(move || Engine::load(&weights, config)).await??;
    let mut serving = Serving::start(engine, &file.model, client.clone(), &run_id).await?;
    serving.publish(1).await?;
    let algorithm = &file.algorithm;
    let mut collector = Collector::new(
        client.clone(),
        algorithm.level,
        algorithm.reward_fillna_value,
        algorithm.on_missing_reward,
        Duration::from_secs(file.trainer.wait_limit_seconds),
    );
    let rollout_config = file.rollout.for_controller();
    let plan = EvaluationPlan {
        run_id: &run_id,
        prefix: run_id.clone(),
        step: 0,
        n: args.n,
        seed: args.seed,
        config: &rollout_config,
    };
    let bar = ProgressBar::new((tasks.len() * args.n) as u64);
    let evaluation = plan.run(tasks, &mut collector, |_| bar.inc(1)).await;
    bar.finish_and_clear();
    serving.stop(client).await?;
    Ok(evaluation?)
}

fn print(evaluation: &Evaluation) {
    let rows: Vec<Vec<String>> = evaluation
        .tasks
        .iter()
        .map(|task| {
            let input = match task.input.get("question").and_then(|question| question.as_str()) {
                Some(question) => question.to_owned(),
                None => task.input.to_string(),
            };
            vec![
                clipped(&task.data_id, 24),
                task.state.to_string(),
                task.reward.map_or_else(|| task.excluded.unwrap_or("–").to_owned(), |reward| format!("{reward:.2}")),
                task.calls.to_string(),
                task.rows.to_string(),
                clipped(&input, 72),
            ]
        })
        .collect();
    table(&["task", "state", "reward", "calls", "rows", "input"], &rows);
    let mut rewards: BTreeMap<String, usize> = BTreeMap::new();
    for task in &evaluation.tasks {
        let reward = task.reward.map_or_else(|| "left out".to_owned(), |reward| format!("{reward:.2}"));
        *rewards.entry(reward).or_default() += 1;
    }
    line("");
    table(
        &["reward", "rollouts"],
        &rewards.into_iter().map(|(reward, count)| vec![reward, count.to_string()]).collect::<Vec<_>>(),
    );
    line(format!(
        "\nmean reward {:.4} ± {:.4} (standard error) on {} rollouts, {} left out, {:.2} calls per solved one",
        evaluation.reward,
        evaluation.standard_error,
        evaluation.rollouts,
        evaluation.excluded,
        evaluation.calls_per_solved,
    ));
}

/// The Hugging Face directory of a checkpoint.
fn policy_of(checkpoint: &Path) -> anyhow::Result<PathBuf> {
    [checkpoint.join("policy"), checkpoint.to_owned()]
        .into_iter()
        .find(|folder| folder.join("config.json").is_file())
        .ok_or_else(|| {
            usage(format!(
                "{}: neither a checkpoint nor a model directory: there is no config.json",
                checkpoint.display()
            ))
        })
}

/// `OUT/settings.toml` for `OUT/checkpoints/step-000040` and for its `policy` folder.
fn run_file_of(checkpoint: &Path) -> anyhow::Result<PathBuf> {
    let place = checkpoint.canonicalize().unwrap_or_else(|_| checkpoint.to_owned());
    place.ancestors().skip(1).take(3).map(|folder| folder.join(SETTINGS)).find(|path| path.is_file()).ok_or_else(|| {
        let checkpoint = checkpoint.display();
        usage(format!("{checkpoint}: not part of a run, there is no {SETTINGS} above it; say which agent to run with --run RUN.TOML"))
    })
}

/// The folder that rollouts run in, removed at the end unless it was asked for.
pub struct Scratch {
    /// The folder.
    pub folder: PathBuf,
    remove: bool,
}

impl Scratch {
    /// `out`, or a folder that is removed when this is dropped.
    pub fn new(out: Option<&Path>) -> anyhow::Result<Self> {
        let folder = match out {
            Some(folder) => folder.to_owned(),
            None => std::env::temp_dir().join(fresh_run_id()),
        };
        std::fs::create_dir_all(&folder).map_err(|error| anyhow::anyhow!("{}: {error}", folder.display()))?;
        Ok(Self { folder, remove: out.is_none() })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.remove {
            // What cannot be removed from a temporary folder is the system's to remove.
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}
