//! The life of one attempt: keys, start, watching, verdict, report. Where it runs is the runner's business.

use std::sync::Arc;
use std::time::Duration;

use agl_client::{AttemptDetail, ClientError, GatewayClient};
use agl_core::attempt::{AttemptPatch, AttemptState, FailureClass};
use agl_core::rollout::{Rollout, RolloutState, StatusPatch};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};

use crate::config::ControllerConfig;
use crate::runner::{Leave, Order, Outcome, Run, Runner, Step, fields};
use crate::supervisor::record::Answer;
use crate::verdict::{Calls, NO_CALL, Retry, Stopper, Verdict};
use crate::work_dir::WorkDir;

/// Why an attempt is to end before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The rollout was ended or deleted from outside.
    Ended,
    /// Somebody asked for another attempt in place of this one.
    Superseded,
    /// The controller ends.
    Shutdown,
}

/// Told once; only [`Stop::Ended`] comes after anything else.
pub(crate) type StopSignal = watch::Receiver<Option<Stop>>;

/// What a rollout needs next.
#[derive(Debug)]
pub(crate) enum Next {
    /// Another attempt.
    Attempt(Box<Due>),
    /// Nothing, or nothing from us.
    Nothing,
}

/// An attempt that is to be made.
pub(crate) struct Due {
    pub(crate) rollout: Rollout,
    /// Its id is this number.
    pub(crate) number: u32,
    /// How many attempts infrastructure has cost so far.
    pub(crate) spent: u32,
    /// The gateway has it as `running` already.
    pub(crate) reported: bool,
    /// How long infrastructure gets to recover before this.
    pub(crate) wait: Duration,
    /// What still belongs to it of an earlier controller.
    pub(crate) found: Option<Box<dyn Run>>,
}

impl std::fmt::Debug for Due {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "attempt {} of {}", self.number, self.rollout.rollout_id)
    }
}

/// What all attempts share.
#[derive(Debug)]
pub(crate) struct Attempts {
    pub(crate) config: ControllerConfig,
    pub(crate) client: GatewayClient,
    pub(crate) runner: Arc<dyn Runner>,
    pub(crate) work_dir: Arc<WorkDir>,
    /// Agents go on when the controller ends.
    pub(crate) leave: Leave,
    /// How many rollouts are taken up at once: after a restart there may be thousands, and file descriptors for hundreds.
    pub(crate) taking_up: Semaphore,
}

/// See [`Attempts::taking_up`].
pub(crate) const TAKING_UP: usize = 32;

impl Due {
    pub(crate) fn first(rollout: Rollout) -> Self {
        Self { rollout, number: 0, spent: 0, reported: false, wait: Duration::ZERO, found: None }
    }

    fn attempt_id(&self) -> String {
        self.number.to_string()
    }
}

impl Attempts {
    /// What a rollout needs of which we only know what the gateway and the runner tell: an earlier controller ran
    /// it, or another one does, or an error tore us away from it.
    pub(crate) async fn take_up(&self, rollout_id: &str) -> Result<Next, ClientError> {
        // Closed never.
        let _place = self.taking_up.acquire().await;
        let rollout = self.client.get_rollout(rollout_id).await?.rollout;
        match rollout.status.state {
            // It was being claimed when something went wrong.
            RolloutState::Queuing => return Ok(Next::Attempt(Box::new(Due::first(rollout)))),
            RolloutState::Running => {}
            RolloutState::Succeeded | RolloutState::Failed => return Ok(Next::Nothing),
        }
        let attempts = self.client.list_attempts(rollout_id).await?;
        let has_earlier = attempts.len() > 1;
        let spent = attempts.iter().filter(|detail| costs(detail)).count().try_into().unwrap_or(u32::MAX);
        let Some(last) = attempts.into_iter().find(|detail| detail.attempt.attempt_id == rollout.current_attempt())
        else {
            return Ok(Next::Attempt(Box::new(Due { spent, ..Due::first(rollout) })));
        };
        let number = last.attempt.attempt_id.parse().unwrap_or(0);
        // What a controller left of earlier attempts when it died must be gone before this one goes on.
        // Few rollouts have any, and to ask the runner for all that it holds is not for nothing.
        let held = if has_earlier { self.runner.held() } else { Vec::new() };
        for (_, attempt_id) in held.into_iter().filter(|(held, _)| held == rollout_id) {
            if attempt_id != last.attempt.attempt_id {
                self.runner.reclaim(rollout_id, &attempt_id).await;
            }
        }
        if last.attempt.state.is_terminal() {
            // The controller died, or ended, between the verdict on the attempt and the one on the rollout.
            let verdict = Verdict {
                failure: last.attempt.failure,
                retry: if is_free(&last) { Retry::Free } else { Retry::Costs },
                message: last.attempt.error_message,
                exit_code: last.attempt.exit_code,
            };
            let spent = if costs_class(verdict.failure, verdict.retry) { spent - 1 } else { spent };
            return self.follow(Due { number, spent, reported: true, ..Due::first(rollout) }, verdict).await;
        }
        if !self.is_ours(&last) {
            return Ok(Next::Nothing);
        }
        let reported = last.attempt.state == AttemptState::Running;
        let found = self.runner.find(&rollout, &last).await?;
        let due = Due { number, spent, reported, found, ..Due::first(rollout) };
        if due.found.is_some() {
            tracing::info!(rollout_id, attempt_id = due.attempt_id(), "taking up what an earlier controller started");
            return Ok(Next::Attempt(Box::new(due)));
        }
        let nothing = self.runner.nothing_at(rollout_id, &last.attempt.attempt_id);
        let verdict = Verdict::lost(format!("it was lost: the controller was restarted, and {nothing}"));
        // One that never came as far as to be reported is our fault alone.
        let retry = if reported || last.calls > 0 { verdict.retry } else { Retry::Free };
        let verdict = Verdict { retry, ..verdict };
        self.settle(&due, &verdict).await?;
        self.follow(due, verdict).await
    }

    /// Takes a rollout up that an error tore us away from: after `wait`, or at once where it is to end.
    pub(crate) async fn take_up_again(
        &self,
        rollout_id: &str,
        wait: Duration,
        mut stop: StopSignal,
    ) -> Result<Next, ClientError> {
        let reason = tokio::time::timeout(wait, stopped(&mut stop)).await.ok();
        let left = || self.runner.held().into_iter().filter(|(held, _)| held == rollout_id);
        if reason == Some(Stop::Shutdown) {
            for (_, attempt_id) in left() {
                // The next controller reports it.
                self.runner.reclaim(rollout_id, &attempt_id).await;
            }
            return Ok(Next::Nothing);
        }
        let next = match self.take_up(rollout_id).await {
            Err(error) if error.is_not_found() => Next::Nothing,
            next => next?,
        };
        if matches!(next, Next::Nothing) {
            for (_, attempt_id) in left() {
                self.reclaim(rollout_id, &attempt_id).await?;
            }
        }
        Ok(next)
    }

    /// Attempts of another controller are left alone while that may still be there.
    fn is_ours(&self, detail: &AttemptDetail) -> bool {
        let runner = |key: &str| detail.attempt.runner.get(key).and_then(Value::as_str);
        let Some(owner) = runner("controller") else { return true };
        if owner == self.runner.owner() || self.config.take_over {
            return true;
        }
        tracing::warn!(
            rollout_id = detail.attempt.rollout_id,
            owner,
            host = runner("host"),
            dir = runner("dir"),
            "a running attempt belongs to another controller and is left to it; if that is gone for good, start this one with take_over = true, or cancel the rollout"
        );
        false
    }

    /// Makes one attempt, or takes one up, and says what the rollout needs afterwards.
    pub(crate) async fn attempt(&self, mut due: Due, mut stop: StopSignal) -> Result<Next, ClientError> {
        let run = match due.found.take() {
            Some(found) => Ok(found),
            None => match self.claim(&due).await {
                Ok(order) => self.runner.start(order).await,
                // Ended before it began, or another controller was faster.
                Err(error) if error.is_conflict() || error.is_not_found() => {
                    tracing::debug!(rollout_id = due.rollout.rollout_id, %error, "not ours to run");
                    return Ok(Next::Nothing);
                }
                Err(error) => return Err(error),
            },
        };
        let verdict = match run {
            Ok(mut run) => match self.see_through(&mut due, run.as_mut(), &mut stop).await {
                Ok(verdict) => verdict,
                Err(error) => {
                    // The agent goes on: it is taken up again once the gateway hears us.
                    run.let_go();
                    return Err(error);
                }
            },
            Err(verdict) => verdict,
        };
        self.settle(&due, &verdict).await?;
        let stopped = *stop.borrow();
        match stopped {
            Some(Stop::Ended) => Ok(Next::Nothing),
            Some(Stop::Superseded) => self.supersede(due).await,
            Some(Stop::Shutdown) | None => self.follow(due, verdict).await,
        }
    }

    /// Goes on with the attempt that counts now.
    async fn supersede(&self, due: Due) -> Result<Next, ClientError> {
        let rollout = self.client.get_rollout(&due.rollout.rollout_id).await?.rollout;
        if rollout.status.state.is_terminal() {
            return Ok(Next::Nothing);
        }
        // Never the same one again: its key has ended with it.
        let number = rollout.current_attempt().parse().unwrap_or(0).max(due.number + 1);
        Ok(Next::Attempt(Box::new(Due { number, spent: due.spent, ..Due::first(rollout) })))
    }

    /// Makes the attempt the one that counts. From here on the rollout is ours.
    async fn claim(&self, due: &Due) -> Result<Order, ClientError> {
        let (rollout, attempt_id) = (&due.rollout, due.attempt_id());
        let grant = self.client.create_attempt(&rollout.rollout_id, &attempt_id).await?;
        let patch = StatusPatch {
            state: (rollout.status.state == RolloutState::Queuing).then_some(RolloutState::Running),
            last_attempt_id: Some(attempt_id.clone()),
            k8s_job_name: self.runner.job_name(&rollout.rollout_id, &attempt_id),
            ..StatusPatch::default()
        };
        self.client.patch_rollout(&rollout.rollout_id, &patch).await?;
        Ok(Order::new(rollout.clone(), grant, self.config.url_for_agents(self.client.base_url())))
    }

    /// Follows an attempt until it is over.
    async fn see_through(
        &self,
        due: &mut Due,
        run: &mut dyn Run,
        stop: &mut StopSignal,
    ) -> Result<Verdict, ClientError> {
        let (rollout_id, attempt_id) = (due.rollout.rollout_id.clone(), due.attempt_id());
        let timeout = due.rollout.config.timeout_seconds;
        let mut calls: Option<Calls> = None;
        let mut stopper = if run.is_ours() { Stopper::Agent } else { Stopper::Unknown };
        loop {
            let step = tokio::select! {
                step = run.next() => step,
                reason = stopped(stop) => {
                    run.end().await;
                    match reason {
                        Stop::Ended => return Ok(Verdict::cancelled()),
                        Stop::Superseded => return Ok(Verdict::superseded()),
                        Stop::Shutdown => stopper = Stopper::Us,
                    }
                    Step::Exited
                }
            };
            match step {
                Step::Started { about } if due.reported => drop(about),
                Step::Started { about } => {
                    tracing::info!(rollout_id, attempt_id, "agent started");
                    let state = Some(AttemptState::Running);
                    let patch = AttemptPatch { state, runner: Some(about), ..AttemptPatch::default() };
                    self.patch_attempt(due, &patch).await?;
                    due.reported = true;
                }
                Step::AgentEnded(end) => {
                    // The agent's key ends with its process, before the evaluator begins.
                    let calls = calls.insert(self.end_key(&rollout_id, &attempt_id).await?);
                    let verdict = Verdict::of_agent(&end, stopper, calls, timeout, "");
                    let repeated = verdict.retry == Retry::Costs && self.may_retry(due);
                    run.answer(if repeated { Answer::Skip } else { Answer::Go }).await;
                }
                Step::Exited => break,
            }
        }
        let (record, stderr_tail, evaluator_tail) = match run.outcome().await {
            Outcome::Ended { record, stderr_tail, evaluator_tail } => (record, stderr_tail, evaluator_tail),
            Outcome::Lost(message) => return Ok(Verdict::lost(message)),
            Outcome::Misconfigured(message) => return Ok(Verdict::misconfigured(message)),
        };
        tracing::debug!(rollout_id, attempt_id, ?record, "agent ended");
        let calls = match calls {
            Some(calls) => calls,
            None => self.end_key(&rollout_id, &attempt_id).await?,
        };
        Ok(Verdict::of(&record, stopper, &calls, timeout, &stderr_tail, &evaluator_tail))
    }

    /// Withdraws the agent's key and tells what the gateway recorded of its calls.
    async fn end_key(&self, rollout_id: &str, attempt_id: &str) -> Result<Calls, ClientError> {
        let patch = AttemptPatch { agent_ended: Some(true), ..AttemptPatch::default() };
        match self.client.patch_attempt(rollout_id, attempt_id, &patch).await {
            Ok(detail) => {
                let gateway_restarted = detail.outlived_a_gateway();
                Ok(Calls { count: detail.calls, last: detail.last_call, gateway_restarted })
            }
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(Calls::default()),
            Err(error) => Err(error),
        }
    }

    /// Reports the verdict on an attempt.
    async fn settle(&self, due: &Due, verdict: &Verdict) -> Result<(), ClientError> {
        let (rollout_id, attempt_id) = (&due.rollout.rollout_id, due.attempt_id());
        let message = verdict.message.as_deref();
        match verdict.failure {
            None if message.is_some() => tracing::error!(rollout_id, attempt_id, "{}", message.unwrap_or_default()),
            None => tracing::info!(rollout_id, attempt_id, "agent succeeded"),
            Some(_) if verdict.retry == Retry::Free => {
                tracing::info!(rollout_id, attempt_id, "{}", message.unwrap_or_default());
            }
            Some(class) => {
                tracing::warn!(rollout_id, attempt_id, ?class, "attempt failed: {}", message.unwrap_or_default());
                if message.is_some_and(|message| message.contains(NO_CALL)) {
                    tracing::error!(rollout_id, attempt_id, "{NO_CALL}");
                }
            }
        }
        // The controller that started it may have died before it said so.
        if verdict.failure.is_none() && !due.reported {
            let patch = AttemptPatch { state: Some(AttemptState::Running), ..AttemptPatch::default() };
            self.patch_attempt(due, &patch).await?;
        }
        let state = if verdict.failure.is_some() { AttemptState::Failed } else { AttemptState::Succeeded };
        let patch = AttemptPatch {
            state: Some(state),
            failure: verdict.failure,
            error_message: verdict.message.clone(),
            exit_code: verdict.exit_code,
            runner: (verdict.retry == Retry::Free).then(|| fields(json!({"shutdown": true}))),
            agent_ended: None,
        };
        self.patch_attempt(due, &patch).await?;
        self.runner.release(rollout_id, &attempt_id);
        Ok(())
    }

    /// Ends what an earlier controller left of an attempt that does not count any more: its rollout was ended or deleted
    /// while no controller ran.
    pub(crate) async fn reclaim(&self, rollout_id: &str, attempt_id: &str) -> Result<(), ClientError> {
        let asked = {
            let _place = self.taking_up.acquire().await;
            self.client.get_rollout(rollout_id).await
        };
        match asked {
            Ok(detail) => {
                let rollout = detail.rollout;
                if rollout.status.state == RolloutState::Running && rollout.current_attempt() == attempt_id {
                    return Ok(());
                }
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
        if self.runner.reclaim(rollout_id, attempt_id).await {
            tracing::info!(rollout_id, attempt_id, "ended what was left of an attempt that does not count any more");
        }
        let patch = AttemptPatch {
            state: Some(AttemptState::Failed),
            failure: Some(FailureClass::Cancelled),
            error_message: Verdict::cancelled().message,
            ..AttemptPatch::default()
        };
        match self.client.patch_attempt(rollout_id, attempt_id, &patch).await {
            Err(error) if !error.is_conflict() && !error.is_not_found() => return Err(error),
            _ => self.runner.release(rollout_id, attempt_id),
        }
        Ok(())
    }

    /// A patch that comes too late, because the rollout was ended or deleted from outside, is no error.
    async fn patch_attempt(&self, due: &Due, patch: &AttemptPatch) -> Result<(), ClientError> {
        let attempt_id = due.attempt_id();
        match self.client.patch_attempt(&due.rollout.rollout_id, &attempt_id, patch).await {
            Err(error) if error.is_conflict() || error.is_not_found() => {
                tracing::debug!(rollout_id = due.rollout.rollout_id, attempt_id, %error, "the attempt is not as we thought");
                Ok(())
            }
            outcome => outcome.map(drop),
        }
    }

    fn may_retry(&self, due: &Due) -> bool {
        due.spent + 1 < due.rollout.config.max_attempts.unwrap_or(self.config.max_attempts)
    }

    /// What follows from a verdict: another attempt, or the end of the rollout.
    async fn follow(&self, mut due: Due, verdict: Verdict) -> Result<Next, ClientError> {
        let again = match verdict.failure {
            Some(FailureClass::Infrastructure) => match verdict.retry {
                Retry::Never => false,
                Retry::Free => true,
                Retry::Costs => self.may_retry(&due),
            },
            _ => false,
        };
        if again {
            due.spent += u32::from(verdict.retry == Retry::Costs);
            due.number += 1;
            due.reported = false;
            due.wait = self.config.backoff(due.spent);
            due.rollout.status.state = RolloutState::Running;
            return Ok(Next::Attempt(Box::new(due)));
        }
        // Another attempt may have been asked for that we have not heard of: the end of this one is then not the rollout's.
        let now = self.client.get_rollout(&due.rollout.rollout_id).await?.rollout;
        if now.current_attempt().parse::<u32>().is_ok_and(|current| current > due.number) {
            return self.supersede(due).await;
        }
        let mut message = verdict.message;
        if verdict.retry == Retry::Costs && due.spent > 0 {
            let last = message.unwrap_or_default();
            message = Some(format!("{} attempts failed of infrastructure; the last: {last}", due.spent + 1));
        }
        let state = if verdict.failure.is_some() { RolloutState::Failed } else { RolloutState::Succeeded };
        let patch = StatusPatch { state: Some(state), error_message: message, ..StatusPatch::default() };
        match self.client.patch_rollout(&due.rollout.rollout_id, &patch).await {
            Err(error) if !error.is_conflict() && !error.is_not_found() => Err(error),
            _ => Ok(Next::Nothing),
        }
    }
}

async fn stopped(stop: &mut StopSignal) -> Stop {
    let reason = stop.wait_for(Option::is_some).await.ok().and_then(|reason| *reason);
    match reason {
        Some(reason) => reason,
        // The loop is gone without a word: nobody will stop us.
        None => std::future::pending().await,
    }
}

fn costs(detail: &AttemptDetail) -> bool {
    detail.attempt.failure == Some(FailureClass::Infrastructure) && !is_free(detail)
}

fn costs_class(failure: Option<FailureClass>, retry: Retry) -> bool {
    failure == Some(FailureClass::Infrastructure) && retry == Retry::Costs
}

/// We ended it ourselves while shutting down.
fn is_free(detail: &AttemptDetail) -> bool {
    detail.attempt.runner.get("shutdown") == Some(&Value::Bool(true))
}
