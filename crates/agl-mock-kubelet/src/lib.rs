//! A stand-in for a Kubernetes node, for tests against a real API server that has none.
//!
//! It registers itself, takes every pod of a namespace, runs the command of the pod's first container as a process of this
//! host with the environment that the pod says, reports what became of it, and serves its log to the API server. Images
//! do not matter, but for those whose name begins with `missing`: they can never be pulled.
//!
//! * [`pod`] — the life of one pod.
//! * [`logs`] — what the API server asks a node for.

pub mod logs;
pub mod pod;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Config, Event, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;

use self::pod::PodLife;

/// Pods that are known: whether they are to end, by uid.
type Known = HashMap<String, watch::Sender<bool>>;

/// A node of one namespace. Dropped, it ends its processes.
#[derive(Debug)]
pub struct Kubelet {
    tasks: JoinSet<()>,
}

impl Kubelet {
    /// Registers a node `name` and begins to run the pods of `namespace`. Logs and the ledger lie in `folder`.
    ///
    /// # Errors
    /// Where the API server refuses it, or the folder cannot be used.
    pub async fn start(client: Client, name: &str, namespace: &str, folder: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let mut tasks = JoinSet::new();
        let port = logs::serve(folder.to_owned(), &mut tasks).await?;
        register(&client, name, port).await?;
        tasks.spawn(follow(client, name.to_owned(), namespace.to_owned(), folder.to_owned()));
        Ok(Self { tasks })
    }

    /// Runs until it is dropped.
    pub async fn run(mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

async fn register(client: &Client, name: &str, port: u16) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let node: Node = serde_json::from_value(json!({"metadata": {"name": name}}))?;
    match nodes.create(&PostParams::default(), &node).await {
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        created => drop(created.context("cannot register a node")?),
    }
    let status = json!({"status": {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        "conditions": [{"type": "Ready", "status": "True", "reason": "Plays", "message": ""}],
    }});
    nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}

async fn follow(client: Client, node: String, namespace: String, folder: PathBuf) {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let life = Arc::new(PodLife::new(client, node, namespace, folder));
    let mut events = watcher(pods, Config::default()).default_backoff().boxed();
    let mut known: Known = HashMap::new();
    let mut listed: Option<Vec<String>> = None;
    let mut running = JoinSet::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => listed = Some(Vec::new()),
            Ok(Event::InitApply(pod) | Event::Apply(pod)) => {
                let uid = pod.uid().unwrap_or_default();
                if let Some(listed) = &mut listed {
                    listed.push(uid.clone());
                }
                let ends = pod.metadata.deletion_timestamp.is_some();
                match known.get(&uid) {
                    Some(end) => drop(end.send_if_modified(|end| ends && !std::mem::replace(end, true))),
                    None => {
                        let (end, ended) = watch::channel(ends);
                        known.insert(uid, end);
                        running.spawn(life.clone().run(pod, ended));
                    }
                }
            }
            Ok(Event::Delete(pod)) => {
                if let Some(end) = known.remove(&pod.uid().unwrap_or_default()) {
                    end.send_replace(true);
                }
            }
            Ok(Event::InitDone) => {
                let listed = listed.take().unwrap_or_default();
                known.retain(|uid, end| {
                    listed.contains(uid) || {
                        end.send_replace(true);
                        false
                    }
                });
            }
            Err(_) => {}
        }
        while running.try_join_next().is_some() {}
    }
}
