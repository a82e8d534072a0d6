//! Attempts as Kubernetes Jobs.
//!
//! A Job's template travels in the rollout. The Job is made first and then a Secret with the attempt's key, which the Job
//! owns; neither is ever made twice, since their names follow from the attempt's. What becomes of them is watched, and read
//! from the Job's condition and its pod together.
//!
//! * [`job`] — a template as a Job, and the Secret. Pure.
//! * [`facts`] — what a Job and its pods tell. Pure.
//! * [`observe`] — what the cluster has of ours, kept current.
//! * [`run`] — one attempt.
//! * [`end`] — a Job and its pods ended.
//! * [`lease`] — who leads where several controllers stand by.
//! * [`refusal`] — what an error of the API server means. Pure.

mod end;
pub mod facts;
pub mod job;
mod lease;
pub mod observe;
mod refusal;
mod run;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use agl_client::{AttemptDetail, ClientError, GatewayClient};
use agl_core::attempt::AttemptState;
use agl_core::rollout::Rollout;
use async_trait::async_trait;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::api::DynamicObject;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::ApiResource;
use kube::{Api, Client, Config};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::Instant;

use self::job::selector;
use self::lease::Election;
use self::observe::Observed;
use self::run::KubernetesRun;
use super::names::job_name;
use super::{Host, Leave, Order, Run, Runner};
use crate::config::ControllerConfig;
use crate::error::ControllerError;
use crate::launch::LaunchError;
use crate::pace::Pace;
use crate::verdict::Verdict;
use crate::work_dir::WorkDir;

/// How a controller runs rollouts on a cluster: `[controller.kubernetes]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KubernetesConfig {
    /// Where Jobs are made.
    pub namespace: String,
    /// The kubeconfig. Default: the one that `KUBECONFIG` names, or `~/.kube/config`; inside a cluster the pod's own account.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig. Default: its current one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<String>,
    /// Tells the Jobs of several gateways in one namespace apart; part of the label `app.kubernetes.io/instance`.
    pub instance: String,
    /// How many Jobs are made in a minute.
    pub max_jobs_per_minute: u32,
    /// How many of them at once after a pause.
    pub job_burst: u32,
    /// How long Kubernetes keeps a Job that has ended, with its pod and log.
    pub ttl_seconds_after_finished: u32,
    /// How long an attempt may take to start before it counts as infrastructure's failure.
    pub start_timeout_seconds: f64,
    /// How long an image may fail to be pulled before it does.
    pub image_pull_grace_seconds: f64,
    /// Whether several controllers may stand by, of which one leads.
    pub leader_election: bool,
    /// The Lease that says which.
    pub lease_name: String,
}

impl Default for KubernetesConfig {
    fn default() -> Self {
        Self {
            namespace: "default".to_owned(),
            kubeconfig: None,
            context: None,
            instance: "agl".to_owned(),
            max_jobs_per_minute: 600,
            job_burst: 20,
            ttl_seconds_after_finished: 600,
            start_timeout_seconds: 600.0,
            image_pull_grace_seconds: 60.0,
            leader_election: true,
            lease_name: "agl-controller".to_owned(),
        }
    }
}

/// Runs attempts as Jobs of one namespace.
#[derive(Debug)]
pub struct KubernetesRunner {
    shared: Arc<Shared>,
    election: Option<Election>,
    /// The watches; they end with the runner.
    watches: Mutex<JoinSet<()>>,
}

/// What all attempts share.
#[derive(Debug)]
struct Shared {
    config: ControllerConfig,
    client: GatewayClient,
    owner: String,
    host: Host,
    work_dir: Arc<WorkDir>,
    leave: Leave,
    observed: Observed,
    pace: Mutex<Pace>,
    jobs: Api<Job>,
    /// The same, for manifests that may hold more than this version of the types knows.
    dynamic_jobs: Api<DynamicObject>,
    pods: Api<Pod>,
    secrets: Api<Secret>,
}

impl Shared {
    /// Nothing is started for a while.
    fn hold(&self, wait: Duration, why: &str) {
        tracing::warn!(seconds = wait.as_secs_f64(), "no Jobs are made for a while: {why}");
        self.pace.lock().unwrap_or_else(PoisonError::into_inner).hold(Instant::now() + wait);
    }
}

impl KubernetesRunner {
    /// Finds the cluster: the kubeconfig that `KUBECONFIG` names, or the account of the pod that we run in.
    ///
    /// # Errors
    /// [`ControllerError::Cluster`] where there is none.
    pub async fn connect(
        config: ControllerConfig,
        client: GatewayClient,
        work_dir: Arc<WorkDir>,
        host: Host,
        leave: Leave,
    ) -> Result<Self, ControllerError> {
        let fault = |error: &dyn std::fmt::Display| ControllerError::Cluster { problem: error.to_string() };
        let KubernetesConfig { kubeconfig, context, .. } = &config.kubernetes;
        let mut cluster = if kubeconfig.is_none() && context.is_none() {
            Config::infer().await.map_err(|error| fault(&error))?
        } else {
            let read = kubeconfig.as_ref().map_or_else(Kubeconfig::read, Kubeconfig::read_from);
            let kubeconfig = read.map_err(|error| fault(&error))?;
            let options = KubeConfigOptions { context: context.clone(), ..KubeConfigOptions::default() };
            Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(|error| fault(&error))?
        };
        // A connection that has gone silent ends; watches are answered within 290 seconds.
        cluster.read_timeout = Some(Duration::from_secs(330));
        // We wait by ourselves where the API server is overloaded, so that nothing else is asked for meanwhile.
        cluster.default_retry = false;
        let cluster = Client::try_from(cluster).map_err(|error| fault(&error))?;
        let namespace = config.kubernetes.namespace.clone();
        let election = config.kubernetes.leader_election.then(|| {
            let identity = format!("{}_{}", host.name, uuid::Uuid::new_v4().simple());
            Election::new(
                Api::<Lease>::namespaced(cluster.clone(), &namespace),
                &config.kubernetes.lease_name,
                identity,
            )
        });
        let pace = Pace::new(config.kubernetes.max_jobs_per_minute, config.kubernetes.job_burst);
        let shared = Shared {
            owner: format!("kubernetes:{namespace}/{}", config.kubernetes.instance),
            host,
            work_dir,
            leave,
            observed: Observed::default(),
            pace: Mutex::new(pace),
            jobs: Api::namespaced(cluster.clone(), &namespace),
            dynamic_jobs: Api::namespaced_with(cluster.clone(), &namespace, &ApiResource::erase::<Job>(&())),
            pods: Api::namespaced(cluster.clone(), &namespace),
            secrets: Api::namespaced(cluster, &namespace),
            config,
            client,
        };
        Ok(Self { shared: Arc::new(shared), election, watches: Mutex::new(JoinSet::new()) })
    }

    /// An attempt as it was ordered, for one that an earlier controller began.
    async fn order(&self, rollout: &Rollout, attempt: &AttemptDetail) -> Result<Order, ClientError> {
        let client = &self.shared.client;
        let agent_url = self.shared.config.url_for_agents(client.base_url());
        let grant = client.create_attempt(&rollout.rollout_id, &attempt.attempt.attempt_id).await?;
        Ok(Order::new(rollout.clone(), grant, agent_url))
    }
}

#[async_trait]
impl Runner for KubernetesRunner {
    fn kind(&self) -> &'static str {
        "kubernetes"
    }

    fn owner(&self) -> &str {
        &self.shared.owner
    }

    fn takes(&self, rollout: &Rollout) -> bool {
        rollout.config.k8s.is_some()
    }

    /// The cluster's quota and scheduler decide.
    fn capacity(&self) -> usize {
        usize::MAX
    }

    fn may_start(&self, now: Instant) -> Result<(), Instant> {
        self.shared.pace.lock().unwrap_or_else(PoisonError::into_inner).take(now)
    }

    fn outlives_us(&self) -> bool {
        true
    }

    async fn elected(&self) {
        if let Some(election) = &self.election {
            election.won().await;
        }
    }

    async fn observe(&self) {
        {
            let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
            let (jobs, pods) = (self.shared.jobs.clone(), self.shared.pods.clone());
            self.shared.observed.watch(jobs, pods, &selector(&self.shared.config.kubernetes), &mut watches);
        }
        self.shared.observed.synced().await;
    }

    async fn deposed(&self) {
        match &self.election {
            Some(election) => election.lost().await,
            None => std::future::pending().await,
        }
    }

    async fn resign(&self) {
        if let Some(election) = &self.election {
            election.release().await;
        }
    }

    fn job_name(&self, rollout_id: &str, attempt_id: &str) -> Option<String> {
        Some(job_name(rollout_id, attempt_id))
    }

    fn preview(&self, order: &Order) -> Result<Value, LaunchError> {
        job::job(order, &self.shared.config.kubernetes, self.shared.config.sdk_environment)
    }

    async fn start(&self, order: Order) -> Result<Box<dyn Run>, Verdict> {
        Ok(Box::new(KubernetesRun::making(self.shared.clone(), order)))
    }

    /// The Job of an attempt that was never reported to run and made no call may not have got its Secret yet. One without a
    /// Job is lost even then: it may have had one, and must not run twice.
    async fn find(&self, rollout: &Rollout, attempt: &AttemptDetail) -> Result<Option<Box<dyn Run>>, ClientError> {
        let name = job_name(&rollout.rollout_id, &attempt.attempt.attempt_id);
        let job = self.shared.observed.job(&name);
        if job.is_none() && self.shared.observed.is_over(&name) {
            return Ok(None);
        }
        let order = self.order(rollout, attempt).await?;
        let reported = attempt.attempt.state == AttemptState::Running;
        let whole = reported || attempt.calls > 0 || job.is_none_or(|job| job.deleting);
        Ok(Some(Box::new(match whole {
            true => KubernetesRun::watching(self.shared.clone(), order, reported),
            false => KubernetesRun::making(self.shared.clone(), order),
        })))
    }

    fn held(&self) -> Vec<(String, String)> {
        self.shared.observed.unfinished()
    }

    /// The Job stays until its time to live is over, for people to look at.
    fn release(&self, _rollout_id: &str, _attempt_id: &str) {}

    async fn reclaim(&self, rollout_id: &str, attempt_id: &str) -> bool {
        let name = job_name(rollout_id, attempt_id);
        if self.shared.observed.is_over(&name) {
            return false;
        }
        self.shared.end(&name).await;
        true
    }

    fn nothing_at(&self, rollout_id: &str, attempt_id: &str) -> String {
        let namespace = &self.shared.config.kubernetes.namespace;
        format!("namespace {namespace} holds no Job {}", job_name(rollout_id, attempt_id))
    }
}
