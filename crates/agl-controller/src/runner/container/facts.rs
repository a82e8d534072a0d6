//! What an engine tells about a container. Nothing here touches the world.

use std::time::Duration;

use bollard::models::{ContainerInspectResponse, ContainerStateStatusEnum as Status};
use k8s_openapi::jiff::Timestamp;

use crate::runner::names::{ATTEMPT_ID, INSTANCE, ROLLOUT_ID};
use crate::supervisor::record::End;

/// Where a container stands.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Seen {
    /// Made, not started.
    Created,
    /// Runs, or is being ended.
    Running {
        /// Since when.
        started: Option<Timestamp>,
    },
    /// Has ended.
    Over(Ended),
    /// Somebody removes it.
    Going,
}

/// How a container ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Ended {
    pub(super) code: i32,
    /// The kernel ended a process of it for its memory.
    pub(super) out_of_memory: bool,
    /// How long it ran.
    pub(super) ran: Duration,
    /// It never ran.
    pub(super) never_started: bool,
}

impl Seen {
    pub(super) fn of(container: &ContainerInspectResponse) -> Self {
        let state = container.state.clone().unwrap_or_default();
        let started = moment(state.started_at.as_deref());
        match state.status {
            Some(Status::RUNNING | Status::PAUSED | Status::RESTARTING | Status::STOPPING) => Self::Running { started },
            Some(Status::EXITED | Status::DEAD) => {
                let finished = moment(state.finished_at.as_deref());
                // An engine that was away at its end, as after a restart of the host, may say 0.
                let seen = started.is_none() || finished.is_some();
                let ran = match (started, finished) {
                    (Some(started), Some(finished)) => finished.duration_since(started).try_into().unwrap_or_default(),
                    _ => Duration::ZERO,
                };
                Self::Over(Ended {
                    code: state.exit_code.filter(|_| seen).and_then(|code| i32::try_from(code).ok()).unwrap_or(-1),
                    out_of_memory: state.oom_killed == Some(true),
                    ran,
                    never_started: started.is_none(),
                })
            }
            Some(Status::REMOVING) => Self::Going,
            Some(Status::CREATED | Status::EMPTY) | None if state.running == Some(true) => Self::Running { started },
            Some(Status::CREATED | Status::EMPTY) | None => Self::Created,
        }
    }
}

impl Ended {
    /// The same in the words of all runners. It ran into its `limit` where it ran that long, whoever ended it then.
    pub(super) fn end(&self, limit: Option<Duration>) -> End {
        let note = self.out_of_memory && self.code != 0;
        End {
            code: Some(self.code),
            timed_out: limit.is_some_and(|limit| self.ran >= limit),
            note: note
                .then(|| "OOMKilled: it used more memory than controller.container.memory_bytes allows".to_owned()),
            seconds: self.ran.as_secs_f64(),
            ..End::default()
        }
    }

    /// True where it was killed, by whom it does not tell.
    pub(super) fn was_killed(&self) -> bool {
        !self.out_of_memory && matches!(self.code, -1 | 137 | 143 | 255)
    }
}

/// What is left of a time limit. `None`: there is none.
pub(super) fn time_left(limit: Option<Duration>, started: Option<Timestamp>, now: Timestamp) -> Option<Duration> {
    let (limit, started) = (limit?, started.unwrap_or(now));
    let ran = Duration::try_from(now.duration_since(started)).unwrap_or_default();
    Some(limit.saturating_sub(ran))
}

/// Whose container it is: rollout and attempt.
pub(super) fn belongs_to(
    labels: &std::collections::HashMap<String, String>,
    instance: &str,
) -> Option<(String, String)> {
    if labels.get(INSTANCE)? != instance {
        return None;
    }
    Some((labels.get(ROLLOUT_ID)?.clone(), labels.get(ATTEMPT_ID)?.clone()))
}

/// An engine's `0001-01-01T00:00:00Z` is no moment.
fn moment(text: Option<&str>) -> Option<Timestamp> {
    text?.parse::<Timestamp>().ok().filter(|moment| moment.as_second() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn seen(state: Value) -> Seen {
        Seen::of(&serde_json::from_value(json!({"Id": "x", "State": state})).unwrap())
    }

    #[test]
    fn a_container_that_ran_as_long_as_it_may_has_timed_out_whoever_ended_it() {
        let state = json!({
            "Status": "exited", "ExitCode": 137, "OOMKilled": false,
            "StartedAt": "2026-01-01T00:00:00.5Z", "FinishedAt": "2026-01-01T01:00:03.75+01:00",
        });
        let Seen::Over(ended) = seen(state) else { panic!("it has ended") };
        assert_eq!(ended.ran, Duration::from_millis(3250));
        for (limit, timed_out) in [(None, false), (Some(3), true), (Some(4), false)] {
            assert_eq!(ended.end(limit.map(Duration::from_secs)).timed_out, timed_out, "{limit:?}");
        }
    }

    #[test]
    fn one_that_was_only_made_has_not_started() {
        let zero = "0001-01-01T00:00:00Z";
        assert_eq!(seen(json!({"Status": "created", "StartedAt": zero, "FinishedAt": zero})), Seen::Created);
        assert_eq!(seen(json!({"Status": "running", "StartedAt": zero})), Seen::Running { started: None });
    }

    #[test]
    fn memory_is_named_only_where_the_agent_failed() {
        for (code, noted) in [(0, false), (137, true)] {
            let Seen::Over(ended) = seen(json!({"Status": "exited", "ExitCode": code, "OOMKilled": true})) else {
                panic!("it has ended")
            };
            assert_eq!(ended.end(None).note.is_some(), noted);
        }
    }

    #[test]
    fn the_time_limit_counts_from_the_containers_own_start() {
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let limit = Some(Duration::from_secs(60));
        let left = time_left(limit, Some(at("2026-01-01T00:00:00Z")), at("2026-01-01T00:00:45Z"));
        assert_eq!(left, Some(Duration::from_secs(15)));
        let left = time_left(limit, Some(at("2026-01-01T00:00:00Z")), at("2026-01-02T00:00:00Z"));
        assert_eq!(left, Some(Duration::ZERO));
        assert_eq!(time_left(None, None, at("2026-01-02T00:00:00Z")), None);
    }
}
