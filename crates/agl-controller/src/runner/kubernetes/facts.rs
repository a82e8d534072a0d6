//! What a Job and its pods tell about an attempt. Nothing here touches the world.

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

use crate::runner::names::{ATTEMPT_ID, ROLLOUT_ID};

/// Reasons of a waiting container that only another template can change.
const PERMANENT: [&str; 2] = ["InvalidImageName", "ErrImageNeverPull"];
/// Reasons of a waiting container that say its image cannot be had, for now.
const NO_IMAGE: [&str; 4] = ["ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError"];
/// Reasons of a terminated container whose program never ran.
const NOT_STARTED: [&str; 3] = ["StartError", "ContainerCannotRun", "RunContainerError"];

/// What we keep of a Job. Small: thousands are held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobFacts {
    /// Tells it from a later one of the same name.
    pub uid: String,
    /// Whose.
    pub rollout_id: String,
    /// Whose.
    pub attempt_id: String,
    /// Somebody deletes it.
    pub deleting: bool,
    /// Its last condition, once it has ended.
    pub ended: Option<JobEnd>,
}

/// How a Job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobEnd {
    /// `Complete`.
    Complete,
    /// `Failed`.
    Failed {
        /// `DeadlineExceeded`, `BackoffLimitExceeded`, …
        reason: String,
        /// For a person.
        message: String,
    },
}

/// What we keep of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodFacts {
    /// Its name.
    pub name: String,
    /// Where it runs.
    pub node: Option<String>,
    /// `Pending`, `Running`, `Succeeded`, `Failed`, `Unknown`.
    pub phase: String,
    /// Somebody deletes it.
    pub deleting: bool,
    /// Why the pod itself, not a container of it, is as it is: `Evicted: the node was low on memory`.
    pub reason: Option<Reason>,
    /// Why the cluster ends it: preemption, a drained node, an eviction.
    pub disruption: Option<Reason>,
    /// Why it cannot be scheduled.
    pub unschedulable: Option<String>,
    /// Its containers, in the order of its specification.
    pub containers: Vec<ContainerFacts>,
}

/// A reason and its message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reason {
    /// One word.
    pub reason: String,
    /// For a person.
    pub message: String,
}

/// What we keep of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerFacts {
    /// Its name.
    pub name: String,
    /// Where it is in its life.
    pub state: ContainerState,
}

/// Where a container is in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContainerState {
    /// Not started, and why.
    Waiting(Reason),
    /// Runs.
    Running,
    /// Ended.
    Terminated {
        /// Exit code; 128 + n for signal n.
        code: i32,
        /// `Completed`, `Error`, `OOMKilled`, …
        reason: Reason,
    },
}

/// Where an attempt stands in the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Its agent has not started; why, if that is known.
    Waiting(Option<Waiting>),
    /// Its agent runs.
    Running {
        /// Its pod.
        pod: String,
        /// Its node.
        node: Option<String>,
    },
    /// It is being ended; how will be known soon.
    Ending,
    /// It is over.
    Over(Over),
}

/// Why an agent has not started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// For a person.
    pub why: String,
    /// How long that may go on.
    pub patience: Patience,
}

/// How long a reason not to start may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// As long as anything: `start_timeout_seconds`.
    Start,
    /// `image_pull_grace_seconds`.
    Image,
    /// Not at all: waiting will not help.
    None,
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Over {
    /// The agent exited.
    Exited {
        /// 0 or its exit code; 128 + n for signal n.
        code: i32,
        /// What else is to be said, such as `OOMKilled`.
        note: Option<String>,
    },
    /// It ran into its time limit.
    TimedOut,
    /// The cluster's doing.
    Lost(String),
    /// It can never start as it is configured.
    Misconfigured(String),
}

impl JobFacts {
    /// The facts of a Job that is ours.
    #[must_use]
    pub fn of(job: &Job) -> Option<Self> {
        let annotation = |name: &str| job.metadata.annotations.as_ref()?.get(name).cloned();
        let conditions = job.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
        let ended = conditions.iter().filter(|condition| condition.status == "True").find_map(|condition| {
            match condition.type_.as_str() {
                "Complete" => Some(JobEnd::Complete),
                "Failed" => Some(JobEnd::Failed {
                    reason: condition.reason.clone().unwrap_or_default(),
                    message: condition.message.clone().unwrap_or_default(),
                }),
                _ => None,
            }
        });
        Some(Self {
            uid: job.metadata.uid.clone()?,
            rollout_id: annotation(ROLLOUT_ID)?,
            attempt_id: annotation(ATTEMPT_ID)?,
            deleting: job.metadata.deletion_timestamp.is_some(),
            ended,
        })
    }
}

impl PodFacts {
    /// The facts of a pod.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
        let status = pod.status.clone().unwrap_or_default();
        let conditions = status.conditions.unwrap_or_default();
        let condition = |name: &str, value: &str| {
            let found = conditions.iter().find(|condition| condition.type_ == name && condition.status == value)?;
            let text = |text: &Option<String>| text.clone().unwrap_or_default();
            Some(Reason { reason: text(&found.reason), message: text(&found.message) })
        };
        let order: Vec<String> = pod.spec.iter().flat_map(|spec| &spec.containers).map(|it| it.name.clone()).collect();
        let mut containers: Vec<ContainerFacts> =
            status.container_statuses.unwrap_or_default().iter().filter_map(ContainerFacts::of).collect();
        containers.sort_by_key(|container| order.iter().position(|name| *name == container.name));
        let unschedulable = condition("PodScheduled", "False");
        Self {
            name: pod.metadata.name.clone().unwrap_or_default(),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            phase: status.phase.unwrap_or_default(),
            deleting: pod.metadata.deletion_timestamp.is_some(),
            reason: status.reason.map(|reason| Reason { reason, message: status.message.unwrap_or_default() }),
            disruption: condition("DisruptionTarget", "True"),
            unschedulable: unschedulable.map(|reason| reason.to_string()),
            containers,
        }
    }

    /// True once nothing of it runs any more.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(self.phase.as_str(), "Succeeded" | "Failed")
    }

    /// True once a program of it has begun.
    #[must_use]
    pub fn has_started(&self) -> bool {
        self.containers.iter().any(|container| match &container.state {
            ContainerState::Waiting(_) => false,
            ContainerState::Running => true,
            ContainerState::Terminated { reason, .. } => !NOT_STARTED.contains(&reason.reason.as_str()),
        })
    }

    fn waiting(&self) -> Option<Waiting> {
        let reason = self.containers.iter().find_map(|container| match &container.state {
            // A pod's ordinary beginning.
            ContainerState::Waiting(reason) if reason.reason == "ContainerCreating" || reason.reason.is_empty() => None,
            ContainerState::Waiting(reason) => Some((container, reason)),
            _ => None,
        });
        if let Some((container, reason)) = reason {
            let patience = match reason.reason.as_str() {
                word if PERMANENT.contains(&word) => Patience::None,
                word if NO_IMAGE.contains(&word) => Patience::Image,
                _ => Patience::Start,
            };
            return Some(Waiting { why: format!("container {} waits: {reason}", container.name), patience });
        }
        let why = self.unschedulable.as_ref()?;
        Some(Waiting { why: format!("its pod cannot be scheduled: {why}"), patience: Patience::Start })
    }

    /// How a pod that nobody deletes ended.
    fn over(&self) -> Over {
        if let Some(reason) = &self.disruption {
            return Over::Lost(format!("its pod was ended by the cluster: {reason}"));
        }
        if self.phase == "Succeeded" {
            return Over::Exited { code: 0, note: None };
        }
        let ended = self.containers.iter().find_map(|container| match &container.state {
            ContainerState::Terminated { code, reason } if *code != 0 => Some((container, *code, reason)),
            _ => None,
        });
        match (&self.reason, ended) {
            (Some(reason), _) if reason.reason == "DeadlineExceeded" => Over::TimedOut,
            // The pod's own reason is the kubelet's: Evicted, Preempting, NodeShutdown, OutOfcpu, UnexpectedAdmissionError, …
            (Some(reason), _) => Over::Lost(format!("its pod failed: {reason}")),
            (None, Some((container, code, reason))) => match reason.reason.as_str() {
                "ContainerStatusUnknown" => Over::Lost(format!("container {} was lost: {reason}", container.name)),
                word if NOT_STARTED.contains(&word) => {
                    Over::Misconfigured(format!("container {} cannot be started: {reason}", container.name))
                }
                "OOMKilled" => Over::Exited {
                    code,
                    note: Some("OOMKilled: it used more memory than resources.limits.memory allows".to_owned()),
                },
                _ => Over::Exited { code, note: None },
            },
            (None, None) => Over::Lost("its pod failed, and no container of it says why".to_owned()),
        }
    }
}

impl ContainerFacts {
    fn of(status: &ContainerStatus) -> Option<Self> {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let state = status.state.as_ref()?;
        let state = if let Some(ended) = &state.terminated {
            let reason = Reason { reason: text(&ended.reason), message: text(&ended.message) };
            ContainerState::Terminated { code: ended.exit_code, reason }
        } else if state.running.is_some() {
            ContainerState::Running
        } else {
            let waiting = state.waiting.clone().unwrap_or_default();
            ContainerState::Waiting(Reason { reason: text(&waiting.reason), message: text(&waiting.message) })
        };
        Some(Self { name: status.name.clone(), state })
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.reason.as_str(), self.message.as_str()) {
            (reason, "") => f.write_str(reason),
            ("", message) => f.write_str(message),
            (reason, message) => write!(f, "{reason}: {message}"),
        }
    }
}

/// Where an attempt stands. `job` is `None` once it was deleted; `started` is true once any pod of it has begun, whoever saw
/// it.
///
/// As long as a pod may run, it is not over: nothing else may take its place. Only where `given_up` says that it cannot be
/// ended is a pod that is being deleted taken for gone.
#[must_use]
pub fn judge<'a>(
    job: Option<&JobFacts>,
    pods: impl Iterator<Item = &'a PodFacts> + Clone,
    started: bool,
    given_up: bool,
) -> Seen {
    let ended = job.and_then(|job| job.ended.as_ref());
    let deadline = matches!(ended, Some(JobEnd::Failed { reason, .. }) if reason == "DeadlineExceeded");
    // A pod that somebody deletes tells how its containers were killed, not why: its Job will.
    if let Some(pod) = pods.clone().find(|pod| pod.has_ended() && !pod.deleting && !deadline) {
        return Seen::Over(pod.over());
    }
    if let Some(pod) = pods.clone().find(|pod| !(pod.has_ended() || given_up && pod.deleting)) {
        return match job {
            Some(job) if !pod.deleting && job.ended.is_none() => match pod.phase.as_str() {
                "Running" if pod.has_started() => Seen::Running { pod: pod.name.clone(), node: pod.node.clone() },
                _ => Seen::Waiting(pod.waiting()),
            },
            _ => Seen::Ending,
        };
    }
    if deadline && started {
        return Seen::Over(Over::TimedOut);
    }
    if deadline {
        let why = pods.clone().find_map(PodFacts::waiting);
        let why = why.map(|waiting| format!(": {}", waiting.why)).unwrap_or_default();
        return Seen::Over(Over::Lost(format!("it did not start within its config.timeout_seconds{why}")));
    }
    let Some(job) = job else { return Seen::Over(Over::Lost("its Job was deleted".to_owned())) };
    let disrupted = pods.clone().find_map(|pod| pod.disruption.as_ref());
    match &job.ended {
        Some(JobEnd::Complete) => Seen::Over(Over::Exited { code: 0, note: None }),
        Some(JobEnd::Failed { reason, message }) => Seen::Over(Over::Lost(match disrupted {
            Some(disruption) => format!("its pod was ended by the cluster: {disruption}"),
            None => {
                let reason = Reason { reason: reason.clone(), message: message.clone() };
                format!("its pod was deleted, or its node is gone ({reason})")
            }
        })),
        None if given_up => {
            Seen::Over(Over::Lost("its pod is being deleted and does not end: its node may be gone".to_owned()))
        }
        // Its pod is gone or going: its Job will say why.
        None if started || pods.clone().next().is_some() => Seen::Ending,
        None => Seen::Waiting(None),
    }
}
