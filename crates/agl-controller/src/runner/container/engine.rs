//! What we ask of the engine. A request waits for as long as the engine does not answer: containers go on meanwhile.

use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bollard::errors::Error;
use bollard::models::{ContainerCreateBody, ContainerInspectResponse, ContainerSummary, ImageInspect};
use bollard::query_parameters::{
    CreateContainerOptionsBuilder, CreateImageOptionsBuilder, ListContainersOptionsBuilder,
    RemoveContainerOptionsBuilder, StopContainerOptionsBuilder, WaitContainerOptionsBuilder,
};
use bollard::{API_DEFAULT_VERSION, Docker};
use futures_util::{StreamExt, TryStreamExt};

use super::refusal::Refusal;
use super::spec::selector;
use crate::error::ControllerError;

/// Between two tries at a request that was not answered.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// How long an answer to a short request may take.
const TIMEOUT: Duration = Duration::from_secs(120);
/// How long the engine has to answer for the first time.
const FIRST_ANSWER: Duration = Duration::from_secs(10);

/// An engine of containers, Docker or Podman.
#[derive(Debug)]
pub(super) struct Engine {
    docker: Docker,
    /// Where it is, for a person.
    pub(super) host: String,
    /// Between the signals that ask and that kill, in whole seconds.
    grace: i32,
    /// How often it did not answer.
    absences: AtomicU64,
    is_away: AtomicBool,
}

impl Engine {
    /// Connects to the engine that is configured, or to the first that is there.
    ///
    /// # Errors
    /// [`ControllerError::Engine`] where there is none.
    pub(super) async fn connect(host: Option<&str>, kill_grace_seconds: f64) -> Result<Self, ControllerError> {
        let fault = |problem: String| ControllerError::Engine { problem };
        let host = match host {
            Some(host) => host.to_owned(),
            None => find()
                .ok_or_else(|| fault("DOCKER_HOST is not set, and there is none of the usual sockets".to_owned()))?,
        };
        let unreachable = |error: &Error| fault(format!("{host}: {}", Refusal::of(error).message()));
        #[expect(clippy::cast_possible_truncation, reason = "seconds of grace, at most a day")]
        let grace = kill_grace_seconds.ceil().clamp(0.0, 86_400.0) as i32;
        let timeout = TIMEOUT.as_secs() + u64::try_from(grace).unwrap_or_default();
        let docker = if host.starts_with('/') || host.starts_with("unix://") {
            Docker::connect_with_unix(&host, timeout, API_DEFAULT_VERSION)
        } else if host.starts_with("tcp://") || host.starts_with("http://") {
            Docker::connect_with_http(&host, timeout, API_DEFAULT_VERSION)
        } else {
            return Err(fault(format!("{host} is neither a Unix socket nor a tcp:// address")));
        };
        let docker = docker.map_err(|error| unreachable(&error))?;
        let docker = match tokio::time::timeout(FIRST_ANSWER, docker.negotiate_version()).await {
            Ok(negotiated) => negotiated.map_err(|error| unreachable(&error))?,
            Err(_) => return Err(fault(format!("{host} does not answer within {} seconds", FIRST_ANSWER.as_secs()))),
        };
        Ok(Self { docker, host, grace, absences: AtomicU64::new(0), is_away: AtomicBool::new(false) })
    }

    /// How often it has been away. Who compares two of these knows whether it was in between.
    pub(super) fn absences(&self) -> u64 {
        self.absences.load(Ordering::Relaxed)
    }

    pub(super) fn docker(&self) -> &Docker {
        &self.docker
    }

    /// Repeats a request until the engine answers it.
    async fn answered<T, F>(&self, request: impl Fn() -> F) -> Result<T, Refusal>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let mut wait = RETRY.0;
        loop {
            match request().await.map_err(|error| Refusal::of(&error)) {
                Err(Refusal::Away(message)) => {
                    self.note_absence(&message);
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(RETRY.1);
                }
                answered => {
                    if self.is_away.swap(false, Ordering::Relaxed) {
                        tracing::info!(host = self.host, "the engine answers again");
                    }
                    return answered;
                }
            }
        }
    }

    /// It did not answer, or what it was saying broke off.
    pub(super) fn note_absence(&self, message: &str) {
        self.absences.fetch_add(1, Ordering::Relaxed);
        if !self.is_away.swap(true, Ordering::Relaxed) {
            tracing::warn!(host = self.host, "the engine does not answer; waiting for it: {message}");
        }
    }

    /// A container as it stands; `None` where there is none of that name.
    pub(super) async fn container(&self, name: &str) -> Result<Option<ContainerInspectResponse>, Refusal> {
        match self.answered(|| self.docker.inspect_container(name, None)).await {
            Ok(container) => Ok(Some(container)),
            Err(Refusal::NotFound(_)) => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }

    /// Makes a container, and tells what the engine had to say about it.
    pub(super) async fn make(&self, name: &str, body: &ContainerCreateBody) -> Result<Vec<String>, Refusal> {
        let make = || {
            let options = CreateContainerOptionsBuilder::default().name(name).build();
            self.docker.create_container(Some(options), body.clone())
        };
        Ok(self.answered(make).await?.warnings)
    }

    /// Starts a container; one that runs already is left alone.
    pub(super) async fn start(&self, name: &str) -> Result<(), Refusal> {
        self.answered(|| self.docker.start_container(name, None)).await
    }

    /// Returns when a container may have ended, or earlier: the caller looks.
    pub(super) async fn wait(&self, name: &str) {
        let options = WaitContainerOptionsBuilder::default().condition("not-running").build();
        let mut ended = pin!(self.docker.wait_container(name, Some(options)));
        match ended.next().await {
            None | Some(Ok(_) | Err(Error::DockerContainerWaitError { .. })) => {}
            Some(Err(error)) => {
                // A wait that outlasts the client's patience is as good as another.
                if let Refusal::Away(message) = Refusal::of(&error)
                    && !matches!(error, Error::RequestTimeoutError)
                {
                    self.note_absence(&message);
                }
                tokio::time::sleep(RETRY.0).await;
            }
        }
    }

    /// Asks a container to end, waits, kills it. One that is not there or has ended is as wanted.
    pub(super) async fn stop(&self, name: &str) -> Result<(), Refusal> {
        let stop = || {
            let options = StopContainerOptionsBuilder::default().t(self.grace).build();
            self.docker.stop_container(name, Some(options))
        };
        match self.answered(stop).await {
            Err(Refusal::NotFound(_)) => Ok(()),
            stopped => stopped,
        }
    }

    /// Removes a container, whatever it does. Where somebody else does so that is as good.
    pub(super) async fn remove(&self, name: &str) -> Result<(), Refusal> {
        let remove = || {
            let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
            self.docker.remove_container(name, Some(options))
        };
        match self.answered(remove).await {
            Err(Refusal::NotFound(_) | Refusal::Conflict(_)) => Ok(()),
            removed => removed,
        }
    }

    /// An image as it stands; `None` where it is not there.
    pub(super) async fn image(&self, name: &str) -> Result<Option<ImageInspect>, Refusal> {
        match self.answered(|| self.docker.inspect_image(name)).await {
            Ok(image) => Ok(Some(image)),
            Err(Refusal::NotFound(_)) => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }

    /// Fetches an image.
    pub(super) async fn pull(&self, name: &str) -> Result<(), Refusal> {
        let name = with_tag(name);
        self.answered(|| {
            let options = CreateImageOptionsBuilder::default().from_image(&name).build();
            self.docker.create_image(Some(options), None, None).try_for_each(|_| std::future::ready(Ok(())))
        })
        .await
    }

    /// All containers of one controller.
    pub(super) async fn containers(&self, instance: &str) -> Result<Vec<ContainerSummary>, Refusal> {
        let filters = std::collections::HashMap::from([("label", selector(instance))]);
        self.answered(|| {
            let options = ListContainersOptionsBuilder::default().all(true).filters(&filters).build();
            self.docker.list_containers(Some(options))
        })
        .await
    }
}

/// The first engine that is there, as Docker's own tools and Podman's find theirs.
fn find() -> Option<String> {
    if let Some(host) = std::env::var("DOCKER_HOST").ok().filter(|host| !host.is_empty()) {
        return Some(host);
    }
    let of_user = std::env::var("XDG_RUNTIME_DIR").ok().map(|folder| format!("{folder}/podman/podman.sock"));
    let sockets = [Some("/var/run/docker.sock".to_owned()), of_user, Some("/run/podman/podman.sock".to_owned())];
    sockets.into_iter().flatten().find(|socket| Path::new(socket).exists())
}

/// Without a tag an engine would fetch all there are.
fn with_tag(image: &str) -> String {
    let last = image.rsplit('/').next().unwrap_or(image);
    if last.contains([':', '@']) { image.to_owned() } else { format!("{image}:latest") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_without_a_tag_is_the_latest() {
        for (image, expected) in [
            ("alpine", "alpine:latest"),
            ("registry:5000/team/agent", "registry:5000/team/agent:latest"),
            ("registry:5000/team/agent:2", "registry:5000/team/agent:2"),
            ("agent@sha256:0123", "agent@sha256:0123"),
        ] {
            assert_eq!(with_tag(image), expected);
        }
    }
}
