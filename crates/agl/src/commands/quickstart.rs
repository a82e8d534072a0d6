//! `agl quickstart`: the calculator recipe on this machine, nothing to configure.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::Context;
use clap::Args;
use tokio::process::Command;

use super::run::{SETTINGS, print_summary, run_here};
use crate::failure::usage;
use crate::output::{line, note};
use crate::run_file::RunFile;
use crate::traces::TraceArgs;

/// See `agl quickstart --help`.
#[derive(Args)]
pub struct QuickstartArgs {
    /// Seed of the questions, of their order and of every model call.
    #[arg(long)]
    seed: Option<u64>,
    /// Training steps.
    #[arg(long)]
    steps: Option<u64>,
    /// Folder of the run; the first free one of `out/quickstart`, `out/quickstart-2`, … if absent.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Continue a run that was stopped, the newest one if `--out` is absent.
    #[arg(long)]
    resume: bool,
    /// Write the recipe, its questions and `run.toml` into the folder and stop: for running the three parts by hand.
    #[arg(long, conflicts_with = "resume")]
    unpack_only: bool,
    /// Sets a key of the run file, such as `actor.optim.lr=0`; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    #[command(flatten)]
    pub(crate) traces: TraceArgs,
}

const DEFAULT_OUT: &str = "out/quickstart";

/// The recipe is part of the binary, so that the binary is all one needs beside `python3`.
const RECIPE: [(&str, &[u8]); 11] = {
    macro_rules! recipe {
        ($($name:literal),*) => {
            [$(($name, include_bytes!(concat!("../../../../recipes/calculator/", $name)) as &[u8])),*]
        };
    }
    recipe![
        "run.toml",
        "agent.py",
        "calculator.py",
        "http_json.py",
        "evaluator.py",
        "make_data.py",
        "policy/config.json",
        "policy/generation_config.json",
        "policy/model.safetensors",
        "policy/tokenizer.json",
        "policy/tokenizer_config.json"
    ]
};

/// Validation questions are the same for every seed, so that seeds can be compared.
const VALIDATION_SEED: u64 = 0;
const VALIDATION_QUESTIONS: u64 = 256;
const TRAINING_QUESTIONS: u64 = 4096;

/// Trains the recipe and says what came of it.
pub async fn quickstart(args: QuickstartArgs) -> anyhow::Result<()> {
    let out = match &args.out {
        Some(out) => out.clone(),
        None => default_folder(args.resume)?,
    };
    let mut file = if args.resume { settings_of(&out, &args)? } else { unpack(&out, &args).await? };
    if args.unpack_only {
        let path = out.join("run.toml");
        file.write(&path)?;
        line(path.display());
        return Ok(());
    }
    // Nobody else needs this gateway, so nobody gets in: not even the agents, but with their attempts' own keys.
    file.gateway.key = fresh_key();
    note(format!("agl quickstart: a calculator agent learns in {}", out.display()));
    let again = format!("agl quickstart --resume --out {}", out.display());
    let summary = run_here(&file, args.resume, &again).await?;
    line("");
    print_summary(&summary, &file);
    let recipe = out.join("recipe");
    line(format!(
        "\nwhat next?\n  \
         fresh questions   python3 {recipe}/make_data.py --split fresh --seed 7 --n 500 > fresh.jsonl\n  \
                           agl eval {checkpoint} --data fresh.jsonl\n  \
         look at rollouts  agl serve --store sqlite:{out}/gateway.db   and then   agl rollouts list\n  \
         your own agent    copy {recipe}/run.toml, change rollout.process.argv and rollout.evaluator.argv, and run   agl up run.toml",
        recipe = recipe.display(),
        checkpoint = summary.checkpoint.display(),
        out = out.display(),
    ));
    Ok(())
}

/// A server key that lasts as long as this process.
pub fn fresh_key() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// Writes the recipe into the folder of the run and makes its questions.
async fn unpack(out: &Path, args: &QuickstartArgs) -> anyhow::Result<RunFile> {
    if out.join("run.json").exists() {
        return Err(usage(format!(
            "{} holds a run already; continue it with --resume, or choose another folder with --out",
            out.display()
        )));
    }
    let python = interpreter().await?;
    let recipe = out.join("recipe");
    for (name, bytes) in RECIPE {
        let path = recipe.join(name);
        let folder = path.parent().unwrap_or(&recipe);
        std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::write(&path, bytes))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let seed = args.seed.unwrap_or(1);
    std::fs::create_dir_all(recipe.join("data"))?;
    make_questions(&python, &recipe, "train", seed, TRAINING_QUESTIONS).await?;
    make_questions(&python, &recipe, "val", VALIDATION_SEED, VALIDATION_QUESTIONS).await?;
    let mut overrides = vec![
        format!("trainer.default_local_dir={}", toml::Value::from(std::path::absolute(out)?.display().to_string())),
        format!("trainer.seed={seed}"),
        "gateway.listen=\"127.0.0.1:0\"".to_owned(),
    ];
    overrides.extend(args.steps.map(|steps| format!("trainer.total_training_steps={steps}")));
    overrides.extend(args.set.iter().cloned());
    let mut file = RunFile::read(Some(&recipe.join("run.toml")), &overrides)?;
    let agent = file.rollout.process.as_mut().map(|process| &mut process.argv);
    let evaluator = file.rollout.evaluator.as_mut().map(|evaluator| &mut evaluator.argv);
    for program in
        agent.into_iter().chain(evaluator).filter_map(|argv| argv.first_mut()).filter(|program| *program == "python3")
    {
        program.clone_from(&python);
    }
    Ok(file)
}

/// The settings that a run was started with.
fn settings_of(out: &Path, args: &QuickstartArgs) -> anyhow::Result<RunFile> {
    if args.seed.is_some() {
        return Err(usage("--seed cannot change in the middle of a run; leave it out with --resume"));
    }
    let path = out.join(SETTINGS);
    if !path.is_file() || !out.join("run.json").is_file() {
        return Err(usage(format!("{} holds no run to resume; start one without --resume", out.display())));
    }
    let mut overrides: Vec<String> = Vec::new();
    overrides.extend(args.steps.map(|steps| format!("trainer.total_training_steps={steps}")));
    overrides.extend(args.set.iter().cloned());
    RunFile::read(Some(&path), &overrides)
}

/// The Python interpreter itself: a version manager's shim would cost a tenth of a second at each of thousands of starts.
async fn interpreter() -> anyhow::Result<String> {
    let asked =
        Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).stdin(Stdio::null()).output().await;
    let asked = asked.map_err(|error| {
        usage(format!(
            "python3 cannot be started ({error}); the calculator agent is a Python program: install Python 3"
        ))
    })?;
    let path = String::from_utf8_lossy(&asked.stdout).trim().to_owned();
    if path.is_empty() {
        return Err(usage(format!("python3 does not work: {}", String::from_utf8_lossy(&asked.stderr).trim_end())));
    }
    Ok(path)
}

async fn make_questions(python: &str, recipe: &Path, split: &str, seed: u64, count: u64) -> anyhow::Result<()> {
    let path = recipe.join("data").join(format!("{split}.jsonl"));
    let made = Command::new(python)
        .arg(recipe.join("make_data.py"))
        .args(["--split", split, "--seed", &seed.to_string(), "--n", &count.to_string()])
        .stdin(Stdio::null())
        .output()
        .await
        .with_context(|| format!("cannot start {python}"))?;
    if !made.status.success() {
        anyhow::bail!("make_data.py failed: {}", String::from_utf8_lossy(&made.stderr).trim_end());
    }
    std::fs::write(&path, made.stdout).with_context(|| format!("cannot write {}", path.display()))
}

/// The first free folder for a new run, the newest used one for a resumed one.
fn default_folder(resume: bool) -> anyhow::Result<PathBuf> {
    let folder = |number: u32| match number {
        1 => PathBuf::from(DEFAULT_OUT),
        _ => PathBuf::from(format!("{DEFAULT_OUT}-{number}")),
    };
    let free = (1..).find(|&number| !folder(number).exists()).unwrap_or(1);
    match (resume, free) {
        (false, _) => Ok(folder(free)),
        (true, 1) => Err(usage(format!("{DEFAULT_OUT} holds no run to resume; start one without --resume"))),
        (true, _) => Ok(folder(free - 1)),
    }
}
