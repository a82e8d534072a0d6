//! `agl doctor`: one rollout of a harness, looked at from end to end.

mod door;
mod model;
mod outside;
mod report;
mod times;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use agl_client::GatewayClient;
use agl_client::rollouts::EventFormat;
use agl_core::rollout::{EvaluatorConfig, ProcessConfig, Rollout, RolloutConfig, RolloutCreate};
use agl_core::trajectory::Level;
use agl_trainer::data::Tasks;
use anyhow::Context;
use clap::Args;
use futures_util::StreamExt;
use indicatif::ProgressBar;
use serde_json::{Value, json};

use self::door::Door;
use self::model::{ModelArgs, Served};
use self::outside::Outside;
use self::report::{Findings, Verdict, first_differing};
use self::times::Times;
use super::eval::Scratch;
use crate::failure::{interrupted, usage};
use crate::output::{json as print_json, line, note};
use crate::run_file::RunFile;
use crate::stack::{Stack, interrupt};

/// See `agl doctor --help`.
#[derive(Args)]
#[command(
    after_help = "Examples:\n  agl doctor --command 'python3 my_agent.py'\n  agl doctor --command 'claude -p \"list the files here\" --model policy'\n  \
                        agl doctor run.toml --model ./Qwen3-0.6B\n  agl doctor run.toml --registered policy --gateway http://cluster:8080"
)]
pub struct DoctorArgs {
    /// A run file, whose agent, evaluator and first task are taken; `run.toml` if it is here and no --command is given.
    #[arg(value_name = "RUN.TOML")]
    run_file: Option<PathBuf>,
    /// The command that starts your harness, as a shell takes it; it runs in this folder. `{{ input.question }}`, `{{ openai_base_url }}`, `{{ key }}` … are
    /// filled in as in a run file.
    #[arg(long, value_name = "COMMAND")]
    command: Option<String>,
    /// The command that posts the reward after the harness has ended.
    #[arg(long, value_name = "COMMAND")]
    evaluator: Option<String>,
    /// The rollout's input, as JSON; the first task of the run file's data if absent.
    #[arg(long, value_name = "JSON")]
    input: Option<String>,
    /// The harness is ended after this.
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Keep the rollout's working folder and the gateway's database here.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The checklist as JSON.
    #[arg(long)]
    json: bool,
    /// Sets a key of the run file; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    #[command(flatten)]
    model: ModelArgs,
}

/// Time limit of a command that comes without a run file.
const TIMEOUT_SECONDS: u64 = 300;
/// What is waited for beyond the harness's and the evaluator's own time limits.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the rollout and prints the checklist.
pub async fn doctor(args: DoctorArgs) -> anyhow::Result<()> {
    let run_file = args.run_file.clone().or_else(|| {
        let here = PathBuf::from("run.toml");
        (args.command.is_none() && here.is_file()).then_some(here)
    });
    let mut file = RunFile::read(run_file.as_deref(), &args.set)?;
    let config = args.rollout_config(&file, run_file.is_some())?;
    let input = args.input(&file)?;

    let scratch = Scratch::new(args.out.as_deref())?;
    let mut door = Door::bind().await?;
    let outside = Outside::start().await?;
    let config = watched(config, outside.as_ref());
    file.gateway.listen = "127.0.0.1:0".into();
    file.gateway.key = super::quickstart::fresh_key();
    file.gateway.agent_url = None;
    file.gateway.store = match &args.out {
        Some(folder) => format!("sqlite:{}", folder.join("gateway.db").display()),
        None => "memory".into(),
    };
    file.controller.agent_url = Some(door.url.clone());
    file.controller.work_dir = scratch.folder.join("controller");
    let mut stack = Stack::start(file.gateway.clone(), file.controller.clone()).await?;
    door.open(&stack.gateway_url)?;
    let client = stack.client.clone();
    let own = run_file.is_some().then_some(file.model.path.as_path());
    let seen = tokio::select! {
        seen = look(&args, &file, own, config, input, &client, &door, outside.as_ref()) => seen,
        error = stack.failed() => Err(error),
        () = interrupt() => Err(interrupted("interrupted")),
    };
    let stopped = stack.stop().await;
    let (findings, model) = seen?;
    stopped?;
    let checks = findings.checks();
    let fails = checks.iter().any(|check| check.verdict == Verdict::Fails);
    if args.json {
        print_json(&json!({"model": model, "checks": checks, "times": findings.times}))?;
    } else {
        line(format!("{:18}{model}", "       model"));
        report::print(&checks);
    }
    if let Some(folder) = &args.out {
        let database = folder.join("gateway.db");
        note(format!(
            "to look at every call: agl serve --store sqlite:{} and agl rollouts show doctor",
            database.display()
        ));
    }
    if fails { Err(anyhow::anyhow!("training would not work with this harness as it is")) } else { Ok(()) }
}

impl DoctorArgs {
    /// What the rollout carries for the controller.
    fn rollout_config(&self, file: &RunFile, from_file: bool) -> anyhow::Result<RolloutConfig> {
        let mut config = file.rollout.for_controller();
        let here = std::env::current_dir().context("this folder is gone")?.display().to_string();
        if let Some(command) = &self.command {
            let env = config.process.take().map(|process| process.env).unwrap_or_default();
            config.process = Some(ProcessConfig { argv: shell(command), env, cwd: Some(here.clone()) });
            (config.local, config.container) = (None, None);
        } else if config.process.is_none() && config.local.is_none() && config.container.is_none() {
            return Err(usage(if from_file {
                "the run file names no agent: set rollout.process.argv, or give --command 'your harness'"
            } else {
                "what is to be looked at? Give --command 'your harness', or a run file"
            }));
        }
        if let Some(command) = &self.evaluator {
            // Where the harness ran is in AGL_WORKDIR; a relative path is one of this folder.
            let argv = vec!["sh".into(), "-c".into(), format!("cd \"$0\" && {command}"), here];
            config.evaluator = Some(EvaluatorConfig { argv, env: Default::default(), timeout_seconds: 600 });
        }
        config.timeout_seconds = match self.timeout {
            Some(seconds) => seconds,
            None if from_file => config.timeout_seconds,
            None => TIMEOUT_SECONDS,
        };
        config.max_attempts = Some(1);
        Ok(config)
    }

    fn input(&self, file: &RunFile) -> anyhow::Result<Value> {
        if let Some(input) = &self.input {
            return serde_json::from_str(input).map_err(|error| usage(format!("--input {input}: {error}")));
        }
        let files = &file.data.train_files;
        if files.is_empty() {
            return Ok(json!({}));
        }
        let tasks = Tasks::read(files)?;
        if tasks.is_empty() {
            return Err(usage("data.train_files hold no task; give one with --input"));
        }
        Ok(tasks.task(0).input)
    }
}

fn shell(command: &str) -> Vec<String> {
    ["sh", "-c", command].map(str::to_owned).to_vec()
}

/// The same rollout, with an environment in which what goes past the gateway is seen.
fn watched(mut config: RolloutConfig, outside: Option<&Outside>) -> RolloutConfig {
    let variables = outside.map(Outside::variables).unwrap_or_default();
    if let Some(process) = &mut config.process {
        let own = std::mem::take(&mut process.env);
        process.env = variables.into_iter().chain(own).collect();
    } else if let Some(local) = &mut config.local {
        let own = std::mem::take(&mut local.env_map);
        local.env_map = variables.into_iter().chain(own).collect();
    }
    config
}

/// Runs the rollout, and what was seen of it.
#[expect(clippy::too_many_arguments, reason = "everything that a rollout needs, once")]
async fn look(
    args: &DoctorArgs,
    file: &RunFile,
    own: Option<&Path>,
    config: RolloutConfig,
    input: Value,
    client: &GatewayClient,
    door: &Door,
    outside: Option<&Outside>,
) -> anyhow::Result<(Findings, String)> {
    let served = args.model.serve(own, &file.model, &file.engine, client).await?;
    let has_evaluator = config.evaluator.is_some() || file.controller.evaluator.is_some();
    let limit = Duration::from_secs(config.timeout_seconds)
        + config.evaluator.iter().map(|evaluator| Duration::from_secs(evaluator.timeout_seconds)).sum::<Duration>()
        + PATIENCE;
    let create = RolloutCreate {
        input,
        is_train: true,
        config: Some(config),
        metadata: None,
        rollout_id: Some("doctor".into()),
        retry_of: None,
    };
    let started = Instant::now();
    let mut known = client.create_rollouts(&[create]).await?;
    if known.pop().is_none_or(|rollout| rollout.status.state.is_terminal()) {
        return Err(usage("--out: the folder holds an earlier rollout of the doctor's; choose another"));
    }
    let rollout = tokio::time::timeout(limit, at_its_end(client, door)).await.map_err(|_| {
        anyhow::anyhow!("the rollout did not end within {} s, its own time limit and more", limit.as_secs())
    })??;
    let ended = Instant::now();
    let attempt = client.list_attempts("doctor").await?.pop();
    let sequences = client.sequences("doctor", Level::Trajectory, None).await?;
    let lists = sequences.assembly.breaks.iter().flat_map(|found| {
        let [was, came_back] = first_differing(found);
        [was.to_vec(), came_back.to_vec(), found.previous_tokens.clone(), found.tokens.clone()]
    });
    let decoded = served.decode(lists.collect()).await;
    let knocks = door.knocks();
    let findings = Findings {
        times: attempt.as_ref().map(|_| Times::of(&knocks, started, ended)),
        rollout,
        attempt,
        events: client.events("doctor", None, EventFormat::Raw).await?,
        sequences,
        decoded,
        knocks,
        hosts: outside.map(Outside::hosts),
        has_evaluator,
    };
    let model = served.name();
    if let Served::Native(_, serving) = served {
        serving.stop(client).await?;
    }
    Ok((findings, model))
}

/// Waits for the end of the rollout; says on a terminal how far it is.
async fn at_its_end(client: &GatewayClient, door: &Door) -> anyhow::Result<Rollout> {
    let bar = ProgressBar::new_spinner();
    bar.enable_steady_tick(Duration::from_millis(200));
    let mut changes = client.watch(Some(0));
    let mut tick = tokio::time::interval(Duration::from_millis(500));
    loop {
        tokio::select! {
            change = changes.next() => match change {
                Some(change) => {
                    let ended = change?.rollout.filter(|rollout| rollout.status.state.is_terminal());
                    if let Some(rollout) = ended {
                        bar.finish_and_clear();
                        return Ok(rollout);
                    }
                }
                None => anyhow::bail!("the gateway says nothing more of the rollout"),
            },
            _ = tick.tick() => {
                let calls = door.knocks().iter().filter(|knock| knock.is_call()).count();
                bar.set_message(format!("the harness runs: {calls} model calls so far"));
            }
        }
    }
}
