//! `agl init`: what a run with one's own agent begins with.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;

use crate::failure::usage;
use crate::output::line;

/// See `agl init --help`.
#[derive(Args)]
pub struct InitArgs {
    /// The folder to write into; made if it is not there.
    #[arg(default_value = ".", value_name = "DIR")]
    folder: PathBuf,
    /// The command that starts your agent, as a shell takes it in this folder; `{{ input.question }}` and others are filled in for each rollout. Without
    /// it a small agent is written too.
    #[arg(long, value_name = "COMMAND")]
    command: Option<String>,
    /// Overwrite files that are there already.
    #[arg(long)]
    force: bool,
}

const RUN_FILE: &str = include_str!("init/run.toml");
/// The line of the run file that names no folder for the agent.
const NO_FOLDER: &str = "# cwd = \"/srv/agent\"                    # one folder for all, if it must be";
const AGENT: &str = include_str!("init/agent.py");
const EVALUATOR: &str = include_str!("init/evaluator.py");
const TASKS: &str = include_str!("init/tasks.jsonl");

/// Writes the files, or none where one of them is there already.
pub fn init(args: &InitArgs) -> anyhow::Result<()> {
    let argv = match &args.command {
        Some(command) => ["sh", "-c", command].map(str::to_owned).to_vec(),
        None => ["python3", "{{ config_dir }}/agent.py", "{{ input.question }}"].map(str::to_owned).to_vec(),
    };
    let run_file = RUN_FILE.replace("@ARGV@", &toml::Value::from(argv).to_string());
    let run_file = if args.command.is_some() {
        // A path in the command is one of this folder.
        let here = std::env::current_dir().context("this folder is gone")?;
        let cwd = toml::Value::from(here.display().to_string());
        run_file.replace(NO_FOLDER, &format!("cwd = {cwd} # remove this for a fresh folder for each rollout"))
    } else {
        run_file
    };
    let mut files = vec![("run.toml", run_file.as_str()), ("tasks.jsonl", TASKS), ("evaluator.py", EVALUATOR)];
    files.extend(args.command.is_none().then_some(("agent.py", AGENT)));
    let there: Vec<_> = files.iter().map(|(name, _)| *name).filter(|name| args.folder.join(name).exists()).collect();
    if !there.is_empty() && !args.force {
        return Err(usage(format!(
            "{} holds {} already; --force overwrites, or choose another folder",
            args.folder.display(),
            there.join(", ")
        )));
    }
    std::fs::create_dir_all(&args.folder).with_context(|| format!("cannot make {}", args.folder.display()))?;
    for (name, text) in &files {
        write(&args.folder.join(name), text)?;
    }
    let run_file = args.folder.join("run.toml");
    line(format!(
        "\nnext:\n  agl doctor {run}   one rollout, checked end to end; needs no model\n  \
         edit {run}: model.path, and what your tasks and your judgement are\n  agl up {run}       trains",
        run = run_file.display()
    ));
    Ok(())
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    line(format!("wrote {}", path.display()));
    Ok(())
}
