//! A namespace of a real API server, with a kubelet that plays in it.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use agl_mock_kubelet::Kubelet;
use futures_util::StreamExt;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Config as WatchConfig, Event, watcher};
use kube::{Api, Client, Config, ResourceExt};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::support::repository;

pub struct Cluster {
    pub namespace: String,
    pub kubeconfig: PathBuf,
    client: Client,
    runtime: Runtime,
    folder: PathBuf,
    _kubelet: Kubelet,
    /// The control plane, where it is ours alone.
    own: Option<PathBuf>,
}

/// One process of a pod, as the kubelet noted it.
#[derive(Clone, Debug)]
pub struct Ran {
    pub rollout: String,
    pub attempt: String,
    pub began: f64,
    pub ended: Option<f64>,
}

impl Cluster {
    /// A namespace of the API server that `AGL_TEST_KUBECONFIG` names; `None`, having said so, where it names none.
    pub fn shared(folder: &Path) -> Option<Self> {
        let Some(kubeconfig) = std::env::var_os("AGL_TEST_KUBECONFIG") else {
            println!("SKIPPED: AGL_TEST_KUBECONFIG names no API server");
            return None;
        };
        Some(Self::at(PathBuf::from(kubeconfig), folder, None))
    }

    /// A control plane that nobody else uses, so that its parts may be killed. `None` where none can be built.
    pub fn own(folder: &Path) -> Option<Self> {
        let plane = folder.join("plane");
        if !script(&["up".as_ref(), plane.as_os_str()]) {
            println!("SKIPPED: there is no Kubernetes control plane, and none can be built here");
            return None;
        }
        Some(Self::at(plane.join("kubeconfig"), folder, Some(plane)))
    }

    fn at(kubeconfig: PathBuf, folder: &Path, own: Option<PathBuf>) -> Self {
        let runtime = Runtime::new().unwrap();
        let folder = folder.join("pods");
        let unique = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
        let namespace = format!("agl-test-{unique}");
        let (client, kubelet) = runtime.block_on(async {
            let config = Kubeconfig::read_from(&kubeconfig).unwrap();
            let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.unwrap();
            let client = Client::try_from(config).unwrap();
            let wanted: Namespace = serde_json::from_value(json!({"metadata": {"name": namespace}})).unwrap();
            Api::all(client.clone()).create(&PostParams::default(), &wanted).await.unwrap();
            let node = format!("node-{unique}");
            let kubelet = Kubelet::start(client.clone(), &node, &namespace, &folder).await.unwrap();
            (client, kubelet)
        });
        Self { namespace, kubeconfig, client, runtime, folder, _kubelet: kubelet, own }
    }

    /// Notes from now on when each new Job is there.
    pub fn watch_creations(&self) -> Creations {
        let jobs = self.jobs();
        let seen: Arc<Mutex<Vec<Instant>>> = Arc::default();
        let notes = seen.clone();
        let task = self.runtime.spawn(async move {
            let mut events = watcher(jobs, WatchConfig::default()).default_backoff().boxed();
            let mut known = HashSet::new();
            while let Some(event) = events.next().await {
                if let Ok(Event::Apply(job) | Event::InitApply(job)) = event
                    && known.insert(job.name_any())
                {
                    notes.lock().unwrap().push(Instant::now());
                }
            }
        });
        Creations { seen, task }
    }

    fn jobs(&self) -> Api<Job> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub fn job(&self, name: &str) -> Option<Value> {
        let job = self.runtime.block_on(self.jobs().get_opt(name)).unwrap();
        job.map(|job| serde_json::to_value(job).unwrap())
    }

    /// Jobs that have not ended.
    pub fn unfinished_jobs(&self) -> Vec<String> {
        let jobs = self.runtime.block_on(self.jobs().list(&ListParams::default())).unwrap();
        let conditions =
            |job: &Job| job.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
        jobs.items.iter().filter(|job| conditions(job).is_empty()).map(ResourceExt::name_any).collect()
    }

    pub fn pod(&self, job: &str) -> Option<Value> {
        let of_job = ListParams::default().labels(&format!("job-name={job}"));
        let pods = self.runtime.block_on(self.pods().list(&of_job)).unwrap();
        pods.items.first().map(|pod| serde_json::to_value(pod).unwrap())
    }

    /// What the API server gives as the log of a Job's pod.
    pub fn log(&self, job: &str) -> String {
        let pod = self.pod(job).unwrap()["metadata"]["name"].as_str().unwrap().to_owned();
        self.runtime.block_on(self.pods().logs(&pod, &kube::api::LogParams::default())).unwrap()
    }

    /// Deletes a Job as a person would; its pods follow. One that is gone, and an API server that is away, are no errors.
    pub fn delete_job(&self, name: &str) -> bool {
        self.runtime.block_on(self.jobs().delete(name, &DeleteParams::background())).is_ok()
    }

    /// Every process so far, in the order of their beginnings.
    pub fn ledger(&self) -> Vec<Ran> {
        let text = fs::read_to_string(self.folder.join("ledger.jsonl")).unwrap_or_default();
        let mut ran: Vec<Ran> = Vec::new();
        let mut at: HashMap<String, usize> = HashMap::new();
        for line in text.lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            let word = |name: &str| line[name].as_str().unwrap().to_owned();
            let time = line["at"].as_f64().unwrap();
            if line["what"] == "start" {
                at.insert(word("pod"), ran.len());
                ran.push(Ran { rollout: word("rollout"), attempt: word("attempt"), began: time, ended: None });
            } else if let Some(index) = at.get(&word("pod")) {
                ran[*index].ended = Some(time);
            }
        }
        ran
    }

    pub fn runs(&self, rollout: &str) -> bool {
        self.ledger().iter().any(|ran| ran.rollout == rollout && ran.ended.is_none())
    }

    /// True where two processes of one rollout ran at the same time, or one attempt ran twice.
    pub fn overlaps(&self) -> bool {
        let mut of: HashMap<String, Vec<Ran>> = HashMap::new();
        for ran in self.ledger() {
            of.entry(ran.rollout.clone()).or_default().push(ran);
        }
        of.values().any(|of_one| {
            of_one.windows(2).any(|pair| {
                let overlap =
                    pair[0].ended.is_none_or(|ended| ended > pair[1].began) || pair[0].attempt == pair[1].attempt;
                if overlap {
                    println!("{pair:?}");
                }
                overlap
            })
        })
    }

    /// `stop` or `start` of a part of a control plane of our own.
    pub fn part(&self, what: &str, part: &str) {
        let plane = self.own.as_ref().unwrap();
        assert!(script(&[what.as_ref(), part.as_ref(), plane.as_os_str()]), "{what} {part}");
    }
}

/// When each Job was first seen.
pub struct Creations {
    seen: Arc<Mutex<Vec<Instant>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Creations {
    pub fn stop(self) -> Vec<Instant> {
        self.task.abort();
        self.seen.lock().unwrap().clone()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        match &self.own {
            Some(plane) => drop(script(&["down".as_ref(), plane.as_os_str()])),
            None => {
                let namespaces: Api<Namespace> = Api::all(self.client.clone());
                let _ = self.runtime.block_on(namespaces.delete(&self.namespace, &DeleteParams::default()));
            }
        }
    }
}

fn script(arguments: &[&std::ffi::OsStr]) -> bool {
    Command::new(repository().join("scripts/kubernetes.sh")).args(arguments).status().unwrap().success()
}
