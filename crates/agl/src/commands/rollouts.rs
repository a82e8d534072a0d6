//! `agl rollouts`: look at rollouts, repeat or cancel them.

mod export;
mod tail;
mod transcript;

use agl_client::{AttemptDetail, GatewayClient, rollouts::EventFormat};
use agl_core::event::{MODEL_REQUEST, outcome};
use agl_core::rollout::{Rollout, RolloutState};
use agl_core::trajectory::Level;
use clap::{Subcommand, ValueEnum};
use serde_json::json as object;

use crate::GatewayArgs;
use crate::failure::usage;
use crate::output::{clipped, json, line, table};

/// See `agl rollouts --help`.
#[derive(Subcommand)]
pub enum RolloutsCommand {
    /// Rollouts, oldest first.
    List {
        #[command(flatten)]
        gateway: GatewayArgs,
        /// Only those in this state; may be repeated.
        #[arg(long = "state", value_parser = state)]
        states: Vec<RolloutState>,
        /// Only those of this run.
        #[arg(long)]
        run: Option<String>,
        /// At most so many.
        #[arg(long, default_value_t = 50)]
        limit: usize,
        /// Only those after this rollout: the next page.
        #[arg(long, value_name = "ID")]
        after: Option<String>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// One rollout: its state, its attempts, and what was said.
    Show {
        #[command(flatten)]
        gateway: GatewayArgs,
        /// Which.
        id: String,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// The events of a rollout, as JSON.
    Events {
        #[command(flatten)]
        gateway: GatewayArgs,
        /// Which rollout's.
        id: String,
        /// Only of this type, such as `reward`.
        #[arg(long = "type")]
        event_type: Option<String>,
        /// Token ids and log-probs only, one request per prompt.
        #[arg(long)]
        triplet: bool,
    },
    /// The training sequences of a rollout.
    Sequences {
        #[command(flatten)]
        gateway: GatewayArgs,
        /// Which rollout's.
        id: String,
        /// How calls become rows.
        #[arg(long, value_enum, default_value = "trajectory")]
        level: LevelArg,
        /// Token ids, masks and log-probs as JSON.
        #[arg(long)]
        json: bool,
    },
    /// What the agent wrote. On the machine that the controller runs on.
    Logs {
        #[command(flatten)]
        gateway: GatewayArgs,
        /// Which rollout's.
        id: String,
        /// Which attempt's; the last if absent.
        #[arg(long)]
        attempt: Option<String>,
        /// The evaluator's instead of the agent's.
        #[arg(long)]
        evaluator: bool,
    },
    /// Follow what happens to rollouts, as it happens. With ids, until they have all ended.
    Tail(tail::TailArgs),
    /// Write rollouts to a file of rows: training sequences, rollouts or model calls, as jsonl or parquet.
    Export(export::ExportArgs),
    /// Stop a rollout; it ends as failed.
    Cancel {
        #[command(flatten)]
        gateway: GatewayArgs,
        /// Which.
        id: String,
    },
    /// Make another attempt of a rollout that runs, or repeat one that has ended as a new one; prints its id.
    Retry {
        #[command(flatten)]
        gateway: GatewayArgs,
        /// Which.
        id: String,
    },
}

/// See [`Level`].
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum LevelArg {
    /// One row per chain of calls.
    Trajectory,
    /// One row per call.
    Transition,
}

impl From<LevelArg> for Level {
    fn from(level: LevelArg) -> Self {
        match level {
            LevelArg::Trajectory => Self::Trajectory,
            LevelArg::Transition => Self::Transition,
        }
    }
}

fn state(name: &str) -> Result<RolloutState, String> {
    RolloutState::from_name(name).ok_or_else(|| "one of queuing, running, succeeded, failed".into())
}

/// Runs one of them.
pub async fn rollouts(command: RolloutsCommand) -> anyhow::Result<()> {
    match command {
        RolloutsCommand::List { gateway, states, run, limit, after, json: as_json } => {
            let states = if states.is_empty() { RolloutState::ALL.to_vec() } else { states };
            let client = gateway.client()?;
            let found = client.list_rollouts(&states, limit, after.as_deref(), run.as_deref()).await?;
            if as_json {
                json(&found)
            } else {
                list(&found, limit);
                Ok(())
            }
        }
        RolloutsCommand::Show { gateway, id, json: as_json } => show(&gateway.client()?, &id, as_json).await,
        RolloutsCommand::Events { gateway, id, event_type, triplet } => {
            let format = if triplet { EventFormat::Triplet } else { EventFormat::Raw };
            json(&gateway.client()?.events(&id, event_type.as_deref(), format).await?)
        }
        RolloutsCommand::Sequences { gateway, id, level, json: as_json } => {
            let found = gateway.client()?.sequences(&id, level.into(), None).await?;
            if as_json {
                return json(&object!({"reward": found.reward, "assembly": found.assembly}));
            }
            let rows: Vec<Vec<String>> = found
                .assembly
                .sequences
                .iter()
                .map(|row| {
                    let calls: Vec<String> = row.calls.iter().map(|span| span.seq.to_string()).collect();
                    vec![
                        calls.join(","),
                        row.prompt_length.to_string(),
                        row.token_ids.len().to_string(),
                        row.trained_tokens().to_string(),
                        if row.log_probs.is_some() { "yes" } else { "no" }.into(),
                    ]
                })
                .collect();
            table(&["calls", "prompt", "tokens", "trained", "log-probs"], &rows);
            line(format!("\n{}", serde_json::to_string(&found.assembly.counts)?));
            Ok(())
        }
        RolloutsCommand::Logs { gateway, id, attempt, evaluator } => {
            logs(&gateway.client()?, &id, attempt.as_deref(), evaluator).await
        }
        RolloutsCommand::Tail(args) => tail::tail(args).await,
        RolloutsCommand::Export(args) => export::export(args).await,
        RolloutsCommand::Cancel { gateway, id } => {
            let rollout = gateway.client()?.cancel(&id).await?;
            line(format!("{id} is {}", rollout.status.state));
            Ok(())
        }
        RolloutsCommand::Retry { gateway, id } => {
            let rollout = gateway.client()?.retry(&id).await?;
            line(rollout.rollout_id);
            Ok(())
        }
    }
}

fn list(found: &[Rollout], limit: usize) {
    let rows: Vec<Vec<String>> = found
        .iter()
        .map(|rollout| {
            let status = &rollout.status;
            vec![
                rollout.rollout_id.clone(),
                status.state.to_string(),
                rollout.mode().to_owned(),
                status.last_attempt_id.clone().unwrap_or_else(|| "–".into()),
                format!("{:.1}", status.updated_at - status.created_at),
                clipped(status.error_message.as_deref().unwrap_or(""), 60),
            ]
        })
        .collect();
    table(&["rollout", "state", "mode", "attempt", "seconds", "error"], &rows);
    if let Some(last) = found.last().filter(|_| found.len() == limit) {
        line(format!("… more with --after {}", last.rollout_id));
    }
}

async fn show(client: &GatewayClient, id: &str, as_json: bool) -> anyhow::Result<()> {
    let rollout = client.get_rollout(id).await?.rollout;
    let attempts = client.list_attempts(id).await?;
    let events = client.events(id, None, EventFormat::Raw).await?;
    if as_json {
        let attempts: Vec<_> =
            attempts.iter().map(|detail| object!({"attempt": detail.attempt, "calls": detail.calls})).collect();
        return json(&object!({"rollout": rollout, "attempts": attempts, "events": events}));
    }
    let status = &rollout.status;
    line(format!("rollout   {}", rollout.rollout_id));
    line(format!(
        "state     {}{}",
        status.state,
        status.error_message.as_ref().map_or(String::new(), |why| format!(": {why}"))
    ));
    line(format!("mode      {}", rollout.mode()));
    line(format!("reward    {}", outcome(&events).map_or_else(|| "none".to_owned(), |reward| reward.to_string())));
    if let Some(consumed) = &rollout.consumed {
        line(format!("trained   in {} up to step {}", consumed.run_id, consumed.step));
    }
    line(format!("input     {}", clipped(&rollout.input.to_string(), 200)));
    for AttemptDetail { attempt, calls, .. } in &attempts {
        line(format!(
            "attempt   {}: {}, {calls} calls, {:.1} s{}{}",
            attempt.attempt_id,
            attempt.state.as_str(),
            attempt.updated_at - attempt.created_at,
            attempt.exit_code.map_or(String::new(), |code| format!(", exit code {code}")),
            attempt.error_message.as_ref().map_or(String::new(), |why| format!(", {why}")),
        ));
    }
    let requests = events.iter().filter(|event| event.event_type == MODEL_REQUEST);
    transcript::print(requests);
    Ok(())
}

async fn logs(client: &GatewayClient, id: &str, attempt: Option<&str>, evaluator: bool) -> anyhow::Result<()> {
    let attempts = client.list_attempts(id).await?;
    let found = match attempt {
        Some(attempt) => attempts.iter().find(|detail| detail.attempt.attempt_id == attempt),
        None => attempts.last(),
    };
    let Some(detail) = found else {
        return Err(usage(match attempt {
            Some(attempt) => format!("rollout {id} has no attempt {attempt}"),
            None => format!("rollout {id} has no attempt yet"),
        }));
    };
    let Some(folder) = detail.attempt.runner.get("dir").and_then(|folder| folder.as_str()) else {
        anyhow::bail!(
            "attempt {} of {id} was not run by an agl controller: its logs are not known here",
            detail.attempt.attempt_id
        );
    };
    let folder = std::path::Path::new(folder);
    // Where the agent ran in a cluster or a container, its evaluator has a folder of its own.
    let alone = folder.join("evaluation");
    let (folder, names) = match evaluator {
        true if alone.exists() => (alone.as_path(), ["stdout.log", "stderr.log"]),
        true => (folder, ["evaluator.stdout.log", "evaluator.stderr.log"]),
        false => (folder, ["stdout.log", "stderr.log"]),
    };
    for name in names {
        let path = folder.join(name);
        match std::fs::read(&path) {
            Ok(bytes) if bytes.is_empty() => {}
            Ok(bytes) => {
                line(format!("== {}", path.display()));
                line(String::from_utf8_lossy(&bytes).trim_end());
            }
            Err(error) => line(format!("== {}: {error}", path.display())),
        }
    }
    Ok(())
}
