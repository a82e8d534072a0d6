//! What a controller would do if it were started now: it looks, and touches nothing.

use agl_client::{ClientError, GatewayClient};
use agl_core::attempt::FIRST_ATTEMPT_ID;
use agl_core::rollout::{Rollout, RolloutState};
use serde::Serialize;
use serde_json::Value;

use crate::config::ControllerConfig;
use crate::runner::{Order, Runner};

/// How many rollouts are asked for at once.
const PAGE: usize = 500;
/// What stands in place of keys, which are made only with the attempt.
const NO_KEY: &str = "<key>";

/// One thing that a controller would do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Planned {
    /// With which rollout.
    pub rollout_id: String,
    /// With which attempt of it.
    pub attempt_id: String,
    /// What.
    #[serde(flatten)]
    pub action: Action,
}

/// What a controller would do.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Action {
    /// Start it.
    Start {
        /// The command or the manifest.
        what: Value,
    },
    /// Fail it: it cannot be run as it is configured.
    Fail {
        /// Why.
        why: String,
    },
    /// Go on with what an earlier controller started, or find out what became of it.
    TakeUp,
    /// Nothing: it is for another runner.
    Leave,
    /// End what is left of it: its rollout has ended, is gone, or has another attempt.
    End,
}

/// Everything that a controller with this configuration and runner would do, oldest rollout first.
///
/// # Errors
/// [`ClientError`].
pub async fn plan(
    config: &ControllerConfig,
    client: &GatewayClient,
    runner: &dyn Runner,
) -> Result<Vec<Planned>, ClientError> {
    let mut planned = Vec::new();
    let mut after: Option<String> = None;
    loop {
        let states = [RolloutState::Queuing, RolloutState::Running];
        let page = client.list_rollouts(&states, PAGE, after.as_deref(), None).await?;
        after = page.last().filter(|_| page.len() == PAGE).map(|rollout| rollout.rollout_id.clone());
        planned.extend(page.into_iter().map(|rollout| for_rollout(config, client, runner, rollout)));
        if after.is_none() {
            break;
        }
    }
    for (rollout_id, attempt_id) in runner.held() {
        let wanted = planned.iter().any(|planned| planned.rollout_id == rollout_id && planned.attempt_id == attempt_id);
        if !wanted {
            planned.push(Planned { rollout_id, attempt_id, action: Action::End });
        }
    }
    Ok(planned)
}

fn for_rollout(config: &ControllerConfig, client: &GatewayClient, runner: &dyn Runner, rollout: Rollout) -> Planned {
    let rollout_id = rollout.rollout_id.clone();
    if rollout.status.state == RolloutState::Running || !runner.takes(&rollout) {
        let action = if runner.takes(&rollout) { Action::TakeUp } else { Action::Leave };
        return Planned { attempt_id: rollout.current_attempt().to_owned(), rollout_id, action };
    }
    let order = Order {
        rollout,
        attempt_id: FIRST_ATTEMPT_ID.to_owned(),
        key: NO_KEY.to_owned(),
        reward_key: NO_KEY.to_owned(),
        agent_url: config.url_for_agents(client.base_url()).to_owned(),
    };
    let action = match runner.preview(&order) {
        Ok(what) => Action::Start { what },
        Err(error) => Action::Fail { why: error.to_string() },
    };
    Planned { rollout_id, attempt_id: order.attempt_id, action }
}
