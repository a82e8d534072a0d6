//! Whose failure it was, and what follows from it. Nothing here touches the world.

use agl_client::LastCall;
use agl_core::attempt::FailureClass;
use nix::sys::signal::Signal;

use crate::supervisor::record::{End, ExitRecord};

/// What became of an attempt.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// `None`: it succeeded.
    pub failure: Option<FailureClass>,
    /// For a person. A success may carry one too, where something is odd about it.
    pub message: Option<String>,
    /// The agent's exit code; negative is a signal.
    pub exit_code: Option<i32>,
    /// Whether another attempt may end otherwise.
    pub retry: Retry,
}

/// Whether another attempt may end otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// No: the agent's own doing, or a configuration that will not change.
    Never,
    /// Yes, and it costs one of the rollout's attempts.
    Costs,
    /// Yes, and it costs nothing: we ended it ourselves.
    Free,
}

/// What the gateway recorded of an attempt's model calls.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Calls {
    /// How many.
    pub count: u64,
    /// How the last one ended.
    pub last: Option<LastCall>,
    /// The gateway was restarted under the attempt: a call that was under way then got no answer and no record.
    pub gateway_restarted: bool,
}

/// Who wanted the supervisor to end what it ran. The supervisor only knows that it got a signal, and the agent, which runs
/// as the same user, can send one too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopper {
    /// This controller, because it ends.
    Us,
    /// An earlier controller, or the agent.
    Unknown,
    /// We started the supervisor and did not stop it: the agent.
    Agent,
}

impl Verdict {
    /// Judges an attempt whose processes have ended.
    ///
    /// `stderr_tail` is what the agent last wrote to its standard error, `evaluator_tail` the same of the evaluator.
    #[must_use]
    pub fn of(
        record: &ExitRecord,
        stopper: Stopper,
        calls: &Calls,
        timeout_seconds: u64,
        stderr_tail: &str,
        evaluator_tail: &str,
    ) -> Self {
        let mut verdict = Self::of_agent(&record.agent, stopper, calls, timeout_seconds, stderr_tail);
        if record.evaluator.as_ref().is_some_and(|end| end.stopped) {
            return Self::stopped(stopper, verdict.exit_code);
        }
        let Some(trouble) = record.evaluator.as_ref().and_then(|end| evaluator_trouble(end, evaluator_tail)) else {
            return verdict;
        };
        // Without a judgement a good run has no reward, and that is not the policy's failure. The agent is not run again
        // for it: that would choose among its answers those that can be judged.
        let message = verdict.message.take().map_or_else(|| trouble.clone(), |message| format!("{message}; {trouble}"));
        verdict.message = Some(message);
        verdict.failure = verdict.failure.or(Some(FailureClass::Infrastructure));
        verdict
    }

    /// Judges the agent alone.
    #[must_use]
    pub fn of_agent(agent: &End, stopper: Stopper, calls: &Calls, timeout_seconds: u64, stderr_tail: &str) -> Self {
        let exit_code = agent.exit_code();
        let failed =
            |failure, message: String, retry| Self { failure: Some(failure), message: Some(message), exit_code, retry };
        if let Some(reason) = &agent.not_started {
            let retry = if reason.permanent { Retry::Never } else { Retry::Costs };
            return failed(FailureClass::Infrastructure, reason.message.clone(), retry);
        }
        if agent.stopped {
            return Self::stopped(stopper, exit_code);
        }
        let silent = (calls.count == 0).then_some(NO_CALL);
        if agent.timed_out {
            let mut message = format!("the agent ran longer than its config.timeout_seconds = {timeout_seconds}");
            if let Some(silent) = silent {
                message = format!("{message}; {silent}");
            }
            return failed(FailureClass::Timeout, message, Retry::Never);
        }
        if agent.code == Some(0) {
            return Self { failure: None, message: silent.map(str::to_owned), exit_code, retry: Retry::Never };
        }
        let mut message = match (agent.code, agent.signal) {
            (Some(code), _) => format!("the agent exited with code {code}"),
            (None, Some(signal)) => format!("the agent was killed by signal {signal}"),
            (None, None) => "the agent ended in an unknown way".to_owned(),
        };
        if let Some(note) = &agent.note {
            message = format!("{message} ({note})");
        }
        if agent.out_of_memory {
            message =
                format!("{message}; it reached isolation.memory_limit_bytes, and the kernel killed a process of it");
            if agent.signal == Some(Signal::SIGKILL as i32) {
                return failed(FailureClass::Agent, message, Retry::Never);
            }
        }
        if let Some(last) = calls.last.as_ref().filter(|last| last.failed_upstream()) {
            let status = last.http_status.map_or_else(|| "no answer".to_owned(), |status| format!("status {status}"));
            message = format!("{message} after its last model call ended with {status}");
            return failed(FailureClass::Infrastructure, message, Retry::Costs);
        }
        if calls.gateway_restarted {
            message = format!(
                "{message}; the gateway was restarted under it, which ends an agent that does not retry its calls"
            );
            return failed(FailureClass::Infrastructure, message, Retry::Costs);
        }
        if let Some(silent) = silent {
            message = format!("{message}; {silent}");
        }
        if !stderr_tail.is_empty() {
            message = format!("{message}; stderr ends with: {stderr_tail}");
        }
        failed(FailureClass::Agent, message, Retry::Never)
    }

    /// The supervisor was told to end the agent or its evaluator. Only our own word for it is worth a free attempt.
    fn stopped(stopper: Stopper, exit_code: Option<i32>) -> Self {
        let (failure, retry, message) = match stopper {
            Stopper::Us => (FailureClass::Infrastructure, Retry::Free, "the controller ended it while shutting down"),
            Stopper::Unknown => (
                FailureClass::Infrastructure,
                Retry::Costs,
                "it was ended by a signal to its supervisor while no controller ran",
            ),
            Stopper::Agent => (
                FailureClass::Agent,
                Retry::Never,
                "its supervisor got a signal to end it that the controller did not send",
            ),
        };
        Self { failure: Some(failure), message: Some(message.to_owned()), exit_code, retry }
    }

    /// An attempt of which nothing can be known any more.
    #[must_use]
    pub fn lost(message: String) -> Self {
        Self {
            failure: Some(FailureClass::Infrastructure),
            message: Some(message),
            exit_code: None,
            retry: Retry::Costs,
        }
    }

    /// A rollout that cannot be run as it is configured.
    #[must_use]
    pub fn misconfigured(message: String) -> Self {
        Self {
            failure: Some(FailureClass::Infrastructure),
            message: Some(message),
            exit_code: None,
            retry: Retry::Never,
        }
    }

    /// Somebody asked for another attempt while it ran.
    #[must_use]
    pub fn superseded() -> Self {
        let message = Some("another attempt was asked for in its place".to_owned());
        Self { failure: Some(FailureClass::Cancelled), message, exit_code: None, retry: Retry::Never }
    }

    /// Somebody ended the rollout while it ran.
    #[must_use]
    pub fn cancelled() -> Self {
        let message = Some("the rollout was ended from outside".to_owned());
        Self { failure: Some(FailureClass::Cancelled), message, exit_code: None, retry: Retry::Never }
    }
}

/// Nothing was captured, so nothing can be learned from this rollout.
pub const NO_CALL: &str = "the gateway captured no model call: the harness probably does not use the base URL it was \
                           given (AGL_OPENAI_BASE_URL, OPENAI_BASE_URL); check its own configuration, or pass \
                           {{ openai_base_url }} in config.process";

fn evaluator_trouble(end: &End, tail: &str) -> Option<String> {
    let trouble = if let Some(reason) = &end.not_started {
        reason.message.clone()
    } else if end.timed_out {
        "it ran longer than its timeout_seconds".to_owned()
    } else {
        match (end.code, end.signal) {
            (Some(0), _) => return None,
            (Some(code), _) => format!("it exited with code {code}"),
            (None, Some(signal)) => format!("it was killed by signal {signal}"),
            (None, None) => "it ended in an unknown way".to_owned(),
        }
    };
    let tail = if tail.is_empty() { String::new() } else { format!("; its stderr ends with: {tail}") };
    Some(format!("the evaluator failed: {trouble}{tail}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::record::NotStarted;

    fn exit(code: i32) -> End {
        End { code: Some(code), ..End::default() }
    }

    fn calls(last: Option<(u16, &str)>) -> Calls {
        let last = last.map(|(status, word)| LastCall { http_status: Some(status), status: word.to_owned() });
        Calls { count: 1, last, gateway_restarted: false }
    }

    fn judge(agent: End, calls: &Calls) -> Verdict {
        Verdict::of(&ExitRecord { agent, evaluator: None }, Stopper::Us, calls, 60, "boom", "")
    }

    #[test]
    fn whose_failure_it_was() {
        let answered = calls(Some((200, "ok")));
        let upstream = calls(Some((503, "error")));
        let own_fault = calls(Some((400, "error")));
        let restarted = Calls { gateway_restarted: true, ..answered.clone() };
        let timed_out = End { signal: Some(15), timed_out: true, ..End::default() };
        for (agent, calls, failure, retry) in [
            (exit(0), &answered, None, Retry::Never),
            // It coped with the failed call by itself.
            (exit(0), &upstream, None, Retry::Never),
            (exit(1), &answered, Some(FailureClass::Agent), Retry::Never),
            (exit(1), &own_fault, Some(FailureClass::Agent), Retry::Never),
            (exit(1), &upstream, Some(FailureClass::Infrastructure), Retry::Costs),
            (End { signal: Some(11), ..End::default() }, &answered, Some(FailureClass::Agent), Retry::Never),
            (exit(1), &restarted, Some(FailureClass::Infrastructure), Retry::Costs),
            (exit(0), &restarted, None, Retry::Never),
            (timed_out.clone(), &restarted, Some(FailureClass::Timeout), Retry::Never),
            (timed_out.clone(), &answered, Some(FailureClass::Timeout), Retry::Never),
            (End { stopped: true, ..exit(1) }, &answered, Some(FailureClass::Infrastructure), Retry::Free),
        ] {
            let verdict = judge(agent.clone(), calls);
            assert_eq!((verdict.failure, verdict.retry), (failure, retry), "{agent:?} {calls:?}");
        }
        let verdict = judge(timed_out, &answered);
        assert_eq!(verdict.exit_code, Some(-15));
        assert!(verdict.message.unwrap().contains("timeout_seconds = 60"));
    }

    #[test]
    fn a_program_that_does_not_exist_is_not_tried_again_and_a_system_that_is_out_of_processes_is() {
        for (permanent, retry) in [(true, Retry::Never), (false, Retry::Costs)] {
            let reason = NotStarted { message: "cannot start \"x\"".to_owned(), permanent };
            let verdict = judge(End { not_started: Some(reason), ..End::default() }, &Calls::default());
            assert_eq!((verdict.failure, verdict.retry), (Some(FailureClass::Infrastructure), retry));
            assert_eq!(verdict.message.unwrap(), "cannot start \"x\"");
        }
    }

    #[test]
    fn a_rollout_without_a_captured_call_says_why_that_may_be() {
        let verdict = judge(exit(0), &Calls::default());
        assert_eq!(verdict.failure, None);
        assert!(verdict.message.unwrap().contains("AGL_OPENAI_BASE_URL"));
        let message = judge(exit(3), &Calls::default()).message.unwrap();
        assert!(message.contains("code 3") && message.contains("captured no model call") && message.ends_with("boom"));
    }

    #[test]
    fn a_broken_evaluator_is_not_the_policys_failure_and_hides_no_failure_of_the_agent() {
        for (agent, failure) in [(exit(0), FailureClass::Infrastructure), (exit(1), FailureClass::Agent)] {
            let record = ExitRecord { agent, evaluator: Some(exit(2)) };
            let verdict = Verdict::of(&record, Stopper::Us, &calls(Some((200, "ok"))), 60, "", "no module");
            assert_eq!((verdict.failure, verdict.retry), (Some(failure), Retry::Never));
            let message = verdict.message.unwrap();
            assert!(message.contains("the evaluator failed: it exited with code 2") && message.contains("no module"));
        }
        let record = ExitRecord { agent: exit(0), evaluator: Some(exit(0)) };
        assert_eq!(Verdict::of(&record, Stopper::Us, &calls(None), 60, "", "").failure, None);
    }

    #[test]
    fn an_agent_that_ran_out_of_memory_failed_by_itself_whatever_became_of_its_last_call() {
        let killed = End { signal: Some(9), out_of_memory: true, ..End::default() };
        let verdict = judge(killed, &calls(Some((503, "error"))));
        assert_eq!((verdict.failure, verdict.retry), (Some(FailureClass::Agent), Retry::Never));
        assert!(verdict.message.unwrap().contains("isolation.memory_limit_bytes"));
        // It lost a process, went on, and failed of something else.
        let verdict = judge(End { out_of_memory: true, ..exit(1) }, &calls(Some((503, "error"))));
        assert_eq!(verdict.failure, Some(FailureClass::Infrastructure));
        assert!(verdict.message.unwrap().contains("isolation.memory_limit_bytes"));
    }

    #[test]
    fn an_end_by_signal_costs_nothing_only_where_we_sent_it_ourselves() {
        let stopped = End { stopped: true, ..End::default() };
        for record in [
            ExitRecord { agent: exit(0), evaluator: Some(stopped.clone()) },
            ExitRecord { agent: stopped, evaluator: None },
        ] {
            for (stopper, failure, retry) in [
                (Stopper::Us, FailureClass::Infrastructure, Retry::Free),
                (Stopper::Unknown, FailureClass::Infrastructure, Retry::Costs),
                (Stopper::Agent, FailureClass::Agent, Retry::Never),
            ] {
                let verdict = Verdict::of(&record, stopper, &calls(None), 60, "", "");
                assert_eq!((verdict.failure, verdict.retry), (Some(failure), retry), "{stopper:?}");
            }
        }
    }
}
