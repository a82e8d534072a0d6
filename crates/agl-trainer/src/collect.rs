//! Rollouts from their creation to their training sequences: what the trainer asks of the gateway in a step.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use agl_client::{AttemptDetail, Change, ChangeKind, ClientError, GatewayClient};
use agl_core::attempt::FailureClass;
use agl_core::rollout::{Rollout, RolloutConfig, RolloutCreate, RolloutState};
use agl_core::trajectory::{Level, PathBreak, Sequence, TreeCounts};
use futures_util::StreamExt;
use futures_util::stream::{BoxStream, FuturesUnordered};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use crate::TrainerError;
use crate::config::{MissingReward, OnMissingReward};
use crate::data::Task;

/// How often rollouts are asked for by name in case the watch has missed something, and a long wait is logged.
const RECHECK: Duration = Duration::from_secs(20);
/// The first time: a rollout may have ended before the very first watch was open.
const FIRST_RECHECK: Duration = Duration::from_millis(500);
/// Sequences fetched at once.
const FETCHES: usize = 8;

/// Which rollouts are created: `n` for each task.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    /// The run they belong to.
    pub run_id: &'a str,
    /// Begins each id; unique in the run, so that no id is ever used twice.
    pub prefix: String,
    /// The step they are created for.
    pub step: u64,
    /// Train or validation.
    pub is_train: bool,
    /// Rollouts per task.
    pub n: usize,
    /// Of the run; with a task's id and the sample index it seeds every model call.
    pub seed: u64,
    /// What the controller runs.
    pub config: &'a RolloutConfig,
}

impl Launch<'_> {
    /// The rollouts of `tasks`; siblings share `metadata.group`.
    #[must_use]
    pub fn rollouts(&self, tasks: &[Task]) -> Vec<RolloutCreate> {
        let mut creates = Vec::with_capacity(tasks.len() * self.n);
        for (position, task) in tasks.iter().enumerate() {
            let group = format!("{}-{position:03}", self.prefix);
            for sample in 0..self.n {
                let metadata: Map<String, Value> = [
                    ("run_id", json!(self.run_id)),
                    ("step", json!(self.step)),
                    ("group", json!(group)),
                    ("group_idx", json!(position)),
                    ("data_id", json!(task.data_id)),
                    ("sample_idx", json!(sample)),
                    ("seed", json!(self.seed)),
                ]
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect();
                creates.push(RolloutCreate {
                    input: task.input.clone(),
                    is_train: self.is_train,
                    config: Some(self.config.clone()),
                    metadata: Some(metadata),
                    rollout_id: Some(format!("{group}-{sample:02}")),
                    retry_of: None,
                });
            }
        }
        creates
    }
}

/// A rollout that has ended, with what it yields.
#[derive(Clone, Debug)]
pub struct Collected {
    /// The rollout.
    pub rollout: Rollout,
    /// Its training sequences.
    pub sequences: Vec<Sequence>,
    /// Why calls opened new paths.
    pub breaks: Vec<PathBreak>,
    /// What became of its calls.
    pub counts: TreeCounts,
    /// What it counts.
    pub verdict: Verdict,
}

/// What a rollout counts in its group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// This much.
    Reward(f64),
    /// Nothing.
    Excluded(Exclusion),
}

impl Verdict {
    /// The reward, where there is one.
    #[must_use]
    pub fn reward(self) -> Option<f64> {
        match self {
            Self::Reward(reward) => Some(reward),
            Self::Excluded(_) => None,
        }
    }
}

/// Why a rollout is left out of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Exclusion {
    /// Its infrastructure stayed dead.
    Infrastructure,
    /// The gateway saw no answered model call of it: its harness bypasses the gateway, or never got that far.
    NoCalls,
    /// Its server sent no token ids.
    NoTokenIds,
    /// Its server sent no log-probs.
    NoLogProbs,
    /// Somebody cancelled or deleted it.
    Cancelled,
    /// It has no reward, and the configuration leaves such rollouts out.
    NoReward,
}

impl Exclusion {
    /// The name in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Infrastructure => "infrastructure",
            Self::NoCalls => "no_calls",
            Self::NoTokenIds => "no_token_ids",
            Self::NoLogProbs => "no_log_probs",
            Self::Cancelled => "cancelled",
            Self::NoReward => "no_reward",
        }
    }

    /// What a person should look at.
    #[must_use]
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Infrastructure => {
                "their infrastructure failed in every attempt; see `agl rollouts show ID` and `agl rollouts logs ID`"
            }
            Self::NoCalls => {
                "the gateway saw no model call of them: does the harness use OPENAI_BASE_URL or AGL_OPENAI_BASE_URL? See `agl rollouts logs ID`"
            }
            Self::NoTokenIds => {
                "the model server returned no token ids: serve the policy with vLLM's return_token_ids or with `agl models serve`"
            }
            Self::NoLogProbs => {
                "the model server returned no log-probs: set gateway.default_proxy.include_log_probs = true"
            }
            Self::Cancelled => "they were cancelled",
            Self::NoReward => "no reward was posted: does the evaluator, or the agent, post to AGL_EVENT_URL?",
        }
    }
}

/// How many rollouts were left out, by reason.
#[must_use]
pub fn exclusions(collected: &[Collected]) -> BTreeMap<Exclusion, usize> {
    count(collected.iter().map(|rollout| rollout.verdict))
}

/// The same of verdicts alone.
pub(crate) fn count(verdicts: impl Iterator<Item = Verdict>) -> BTreeMap<Exclusion, usize> {
    let mut counts = BTreeMap::new();
    for verdict in verdicts {
        if let Verdict::Excluded(why) = verdict {
            *counts.entry(why).or_default() += 1;
        }
    }
    counts
}

/// Why rollouts were left out, and what to do about it, in one line.
#[must_use]
pub fn reasons(exclusions: &BTreeMap<Exclusion, usize>) -> String {
    let parts: Vec<String> = exclusions.iter().map(|(why, count)| format!("{count}: {}", why.remedy())).collect();
    parts.join("; ")
}

/// Waits for rollouts to end, by the gateway's watch. One stream serves the whole run.
pub struct Collector {
    client: GatewayClient,
    changes: BoxStream<'static, Result<Change, ClientError>>,
    level: Level,
    fill: f64,
    on_missing: OnMissingReward,
    wait_limit: Duration,
}

impl Collector {
    /// Opens the watch.
    #[must_use]
    pub fn new(
        client: GatewayClient,
        level: Level,
        fill: f64,
        on_missing: OnMissingReward,
        wait_limit: Duration,
    ) -> Self {
        let changes = client.watch(None);
        Self { client, changes, level, fill, on_missing, wait_limit }
    }

    /// Creates rollouts and gives them back when all have ended, in the order of `creates`.
    ///
    /// `progress` hears of every one that has ended.
    ///
    /// # Errors
    /// Where the gateway stays away, or rollouts do not end within their own limits plus the configured wait.
    pub async fn run(
        &mut self,
        creates: &[RolloutCreate],
        mut progress: impl FnMut(&Collected),
    ) -> Result<Vec<Collected>, TrainerError> {
        for chunk in creates.chunks(256) {
            self.client.create_rollouts(chunk).await?;
        }
        let ids: Vec<String> = creates.iter().filter_map(|create| create.rollout_id.clone()).collect();
        let mut open: HashSet<String> = ids.iter().cloned().collect();
        let mut ended: Vec<Rollout> = Vec::new();
        let mut fetching = FuturesUnordered::new();
        let mut collected: HashMap<String, Collected> = HashMap::new();
        let mut last_end = Instant::now();
        let mut recheck = Instant::now() + FIRST_RECHECK;
        while collected.len() < ids.len() {
            while fetching.len() < FETCHES
                && let Some(rollout) = ended.pop()
            {
                fetching.push(fetch(self.client.clone(), rollout, self.level, self.fill, self.on_missing));
            }
            tokio::select! {
                change = self.changes.next(), if !open.is_empty() => {
                    match change {
                        Some(Ok(change)) => {
                            if let Some(rollout) = ended_by(change).filter(|rollout| open.remove(&rollout.rollout_id)) {
                                last_end = Instant::now();
                                ended.push(rollout);
                            }
                        }
                        Some(Err(error)) => return Err(error.into()),
                        None => self.changes = self.client.watch(None),
                    }
                }
                Some(result) = fetching.next() => {
                    let result: Collected = result?;
                    progress(&result);
                    collected.insert(result.rollout.rollout_id.clone(), result);
                }
                () = tokio::time::sleep_until(recheck), if !open.is_empty() => {
                    recheck = Instant::now() + RECHECK;
                    let found = self.recheck(&open).await?;
                    for rollout in found {
                        open.remove(&rollout.rollout_id);
                        last_end = Instant::now();
                        ended.push(rollout);
                    }
                    self.complain(creates, &open, last_end.elapsed())?;
                }
            }
        }
        Ok(ids.iter().filter_map(|id| collected.remove(id)).collect())
    }

    /// Asks for the open rollouts by name. A deleted one counts as cancelled.
    async fn recheck(&self, open: &HashSet<String>) -> Result<Vec<Rollout>, TrainerError> {
        let mut ended = Vec::new();
        for id in open {
            match self.client.get_rollout(id).await {
                Ok(detail) if detail.rollout.status.state.is_terminal() => ended.push(detail.rollout),
                Ok(_) => {}
                Err(error) if error.is_not_found() => ended.push(deleted(id)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(ended)
    }

    /// A wait says what it waits for, and has an end.
    fn complain(&self, creates: &[RolloutCreate], open: &HashSet<String>, idle: Duration) -> Result<(), TrainerError> {
        let Some(example) = open.iter().min() else { return Ok(()) };
        if idle < RECHECK {
            return Ok(());
        }
        tracing::warn!(
            open = open.len(),
            of = creates.len(),
            idle_seconds = idle.as_secs(),
            example,
            "no rollout has ended for a while; is a controller running, and does it reach the gateway? See `agl rollouts list`"
        );
        let own_limit = creates
            .iter()
            .filter_map(|create| create.config.as_ref())
            .map(|config| {
                let evaluator = config.evaluator.as_ref().map_or(0, |evaluator| evaluator.timeout_seconds);
                (config.timeout_seconds + evaluator) * u64::from(config.max_attempts.unwrap_or(3))
            })
            .max()
            .unwrap_or(0);
        let limit = self.wait_limit + Duration::from_secs(own_limit);
        if idle > limit {
            return Err(TrainerError::Waited {
                open: open.len(),
                all: creates.len(),
                waited: idle.as_secs(),
                example: example.clone(),
            });
        }
        Ok(())
    }
}

fn ended_by(change: Change) -> Option<Rollout> {
    match (change.kind, change.rollout) {
        (ChangeKind::Deleted, _) => Some(deleted(&change.rollout_id)),
        (_, Some(rollout)) if rollout.status.state.is_terminal() => Some(rollout),
        _ => None,
    }
}

/// A stand-in for a rollout that somebody deleted while it was waited for.
fn deleted(rollout_id: &str) -> Rollout {
    let create = RolloutCreate {
        input: Value::Null,
        is_train: true,
        config: None,
        metadata: None,
        rollout_id: None,
        retry_of: None,
    };
    let mut rollout = Rollout::new(create, rollout_id.to_owned(), 0.0);
    rollout.status.state = RolloutState::Failed;
    rollout.status.error_message = Some("deleted".into());
    rollout
}

async fn fetch(
    client: GatewayClient,
    rollout: Rollout,
    level: Level,
    fill: f64,
    on_missing: OnMissingReward,
) -> Result<Collected, TrainerError> {
    let nothing = |rollout, exclusion| Collected {
        rollout,
        sequences: Vec::new(),
        breaks: Vec::new(),
        counts: TreeCounts::default(),
        verdict: Verdict::Excluded(exclusion),
    };
    let answer = match client.sequences(&rollout.rollout_id, level, None).await {
        Ok(answer) => answer,
        Err(error) if error.is_not_found() => return Ok(nothing(rollout, Exclusion::Cancelled)),
        Err(error) => return Err(error.into()),
    };
    let failure = match rollout.status.state {
        RolloutState::Failed => last_failure(&client, &rollout).await?,
        _ => None,
    };
    let verdict = judge(&answer.assembly.counts, answer.reward, failure, fill, on_missing);
    Ok(Collected {
        rollout,
        sequences: answer.assembly.sequences,
        breaks: answer.assembly.breaks,
        counts: answer.assembly.counts,
        verdict,
    })
}

/// Whose failure ended a rollout: that of the attempt that counts. One whose attempt had not ended was cancelled from outside.
async fn last_failure(client: &GatewayClient, rollout: &Rollout) -> Result<Option<FailureClass>, TrainerError> {
    let attempts: Vec<AttemptDetail> = match client.list_attempts(&rollout.rollout_id).await {
        Ok(attempts) => attempts,
        Err(error) if error.is_not_found() => return Ok(Some(FailureClass::Cancelled)),
        Err(error) => return Err(error.into()),
    };
    let counts = attempts.iter().find(|detail| detail.attempt.attempt_id == rollout.current_attempt());
    Ok(match counts {
        Some(detail) if !detail.attempt.state.is_terminal() => Some(FailureClass::Cancelled),
        Some(detail) => detail.attempt.failure,
        // Never begun; or a controller that keeps no attempts, as the original's, and reports failures of the agent.
        None if rollout.status.last_attempt_id.is_none() => Some(FailureClass::Cancelled),
        None => Some(FailureClass::Agent),
    })
}

/// A rollout that died of infrastructure is no failure of the policy.
fn judge(
    counts: &TreeCounts,
    reward: Option<f64>,
    failure: Option<FailureClass>,
    fill: f64,
    on_missing: OnMissingReward,
) -> Verdict {
    let missing = |rule: MissingReward, otherwise: Exclusion| match (reward, rule) {
        (Some(reward), _) => Verdict::Reward(reward),
        (None, MissingReward::Fill) => Verdict::Reward(fill),
        (None, MissingReward::Exclude) => Verdict::Excluded(otherwise),
    };
    match failure {
        Some(FailureClass::Cancelled) => Verdict::Excluded(Exclusion::Cancelled),
        Some(FailureClass::Infrastructure) if on_missing.infrastructure == MissingReward::Exclude => {
            Verdict::Excluded(Exclusion::Infrastructure)
        }
        _ if counts.live == 0 && counts.without_token_ids > 0 => Verdict::Excluded(Exclusion::NoTokenIds),
        _ if counts.live == 0 => Verdict::Excluded(Exclusion::NoCalls),
        Some(FailureClass::Infrastructure) => missing(on_missing.infrastructure, Exclusion::Infrastructure),
        _ => missing(on_missing.agent, Exclusion::NoReward),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(live: usize, reward: Option<f64>, failure: Option<FailureClass>) -> Verdict {
        let counts = TreeCounts { calls: live, live, ..TreeCounts::default() };
        judge(&counts, reward, failure, 0.0, OnMissingReward::default())
    }

    #[test]
    fn dead_infrastructure_is_left_out_even_where_a_reward_was_posted() {
        assert_eq!(
            judged(2, Some(0.0), Some(FailureClass::Infrastructure)),
            Verdict::Excluded(Exclusion::Infrastructure)
        );
    }

    #[test]
    fn an_agent_s_failure_and_a_timeout_count_the_fill_value() {
        assert_eq!(judged(2, None, Some(FailureClass::Agent)), Verdict::Reward(0.0));
        assert_eq!(judged(2, None, Some(FailureClass::Timeout)), Verdict::Reward(0.0));
        assert_eq!(judged(2, Some(0.5), Some(FailureClass::Agent)), Verdict::Reward(0.5));
    }

    #[test]
    fn a_rollout_without_a_captured_call_is_left_out_whatever_its_reward() {
        assert_eq!(judged(0, Some(1.0), None), Verdict::Excluded(Exclusion::NoCalls));
    }

    #[test]
    fn siblings_share_a_group_and_every_id_is_its_own() {
        let launch = Launch {
            run_id: "r",
            prefix: "r-g0-t0001".into(),
            step: 1,
            is_train: true,
            n: 3,
            seed: 1,
            config: &RolloutConfig::default(),
        };
        let task = |id: &str| Task { data_id: id.into(), input: json!({}) };
        let creates = launch.rollouts(&[task("a"), task("b"), task("a")]);
        let ids: HashSet<_> = creates.iter().map(|create| create.rollout_id.clone()).collect();
        assert_eq!(ids.len(), 9);
        let groups: HashSet<_> =
            creates.iter().map(|create| create.metadata.as_ref().unwrap()["group"].clone()).collect();
        assert_eq!(groups.len(), 3, "the same task twice in a batch makes two groups");
    }
}
