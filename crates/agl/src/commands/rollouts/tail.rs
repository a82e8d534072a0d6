//! `agl rollouts tail`: what happens to rollouts, as it happens.

use std::collections::HashSet;
use std::time::Duration;

use agl_client::{Change, ChangeKind, ClientError};
use clap::Args;
use futures_util::StreamExt;

use crate::GatewayArgs;
use crate::output::{clipped, line, note};
use crate::stack::interrupt;

/// What has ended before the stream began is in none of its changes: rollouts that are waited for are also looked at.
const LOOK: Duration = Duration::from_secs(5);

/// See `agl rollouts tail --help`.
#[derive(Args)]
pub struct TailArgs {
    #[command(flatten)]
    gateway: GatewayArgs,
    /// Only these rollouts, until all of them have ended.
    ids: Vec<String>,
    /// Only those of this run.
    #[arg(long)]
    run: Option<String>,
    /// Changes as JSON, one a line.
    #[arg(long)]
    json: bool,
}

/// Prints changes until Ctrl-C, or until all rollouts named have ended.
pub async fn tail(args: TailArgs) -> anyhow::Result<()> {
    let client = args.gateway.client()?;
    let mut waited_for: HashSet<String> = args.ids.iter().cloned().collect();
    let only = waited_for.clone();
    let mut changes = client.watch(None);
    let mut interrupted = std::pin::pin!(interrupt());
    let mut look = tokio::time::interval(LOOK);
    let mut seen: HashSet<String> = HashSet::new();
    loop {
        let change = tokio::select! {
            change = changes.next() => change,
            _ = look.tick(), if !waited_for.is_empty() => {
                for id in waited_for.clone() {
                    let asked = tokio::select! {
                        asked = client.get_rollout(&id) => asked,
                        () = &mut interrupted => return Ok(()),
                    };
                    let rollout = match asked {
                        Ok(detail) => detail.rollout,
                        // Deleted: the stream says so, if it was there when that began.
                        Err(error) if error.is_not_found() && seen.contains(&id) => continue,
                        Err(error) => return Err(error.into()),
                    };
                    if rollout.status.state.is_terminal() {
                        let change = Change { cursor: 0, kind: ChangeKind::Snapshot, rollout_id: id.clone(), rollout: Some(rollout) };
                        show(&change, args.json)?;
                        waited_for.remove(&id);
                    }
                }
                if waited_for.is_empty() {
                    return Ok(());
                }
                continue;
            }
            () = &mut interrupted => return Ok(()),
        };
        let change = match change {
            Some(Ok(change)) => change,
            Some(Err(error @ ClientError::Unreachable { .. })) => {
                note(format!("{error}"));
                continue;
            }
            Some(Err(error)) => return Err(error.into()),
            None => anyhow::bail!("the gateway ended the stream of changes"),
        };
        let run = change.rollout.as_ref().and_then(|rollout| rollout.metadata.get("run_id")).and_then(|id| id.as_str());
        // What was deleted tells no run any more.
        if args.run.is_some() && args.run.as_deref() != run && !seen.contains(&change.rollout_id) {
            continue;
        }
        if !only.is_empty() && !only.contains(&change.rollout_id) {
            continue;
        }
        seen.insert(change.rollout_id.clone());
        show(&change, args.json)?;
        let over = change.rollout.as_ref().is_none_or(|rollout| rollout.status.state.is_terminal());
        if over && waited_for.remove(&change.rollout_id) && waited_for.is_empty() {
            return Ok(());
        }
    }
}

fn show(change: &Change, as_json: bool) -> anyhow::Result<()> {
    if as_json {
        line(serde_json::to_string(change)?);
        return Ok(());
    }
    let Some(rollout) = &change.rollout else {
        line(format!("{}  deleted", change.rollout_id));
        return Ok(());
    };
    let status = &rollout.status;
    let attempt = status.last_attempt_id.as_ref().map_or(String::new(), |attempt| format!("  attempt {attempt}"));
    let seconds = status.updated_at - status.created_at;
    let error = status.error_message.as_ref().map_or(String::new(), |why| format!("  {}", clipped(why, 120)));
    line(format!("{}  {}{attempt}  {seconds:.1} s{error}", change.rollout_id, status.state));
    Ok(())
}
