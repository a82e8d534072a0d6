//! A controller from its beginning to its end: its runner, its turn to lead, its loop.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use agl_client::{Change, ClientError, GatewayClient};
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use tokio::sync::Semaphore;

use crate::attempt::{Attempts, TAKING_UP};
use crate::config::{ControllerConfig, RunnerKind};
use crate::error::ControllerError;
use crate::plan::{Planned, plan};
use crate::reconcile::Board;
use crate::runner::container::ContainerRunner;
use crate::runner::kubernetes::KubernetesRunner;
use crate::runner::process::ProcessRunner;
use crate::runner::{Host, Leave, Runner};
use crate::work_dir::WorkDir;

/// The controller waits for its gateway as long as it takes: agents go on meanwhile.
const PATIENCE: Duration = Duration::from_secs(365 * 24 * 3600);

/// How long somebody waits who only looks.
const GLANCE: Duration = Duration::from_secs(10);
/// Before a watch that the gateway could not serve is begun again.
const AGAIN: Duration = Duration::from_secs(2);

/// Runs rollouts until it is told to end.
#[derive(Debug)]
pub struct Controller {
    config: ControllerConfig,
    client: GatewayClient,
}

impl Controller {
    /// A controller of the rollouts of one gateway.
    #[must_use]
    pub fn new(config: ControllerConfig, client: GatewayClient) -> Self {
        Self { config, client: client.with_patience(PATIENCE) }
    }

    /// Runs rollouts until `shutdown` is ready. First takes up what an earlier controller left.
    ///
    /// # Errors
    /// [`ControllerError`] where it cannot begin, or the gateway refuses it.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), ControllerError> {
        self.check()?;
        tokio::pin!(shutdown);
        let work_dir = Arc::new(WorkDir::open(&self.config.work_dir)?);
        loop {
            let leave = Leave::default();
            let runner = self.runner(&work_dir, &leave).await?;
            let leads = async {
                runner.elected().await;
                tokio::select! {
                    () = runner.observe() => true,
                    () = runner.deposed() => false,
                }
            };
            let leads = tokio::select! {
                leads = leads => leads,
                () = &mut shutdown => {
                    runner.resign().await;
                    return Ok(());
                }
            };
            if !leads {
                continue;
            }
            tracing::info!(
                gateway = self.client.base_url(), work_dir = %self.config.work_dir.display(), runner = runner.kind(),
                "controller started"
            );
            let (config, client) = (self.config.clone(), self.client.clone());
            let taking_up = Semaphore::new(TAKING_UP);
            let work_dir = work_dir.clone();
            match lead(Attempts { config, client, runner, work_dir, leave, taking_up }, &mut shutdown).await {
                Err(Ended::Deposed) => tracing::warn!("another controller leads now; this one stands by"),
                Err(Ended::Refused(error)) => return Err(error.into()),
                Ok(()) => return Ok(()),
            }
        }
    }

    /// What [`Controller::run`] would do now. Nothing is changed, and nobody is kept from running.
    ///
    /// # Errors
    /// [`ControllerError`] where it could not begin, or the gateway refuses it.
    pub async fn plan(self) -> Result<Vec<Planned>, ControllerError> {
        self.check()?;
        let work_dir = Arc::new(WorkDir::look(&self.config.work_dir));
        let runner = self.runner(&work_dir, &Leave::always()).await?;
        runner.observe().await;
        let client = self.client.clone().with_patience(GLANCE);
        Ok(plan(&self.config, &client, runner.as_ref()).await?)
    }

    fn check(&self) -> Result<(), ControllerError> {
        self.config.check()?;
        match &self.config.isolation {
            Some(isolation) => isolation.check(self.config.url_for_agents(self.client.base_url())),
            None => Ok(()),
        }
    }

    async fn runner(&self, work_dir: &Arc<WorkDir>, leave: &Leave) -> Result<Arc<dyn Runner>, ControllerError> {
        let host = Host::here().map_err(|source| ControllerError::WorkDir { path: ".".into(), source })?;
        let (config, work_dir, leave) = (self.config.clone(), work_dir.clone(), leave.clone());
        Ok(match self.config.runner {
            RunnerKind::Process => Arc::new(ProcessRunner::new(config, work_dir, host, leave)),
            RunnerKind::Container => {
                Arc::new(ContainerRunner::connect(config, self.client.clone(), work_dir, host, leave).await?)
            }
            RunnerKind::Kubernetes => {
                Arc::new(KubernetesRunner::connect(config, self.client.clone(), work_dir, host, leave).await?)
            }
        })
    }
}

/// Changes from a while later on.
fn later(client: &GatewayClient, wait: Duration) -> BoxStream<'static, Result<Change, ClientError>> {
    let client = client.clone();
    let begun = async move {
        tokio::time::sleep(wait).await;
        client.watch(None)
    };
    stream::once(begun).flatten().boxed()
}

/// Why a controller stopped leading before its end.
enum Ended {
    Deposed,
    Refused(ClientError),
}

/// Runs rollouts until `shutdown` is ready or another controller leads.
async fn lead(attempts: Attempts, shutdown: &mut (impl Future<Output = ()> + Unpin)) -> Result<(), Ended> {
    let mut changes = attempts.client.watch(None);
    let runner = attempts.runner.clone();
    let deposed = runner.deposed();
    tokio::pin!(deposed);
    let mut board = Board::new(attempts);
    let ended = loop {
        tokio::select! {
            change = changes.next() => match change {
                Some(Ok(change)) => board.note(change),
                Some(Err(error @ ClientError::Unreachable { .. })) => tracing::warn!("{error}"),
                // Its trouble, not ours: agents are not to end for it.
                Some(Err(error)) if matches!(error.status(), Some(429 | 500..)) => {
                    tracing::warn!("the watch of the gateway broke and is begun again: {error}");
                    changes = later(&board.client(), AGAIN);
                }
                Some(Err(error)) => break Err(Ended::Refused(error)),
                None => break Ok(()),
            },
            () = board.turn() => {}
            () = &mut deposed => break Err(Ended::Deposed),
            () = &mut *shutdown => break Ok(()),
        }
    };
    if matches!(ended, Err(Ended::Deposed)) {
        board.leave().await;
    } else {
        board.shut_down().await;
        runner.resign().await;
    }
    ended
}
