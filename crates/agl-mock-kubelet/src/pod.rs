//! The life of one pod: bound, given its Secret, run, reported, ended.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::Request;
use k8s_openapi::api::core::v1::{Container, Pod, Secret};
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use tokio::sync::watch;

/// Between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(1);
/// Between two looks at what is not there yet, and two tries at what failed.
const LOOK: Duration = Duration::from_millis(100);

/// What all pods of a node share.
pub struct PodLife {
    client: Client,
    node: String,
    namespace: String,
    folder: PathBuf,
    pods: Api<Pod>,
    secrets: Api<Secret>,
}

impl PodLife {
    /// Pods of one namespace on one node, with their logs and the ledger in `folder`.
    #[must_use]
    pub fn new(client: Client, node: String, namespace: String, folder: PathBuf) -> Self {
        let pods = Api::namespaced(client.clone(), &namespace);
        let secrets = Api::namespaced(client.clone(), &namespace);
        Self { client, node, namespace, folder, pods, secrets }
    }

    /// Runs a pod to its end; `end` says when somebody deletes it.
    pub async fn run(self: Arc<Self>, pod: Pod, mut end: watch::Receiver<bool>) {
        let name = pod.name_any();
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
        // Of an earlier kubelet: what ran there is gone.
        if phase != "Pending" {
            let deleted = *end.borrow();
            return self.forget(&name, deleted).await;
        }
        let Some(container) = pod.spec.as_ref().and_then(|spec| spec.containers.first()).cloned() else { return };
        self.bind(&name).await;
        if container.image.as_deref().is_some_and(|image| image.starts_with("missing")) {
            self.report(&name, waiting(&container.name, "ImagePullBackOff", "there is no such image")).await;
            gone(&mut end).await;
            return self.forget(&name, true).await;
        }
        let environment = tokio::select! {
            environment = self.environment(&name, &container) => environment,
            () = gone(&mut end) => return self.forget(&name, true).await,
        };
        match self.spawn(&name, &container, environment) {
            Ok(child) => {
                self.note("start", &pod);
                let running = json!({"running": {"startedAt": null}});
                self.report(&name, status("Running", &container.name, running)).await;
                let limit = pod.spec.as_ref().and_then(|spec| spec.active_deadline_seconds);
                let limit = limit.and_then(|seconds| u64::try_from(seconds).ok()).map(Duration::from_secs);
                let (code, late) = wait(child, &mut end, limit).await;
                self.note("end", &pod);
                if late {
                    let reason =
                        json!({"phase": "Failed", "reason": "DeadlineExceeded", "message": "Pod was active too long"});
                    self.report(&name, reason).await;
                    gone(&mut end).await;
                    return self.forget(&name, true).await;
                }
                let phase = if code == 0 { "Succeeded" } else { "Failed" };
                let reason = if code == 0 { "Completed" } else { "Error" };
                let state = json!({"terminated": {"exitCode": code, "reason": reason}});
                self.report(&name, status(phase, &container.name, state)).await;
            }
            Err(error) => {
                let state =
                    json!({"terminated": {"exitCode": 128, "reason": "StartError", "message": error.to_string()}});
                self.report(&name, status("Failed", &container.name, state)).await;
            }
        }
        gone(&mut end).await;
        self.forget(&name, true).await;
    }

    /// A pod that is bound to a node can be asked for its log, and is deleted only by that node.
    async fn bind(&self, name: &str) {
        let body = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name, "namespace": self.namespace},
            "target": {"apiVersion": "v1", "kind": "Node", "name": self.node},
        });
        let path = format!("/api/v1/namespaces/{}/pods/{name}/binding", self.namespace);
        loop {
            let request = Request::post(&path).header("content-type", "application/json").body(body.to_string().into());
            let Ok(request) = request else { return };
            match self.client.request::<Value>(request).await {
                Err(kube::Error::Api(status)) if status.code < 500 && status.code != 429 => return,
                Ok(_) => return,
                Err(_) => tokio::time::sleep(LOOK).await,
            }
        }
    }

    /// The container's environment, once the Secrets that it refers to are there.
    async fn environment(&self, pod: &str, container: &Container) -> BTreeMap<String, String> {
        let mut complained = false;
        'again: loop {
            let mut environment = BTreeMap::new();
            for variable in container.env.iter().flatten() {
                let reference = variable.value_from.as_ref().and_then(|source| source.secret_key_ref.as_ref());
                let value = match reference {
                    None => variable.value.clone().unwrap_or_default(),
                    Some(reference) => {
                        let secret = self.secrets.get_opt(&reference.name).await.ok().flatten();
                        let value = secret.and_then(|secret| secret.data?.remove(&reference.key));
                        let Some(value) = value else {
                            if !std::mem::replace(&mut complained, true) {
                                let why = format!("secret {:?} not found", reference.name);
                                self.report(pod, waiting(&container.name, "CreateContainerConfigError", &why)).await;
                            }
                            tokio::time::sleep(LOOK).await;
                            continue 'again;
                        };
                        String::from_utf8_lossy(&value.0).into_owned()
                    }
                };
                environment.insert(variable.name.clone(), value);
            }
            return environment;
        }
    }

    fn spawn(&self, pod: &str, container: &Container, environment: BTreeMap<String, String>) -> std::io::Result<Child> {
        let words: Vec<&String> = container.command.iter().flatten().chain(container.args.iter().flatten()).collect();
        let Some((program, arguments)) = words.split_first() else {
            return Err(std::io::Error::other("the container has no command, and its image is not looked at"));
        };
        let log = std::fs::File::create(self.folder.join(format!("{pod}.{}.log", container.name)))?;
        let mut command = Command::new(program);
        command.args(arguments).envs(environment).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        if let Some(folder) = &container.working_dir {
            command.current_dir(folder);
        }
        command.process_group(0).kill_on_drop(true).spawn()
    }

    /// Reports until the API server hears it, or the pod is gone.
    async fn report(&self, pod: &str, status: Value) {
        let patch = Patch::Merge(json!({"status": status}));
        loop {
            match self.pods.patch_status(pod, &PatchParams::default(), &patch).await {
                Err(kube::Error::Api(status)) if status.code == 404 || status.code == 422 => return,
                Ok(_) => return,
                Err(_) => tokio::time::sleep(LOOK).await,
            }
        }
    }

    /// Tells the API server that nothing of a deleted pod is left.
    async fn forget(&self, pod: &str, deleted: bool) {
        let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        if !deleted {
            return;
        }
        loop {
            match self.pods.delete(pod, &now).await {
                Err(kube::Error::Api(status)) if status.code < 500 && status.code != 429 => return,
                Ok(_) => return,
                Err(_) => tokio::time::sleep(LOOK).await,
            }
        }
    }

    /// A line in `ledger.jsonl`: when which attempt's process began and ended.
    fn note(&self, what: &str, pod: &Pod) {
        let annotation = |name: &str| pod.annotations().get(name).cloned().unwrap_or_default();
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let line = json!({
            "at": at, "what": what, "pod": pod.name_any(), "rollout": annotation("agl/rollout-id"),
            "attempt": annotation("agl/attempt-id"),
        });
        let file = OpenOptions::new().create(true).append(true).open(self.folder.join("ledger.jsonl"));
        if let Ok(mut file) = file {
            let _ = file.write_all(format!("{line}\n").as_bytes());
        }
    }
}

/// Waits until somebody deletes the pod.
async fn gone(end: &mut watch::Receiver<bool>) {
    let _ = end.wait_for(|end| *end).await.map(drop);
}

/// Waits for a process to exit, or ends it with its group. 128 + n stands for signal n; true says that its time was over.
async fn wait(mut child: Child, end: &mut watch::Receiver<bool>, limit: Option<Duration>) -> (i32, bool) {
    let deadline = async {
        match limit {
            Some(limit) => tokio::time::sleep(limit).await,
            None => std::future::pending().await,
        }
    };
    let mut late = false;
    let group = child.id().and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw);
    let signal = |signal| group.map(|group| killpg(group, signal));
    let stop = async {
        tokio::select! {
            () = gone(end) => false,
            () = deadline => true,
        }
    };
    let exited = tokio::select! {
        exited = child.wait() => exited,
        is_late = stop => {
            late = is_late;
            signal(Signal::SIGTERM);
            match tokio::time::timeout(GRACE, child.wait()).await {
                Ok(exited) => exited,
                Err(_) => {
                    signal(Signal::SIGKILL);
                    child.wait().await
                }
            }
        }
    };
    // What it left behind goes with the container.
    signal(Signal::SIGKILL);
    (exited.map_or(255, |status| status.code().unwrap_or(128 + status.signal().unwrap_or(0))), late)
}

fn status(phase: &str, container: &str, state: Value) -> Value {
    let container = json!({
        "name": container, "image": "", "imageID": "", "ready": phase == "Running", "restartCount": 0, "state": state,
    });
    json!({"phase": phase, "containerStatuses": [container]})
}

fn waiting(container: &str, reason: &str, message: &str) -> Value {
    status("Pending", container, json!({"waiting": {"reason": reason, "message": message}}))
}
