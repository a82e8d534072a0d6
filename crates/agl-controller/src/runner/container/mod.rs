//! Attempts as containers of this host's engine, Docker or Podman.
//!
//! A container's name follows from its attempt's, so that none is ever made twice, and labels say whose it is. What becomes
//! of it is read from how the engine says that it stands; a controller that comes back finds it by its name. The agent's end
//! is written down before its evaluator begins, in another container of the same image, and both are removed once the end
//! of the attempt is on disk.
//!
//! * [`settings`] — what can be set. Pure.
//! * [`spec`] — an attempt as what the engine is asked to make. Pure.
//! * [`facts`] — what the engine tells about a container. Pure.
//! * [`refusal`] — what an error of the engine means. Pure.
//! * [`engine`] — the requests, repeated until the engine answers.
//! * [`images`] — what containers are made of.
//! * [`contained`] — one container from its making to its end.
//! * [`logs`] — what it writes.
//! * [`run`] — one attempt: its agent, then its evaluator.
//! * [`relay`] — the way to the gateway for containers without network.

mod contained;
mod engine;
mod facts;
mod images;
mod logs;
mod refusal;
pub mod relay;
mod run;
pub mod settings;
mod spec;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use agl_client::{AttemptDetail, ClientError, GatewayClient};
use agl_core::rollout::Rollout;
use async_trait::async_trait;
use serde_json::{Value, json};

pub use self::settings::{ContainerSettings, Pull};

use self::engine::Engine;
use self::facts::{Seen, belongs_to};
use self::images::Images;
use self::relay::Relay;
use self::run::ContainerRun;
use self::spec::{Draft, agent_name, evaluator_name};
use super::{Host, Leave, Order, Run, Runner};
use crate::config::ControllerConfig;
use crate::error::ControllerError;
use crate::launch::LaunchError;
use crate::verdict::Verdict;
use crate::work_dir::{WorkDir, read_record};

/// Beyond its grace a container gets this long to be ended before it is left for later.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two tries to end what the engine did not say has ended.
const AGAIN: Duration = Duration::from_secs(1);

/// Runs attempts as containers.
#[derive(Debug)]
pub struct ContainerRunner {
    shared: Arc<Shared>,
    client: GatewayClient,
    /// What the engine had of ours when we began.
    found: Mutex<HashSet<(String, String)>>,
}

/// What all attempts share.
#[derive(Debug)]
struct Shared {
    config: ControllerConfig,
    work_dir: Arc<WorkDir>,
    host: Host,
    leave: Leave,
    engine: Arc<Engine>,
    images: Images,
    relay: Option<Relay>,
    /// The gateway as containers reach it.
    inside_url: String,
    /// Containers that were to end, and of which the engine has not said that they have.
    unsure: Mutex<HashSet<String>>,
}

impl Shared {
    /// Which containers are this controller's.
    fn instance(&self) -> &str {
        self.work_dir.controller_id()
    }

    /// True where there is a container of that name and it is ours.
    async fn has(&self, name: &str) -> bool {
        let Ok(Some(there)) = self.engine.container(name).await else { return false };
        let labels = there.config.and_then(|config| config.labels).unwrap_or_default();
        belongs_to(&labels, self.instance()).is_some()
    }

    /// Ends containers, asked in a friendly way first, and removes them unless they are to be kept. True where there were any.
    async fn end(&self, names: &[String]) -> bool {
        let mut any = false;
        for name in names {
            self.soon(name, async {
                if self.has(name).await {
                    any = true;
                    if let Err(refusal) = self.engine.stop(name).await {
                        tracing::debug!(name, "it cannot be stopped: {}", refusal.message());
                    }
                }
            })
            .await;
        }
        self.clear(names).await;
        any
    }

    /// Notes which of these containers may still run: an engine that does not answer says nothing.
    async fn confirm(&self, names: &[String]) {
        for name in names {
            let gone = match tokio::time::timeout(PATIENCE, self.engine.container(name)).await {
                Ok(Ok(None)) => true,
                Ok(Ok(Some(there))) => {
                    let over = matches!(Seen::of(&there), Seen::Over(_));
                    let labels = there.config.and_then(|config| config.labels).unwrap_or_default();
                    over || belongs_to(&labels, self.instance()).is_none()
                }
                Ok(Err(_)) | Err(_) => false,
            };
            let mut unsure = self.unsure();
            if gone {
                unsure.remove(name)
            } else {
                unsure.insert(name.clone())
            };
        }
    }

    fn unsure(&self) -> std::sync::MutexGuard<'_, HashSet<String>> {
        self.unsure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends what may be left of the attempts before this one: nothing else may run while they do.
    async fn end_earlier(&self, rollout_id: &str, attempt_id: &str) {
        for number in 0..attempt_id.parse::<u32>().unwrap_or(0) {
            let number = number.to_string();
            let names = [agent_name(rollout_id, &number), evaluator_name(rollout_id, &number)];
            while names.iter().any(|name| self.unsure().contains(name)) {
                self.end(&names).await;
                tokio::time::sleep(AGAIN).await;
            }
        }
    }

    /// Removes containers that have ended, unless they are to be kept.
    async fn clear(&self, names: &[String]) {
        for name in names.iter().filter(|_| !self.config.container.keep_containers) {
            self.soon(name, async {
                if self.has(name).await
                    && let Err(refusal) = self.engine.remove(name).await
                {
                    tracing::warn!(name, "the engine does not remove it: {}", refusal.message());
                }
            })
            .await;
        }
        self.confirm(names).await;
    }

    /// Does something about a container unless the engine stays away: then the next controller does it.
    async fn soon(&self, name: &str, work: impl Future<Output = ()>) {
        let patience = Duration::from_secs_f64(self.config.kill_grace_seconds.ceil()) + PATIENCE;
        if tokio::time::timeout(patience, work).await.is_err() {
            tracing::warn!(name, "the engine does not answer; this container is left to the next controller");
        }
    }
}

impl ContainerRunner {
    /// Finds the engine.
    ///
    /// # Errors
    /// [`ControllerError::Engine`] where there is none, [`ControllerError::Config`] where agents could not reach the gateway.
    pub async fn connect(
        config: ControllerConfig,
        client: GatewayClient,
        work_dir: Arc<WorkDir>,
        host: Host,
        leave: Leave,
    ) -> Result<Self, ControllerError> {
        let settings = &config.container;
        let agent_url = config.url_for_agents(client.base_url());
        let unusable = |key, value: &str, reason| ControllerError::Config { key, value: format!("{value:?}"), reason };
        let (relay, inside_url) = if settings.is_relayed() {
            let (address, url) =
                relay::through(agent_url).map_err(|reason| unusable("agent_url", agent_url, reason))?;
            let program = settings.relay.clone().or_else(|| config.supervisor.clone());
            let program = program.unwrap_or_else(|| PathBuf::from("/proc/self/exe"));
            (Some(Relay::new(work_dir.root(), program, address)), url)
        } else {
            if settings.network != "host" && relay::leads_to_itself(agent_url) {
                let reason = "in a container of a network of its own that is the container itself: set agent_url to an \
                              address of the gateway that the container.network reaches";
                return Err(unusable("agent_url", agent_url, reason));
            }
            (None, agent_url.to_owned())
        };
        let engine = Engine::connect(settings.host.as_deref(), config.kill_grace_seconds).await?;
        tracing::info!(engine = engine.host, network = settings.network, "attempts run in containers");
        let images = Images::new(settings.pull_timeout_seconds);
        let engine = Arc::new(engine);
        let shared =
            Shared { work_dir, host, leave, engine, images, relay, inside_url, config, unsure: Mutex::default() };
        Ok(Self { shared: Arc::new(shared), client, found: Mutex::default() })
    }

    /// An attempt as it was ordered, for one that an earlier controller began.
    async fn order(&self, rollout: &Rollout, attempt: &AttemptDetail) -> Result<Order, ClientError> {
        let grant = self.client.create_attempt(&rollout.rollout_id, &attempt.attempt.attempt_id).await?;
        Ok(Order::new(rollout.clone(), grant, &self.shared.inside_url))
    }

    fn found(&self) -> std::sync::MutexGuard<'_, HashSet<(String, String)>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Runner for ContainerRunner {
    fn kind(&self) -> &'static str {
        "container"
    }

    fn owner(&self) -> &str {
        self.shared.instance()
    }

    fn takes(&self, rollout: &Rollout) -> bool {
        let config = &rollout.config;
        let elsewhere = config.k8s.is_some() || config.process.is_some() || config.local.is_some();
        config.container.is_some() || !elsewhere
    }

    /// Looks what the engine has of ours: what was marked on disk may not be all.
    async fn observe(&self) {
        let containers = self.shared.engine.containers(self.shared.instance()).await.unwrap_or_else(|refusal| {
            tracing::warn!("the engine does not list its containers: {}", refusal.message());
            Vec::new()
        });
        let keep = self.shared.config.container.keep_containers;
        let running = |state: Option<String>| !matches!(state.as_deref(), Some("exited" | "dead"));
        let counts = containers.into_iter().filter(|it| !keep || running(it.state.map(|state| state.to_string())));
        let ours = counts.filter_map(|it| belongs_to(&it.labels.unwrap_or_default(), self.shared.instance()));
        self.found().extend(ours);
    }

    /// The last controller to end takes the relay along, where no agent needs it.
    async fn resign(&self) {
        if let Some(relay) = self.shared.relay.as_ref().filter(|_| !self.shared.leave.is_set()) {
            relay.close();
        }
    }

    fn preview(&self, order: &Order) -> Result<Value, LaunchError> {
        let shared = &self.shared;
        let dir = shared.work_dir.attempt(&order.rollout.rollout_id, &order.attempt_id);
        let draft = || Draft {
            config: &shared.config,
            instance: shared.instance(),
            host: &shared.host,
            order,
            inside_url: &shared.inside_url,
            dir: &dir,
            way: None,
        };
        let settings = &shared.config.container;
        let evaluator = draft().evaluator(None, None)?.map(|plan| plan.shown(settings));
        Ok(json!({"agent": draft().agent()?.shown(settings), "evaluator": evaluator}))
    }

    async fn start(&self, order: Order) -> Result<Box<dyn Run>, Verdict> {
        if let Err(error) = self.shared.work_dir.mark(&order.rollout.rollout_id, &order.attempt_id) {
            return Err(Verdict::lost(format!("it cannot be noted in the work_dir that it begins: {error}")));
        }
        Ok(Box::new(ContainerRun::making(self.shared.clone(), order)))
    }

    /// One without a container is lost, even if it was never reported: it may have had one, and must not run twice.
    async fn find(&self, rollout: &Rollout, attempt: &AttemptDetail) -> Result<Option<Box<dyn Run>>, ClientError> {
        let (rollout_id, attempt_id) = (&rollout.rollout_id, &attempt.attempt.attempt_id);
        let dir = self.shared.work_dir.attempt(rollout_id, attempt_id);
        let order = self.order(rollout, attempt).await?;
        if let Some(record) = read_record(&dir.exit()) {
            let names = [agent_name(rollout_id, attempt_id), evaluator_name(rollout_id, attempt_id)];
            self.shared.clear(&names).await;
            return Ok(Some(Box::new(ContainerRun::ended(self.shared.clone(), order, record))));
        }
        if let Some(end) = read_record(&dir.agent_end()) {
            return Ok(Some(Box::new(ContainerRun::judging(self.shared.clone(), order, end))));
        }
        let there = self.shared.engine.container(&agent_name(rollout_id, attempt_id)).await;
        Ok(match there {
            Ok(None) => None,
            _ => Some(Box::new(ContainerRun::making(self.shared.clone(), order))),
        })
    }

    fn held(&self) -> Vec<(String, String)> {
        let mut held = self.found().clone();
        held.extend(self.shared.work_dir.marked());
        held.into_iter().collect()
    }

    fn release(&self, rollout_id: &str, attempt_id: &str) {
        let names = [agent_name(rollout_id, attempt_id), evaluator_name(rollout_id, attempt_id)];
        if names.iter().any(|name| self.shared.unsure().contains(name)) {
            // It stays marked: a resync looks after it.
            return;
        }
        self.shared.work_dir.unmark(rollout_id, attempt_id);
        self.found().remove(&(rollout_id.to_owned(), attempt_id.to_owned()));
    }

    async fn reclaim(&self, rollout_id: &str, attempt_id: &str) -> bool {
        let names = [agent_name(rollout_id, attempt_id), evaluator_name(rollout_id, attempt_id)];
        self.shared.end(&names).await
    }

    fn nothing_at(&self, rollout_id: &str, attempt_id: &str) -> String {
        format!("the engine at {} has no container {}", self.shared.engine.host, agent_name(rollout_id, attempt_id))
    }
}

impl Drop for ContainerRunner {
    fn drop(&mut self) {
        if let Some(relay) = self.shared.relay.as_ref().filter(|_| !self.shared.leave.is_set()) {
            relay.close();
        }
    }
}

/// A folder that the container's user may write, whoever that is; nobody else on this host comes to it through its parent.
fn open_up(attempt: &Path, work: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(attempt, std::fs::Permissions::from_mode(0o700))?;
    std::fs::set_permissions(work, std::fs::Permissions::from_mode(0o777))
}
