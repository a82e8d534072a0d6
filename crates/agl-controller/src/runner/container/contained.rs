//! One container from its making to its end, as the engine tells it. Every decision follows from how it stands now, so
//! that it does not matter who made it, or how often somebody began to look.

use std::sync::Arc;
use std::time::Duration;

use bollard::models::ContainerInspectResponse;
use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

use super::facts::{Ended, Seen, belongs_to, time_left};
use super::logs::{Follower, LogFiles};
use super::refusal::Refusal;
use super::relay::inside;
use super::spec::Plan;
use super::{PATIENCE, Shared};
use crate::runner::supervised::tail;
use crate::supervisor::record::{End, NotStarted};

/// When something does not happen after all, such as the end of a container that was stopped.
const LOOK: Duration = Duration::from_millis(100);
/// How often a running container is looked at that the engine says nothing of.
const GLANCE: Duration = Duration::from_secs(30);
/// How often in a row the engine may refuse to tell how a container stands.
const REFUSALS: u32 = 100;

/// One container that is made or watched.
pub(super) struct Contained {
    shared: Arc<Shared>,
    plan: Plan,
    files: LogFiles,
    /// It was made, by us or by an earlier controller.
    made: bool,
    started_told: bool,
    follower: Option<Follower>,
    /// What [`super::engine::Engine::absences`] was at first.
    absences: u64,
}

/// What becomes of a container.
pub(super) enum News {
    /// It runs, or ran.
    Started {
        /// The engine's id of it.
        id: String,
    },
    /// Nothing of it runs any more.
    Over(Past),
}

/// How a container ended.
pub(super) enum Past {
    /// Its program exited.
    Ended(End),
    /// Its program never ran.
    NotStarted(NotStarted),
    /// It is gone and nobody knows how it ended, or something that is not its program's ended it.
    Lost(String),
}

impl Contained {
    /// One that may have to be made; one of its name that is there is joined.
    pub(super) fn new(shared: Arc<Shared>, plan: Plan, files: LogFiles) -> Self {
        let absences = shared.engine.absences();
        Self { shared, plan, files, made: false, started_told: false, follower: None, absences }
    }

    /// Waits for what happens next. May be dropped and called again.
    pub(super) async fn next(&mut self) -> News {
        let mut refusals = 0;
        loop {
            if !self.made {
                if let Err(past) = self.make().await {
                    return News::Over(past);
                }
                self.made = true;
            }
            let container = match self.shared.engine.container(&self.plan.name).await {
                Ok(Some(container)) => container,
                Ok(None) => {
                    let name = &self.plan.name;
                    return News::Over(Past::Lost(format!("its container {name} was removed by somebody else")));
                }
                Err(refusal) if refusals < REFUSALS => {
                    refusals += 1;
                    tracing::debug!(name = self.plan.name, "cannot look at it: {refusal:?}");
                    tokio::time::sleep(LOOK).await;
                    continue;
                }
                Err(refusal) => {
                    let (name, message) = (&self.plan.name, refusal.message());
                    return News::Over(Past::Lost(format!("the engine does not tell how {name} stands: {message}")));
                }
            };
            match Seen::of(&container) {
                Seen::Created => {
                    if let Err(refusal) = self.shared.engine.start(&self.plan.name).await {
                        let is_gone = matches!(self.shared.engine.container(&self.plan.name).await, Ok(None));
                        if matches!(refusal, Refusal::NotFound(_)) && is_gone {
                            continue;
                        }
                        return News::Over(self.not_started("cannot be started", &refusal));
                    }
                }
                Seen::Running { started } => {
                    self.follow();
                    if !std::mem::replace(&mut self.started_told, true) {
                        return News::Started { id: container.id.unwrap_or_default() };
                    }
                    self.watch(started).await;
                }
                Seen::Going => tokio::time::sleep(LOOK).await,
                Seen::Over(ended) => {
                    if !ended.never_started && !std::mem::replace(&mut self.started_told, true) {
                        return News::Started { id: container.id.unwrap_or_default() };
                    }
                    self.keep_log().await;
                    return News::Over(self.past(&ended));
                }
            }
        }
    }

    /// Waits until it may have ended, and ends it when its time is over.
    async fn watch(&self, started: Option<Timestamp>) {
        let left = time_left(self.plan.limit, started, Timestamp::now());
        let over = async {
            match left.and_then(|left| Instant::now().checked_add(left)) {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.shared.engine.wait(&self.plan.name) => {
                // An engine may answer a moment before it knows how it ended.
                tokio::time::sleep(LOOK / 10).await;
            }
            // A connection may have gone silent, and the relay be dead.
            () = tokio::time::sleep(GLANCE) => {
                if let Some(relay) = &self.shared.relay
                    && let Err(error) = relay.ready().await
                {
                    tracing::warn!(name = self.plan.name, "its relay to the gateway cannot be put up again: {error}");
                }
            }
            () = over => {
                tracing::info!(name = self.plan.name, "its time is over");
                if let Err(refusal) = self.shared.engine.stop(&self.plan.name).await {
                    tracing::warn!(name = self.plan.name, "cannot stop it, trying again: {}", refusal.message());
                    tokio::time::sleep(LOOK).await;
                }
            }
        }
    }

    /// Ends it, keeping what it wrote. Where the engine is away that is left for later.
    pub(super) async fn stop(&mut self) {
        let patience = Duration::from_secs_f64(self.shared.config.kill_grace_seconds.ceil()) + PATIENCE;
        let stopped = async {
            let stopped = self.shared.engine.stop(&self.plan.name).await;
            if stopped.is_ok() && self.follower.is_some() {
                self.keep_log().await;
            }
        };
        let _ = tokio::time::timeout(patience, stopped).await;
    }

    /// Keeps what it writes from now on, and what it wrote.
    fn follow(&mut self) {
        let (engine, name, files) = (&self.shared.engine, &self.plan.name, &self.files);
        self.follower.get_or_insert_with(|| Follower::start(engine.clone(), name.clone(), files.clone()));
    }

    /// Waits until all is kept that it wrote.
    async fn keep_log(&mut self) {
        self.follow();
        if let Some(follower) = &mut self.follower {
            follower.finished().await;
        }
    }

    fn past(&self, ended: &Ended) -> Past {
        if i32::from(inside::NOT_STARTED) == ended.code
            && let Some((_, reason)) = tail(&self.files.stderr).split_once(&format!("{}: ", self.plan.token))
        {
            return Past::NotStarted(NotStarted { message: reason.to_owned(), permanent: true });
        }
        if ended.never_started {
            let message = format!("its container {} never ran; it ended with code {}", self.plan.name, ended.code);
            return Past::NotStarted(NotStarted { message, permanent: false });
        }
        let end = ended.end(self.plan.limit);
        if !end.timed_out && ended.was_killed() && self.shared.engine.absences() > self.absences {
            let (name, code) = (&self.plan.name, ended.code);
            return Past::Lost(format!("its container {name} was killed ({code}) when its engine was restarted"));
        }
        Past::Ended(end)
    }

    /// Makes the container. Whatever of that name is there already is taken as it is, if it is ours.
    async fn make(&self) -> Result<(), Past> {
        let Shared { engine, config, .. } = &*self.shared;
        let settings = &config.container;
        let name = &self.plan.name;
        if self.is_there().await? {
            return Ok(());
        }
        let image = self.shared.images.have(engine, &self.plan.image, self.plan.pull).await.map_err(|error| {
            let message = format!("its image {} cannot be had: {}", self.plan.image, error.message);
            Past::NotStarted(NotStarted { message, permanent: error.permanent })
        })?;
        let wrong = |message: String| Past::NotStarted(NotStarted { message, permanent: true });
        let body =
            self.plan.body(&image.config.unwrap_or_default(), settings).map_err(|error| wrong(error.to_string()))?;
        match engine.make(name, &body).await {
            // A limit that was asked for and is not in force.
            Ok(warnings) => match warnings.iter().find(|warning| warning.to_lowercase().contains("discarded")) {
                Some(warning) => Err(wrong(format!(
                    "the engine cannot confine its container as [controller.container] asks: {}",
                    warning.trim()
                ))),
                None => Ok(()),
            },
            // Our own request of a moment ago may have been heard though it was not answered.
            Err(refusal @ Refusal::Conflict(_)) => match self.is_there().await? {
                true => Ok(()),
                false => Err(self.not_started("cannot be made", &refusal)),
            },
            Err(refusal) => Err(self.not_started("cannot be made", &refusal)),
        }
    }

    /// True where the container is there and ours.
    async fn is_there(&self) -> Result<bool, Past> {
        match self.shared.engine.container(&self.plan.name).await {
            Ok(None) => Ok(false),
            Ok(Some(there)) if self.is_ours(&there) => Ok(true),
            Ok(Some(_)) => Err(Past::NotStarted(NotStarted {
                message: format!(
                    "there is another container {}, which belongs to another controller or to nobody: remove it",
                    self.plan.name
                ),
                permanent: true,
            })),
            Err(refusal) => Err(self.not_started("cannot be looked at", &refusal)),
        }
    }

    fn is_ours(&self, there: &ContainerInspectResponse) -> bool {
        let labels = there.config.as_ref().and_then(|config| config.labels.as_ref());
        labels.and_then(|labels| belongs_to(labels, self.shared.instance()))
            == belongs_to(self.plan.labels(), self.shared.instance())
    }

    fn not_started(&self, what: &str, refusal: &Refusal) -> Past {
        Past::NotStarted(NotStarted {
            message: format!("its container {} {what}: {}", self.plan.name, refusal.message()),
            permanent: refusal.is_permanent(),
        })
    }
}
