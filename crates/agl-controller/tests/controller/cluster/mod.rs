//! An API server of one file: what a controller uses of Kubernetes, with the parts of the Job controller and of a kubelet
//! played by the test. It notes every request that changes something, and breaks on demand.

mod http;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub const NAMESPACE: &str = "agents";

/// What plays the kubelet.
#[derive(Clone, Copy, Default, PartialEq)]
pub enum Kubelet {
    /// The test, by hand.
    #[default]
    Test,
    /// Every pod that has its Secret succeeds after this time.
    Succeeds(Duration),
    /// The same at once, and after this time the Job's time to live is over.
    Vanishes(Duration),
}

#[derive(Default)]
pub struct Inside {
    objects: BTreeMap<(String, String), Value>,
    /// `(version, plural, type, object)`.
    changes: Vec<(u64, String, &'static str, Value)>,
    version: u64,
    calls: Vec<String>,
    lists: Vec<String>,
    /// Answers for the next requests of this name.
    faults: HashMap<String, VecDeque<(u16, Value)>>,
    logs: HashMap<String, String>,
    kubelet: Kubelet,
    /// Pods that are deleted stay until the test lets them go.
    slow_pods: bool,
    /// Watches that began under an earlier number end.
    watch_epoch: u64,
    /// Versions below are forgotten: 410.
    forgotten: u64,
    /// When each Job was created.
    pub created: Vec<std::time::Instant>,
}

#[derive(Clone)]
struct Shared {
    inside: Arc<Mutex<Inside>>,
    changed: Arc<watch::Sender<()>>,
}

pub struct FakeCluster {
    pub url: String,
    shared: Shared,
    task: JoinHandle<()>,
}

impl FakeCluster {
    pub async fn start() -> Self {
        let shared = Shared { inside: Arc::default(), changed: Arc::new(watch::Sender::new(())) };
        let router = http::router(shared.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { url, shared, task }
    }

    /// Writes a kubeconfig that leads here.
    pub fn kubeconfig(&self, folder: &std::path::Path) -> PathBuf {
        let path = folder.join("kubeconfig");
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        });
        std::fs::write(&path, text.to_string()).unwrap();
        path
    }

    pub fn inside<T>(&self, look: impl FnOnce(&mut Inside) -> T) -> T {
        look(&mut self.shared.inside.lock().unwrap())
    }

    /// The next request of this name, such as `POST jobs`, is answered with this status, `times` times.
    pub fn fail(&self, call: &str, code: u16, reason: &str, message: &str, times: usize) {
        let status = json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message,
            "details": if code == 429 { json!({"retryAfterSeconds": 1}) } else { json!({}) },
        });
        self.inside(|inside| {
            let faults = inside.faults.entry(call.to_owned()).or_default();
            faults.extend(std::iter::repeat_n((code, status), times));
        });
    }

    pub fn set_kubelet(&self, kubelet: Kubelet) {
        self.inside(|inside| inside.kubelet = kubelet);
    }

    pub fn keep_deleted_pods(&self, keep: bool) {
        self.inside(|inside| inside.slow_pods = keep);
        if !keep {
            self.shared.change(|inside| {
                let going = |object: &Value| !object["metadata"]["deletionTimestamp"].is_null();
                let pods: Vec<String> = inside
                    .objects
                    .iter()
                    .filter(|((plural, _), object)| plural == "pods" && going(object))
                    .map(|((_, name), _)| name.clone())
                    .collect();
                for pod in pods {
                    inside.remove("pods", &pod);
                }
                inside.collect();
            });
        }
    }

    /// Ends all watches; with `forget` their versions are too old to resume from.
    pub fn drop_watches(&self, forget: bool) {
        self.shared.change(|inside| {
            inside.watch_epoch += 1;
            if forget {
                inside.forgotten = inside.version;
            }
        });
    }

    /// What happens is not told to watches.
    pub fn silently(&self, change: impl FnOnce(&mut Inside)) {
        self.inside(|inside| {
            let told = inside.changes.len();
            change(inside);
            inside.changes.truncate(told);
        });
    }

    pub fn say_log(&self, job: &str, text: &str) {
        self.inside(|inside| inside.logs.insert(job.to_owned(), text.to_owned()));
    }

    pub fn calls(&self) -> Vec<String> {
        self.inside(|inside| inside.calls.clone())
    }

    pub fn lists(&self) -> Vec<String> {
        self.inside(|inside| inside.lists.clone())
    }

    pub fn get(&self, plural: &str, name: &str) -> Option<Value> {
        self.inside(|inside| inside.objects.get(&(plural.to_owned(), name.to_owned())).cloned())
    }

    pub fn names(&self, plural: &str) -> Vec<String> {
        self.inside(|inside| {
            let of = inside.objects.keys().filter(|(known, _)| known == plural);
            of.map(|(_, name)| name.clone()).collect()
        })
    }

    /// Changes the status of a Job's pod, as a kubelet does.
    pub fn pod_status(&self, job: &str, status: Value) {
        self.shared.change(|inside| inside.pod_status(job, status));
    }

    pub fn job_fails(&self, job: &str, reason: &str, message: &str) {
        self.shared.change(|inside| inside.job_ends(job, "Failed", reason, message));
    }

    pub fn pod_runs(&self, job: &str) {
        self.pod_status(job, running());
    }

    pub fn pod_exits(&self, job: &str, code: i32, reason: &str) {
        self.pod_status(job, exited(code, reason));
    }

    pub fn delete(&self, plural: &str, name: &str) {
        self.shared.change(|inside| inside.delete(plural, name, false));
    }

    pub fn put(&self, plural: &str, object: Value) {
        self.shared.change(|inside| drop(inside.insert(plural, object)));
    }

    pub async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let waited = tokio::time::timeout(Duration::from_secs(30), async {
            while !condition(self) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        assert!(waited.await.is_ok(), "waited in vain until {what}; calls so far: {:#?}", self.calls());
    }

    /// Waits until a Job and its Secret are there.
    pub async fn made(&self, job: &str) {
        self.until(&format!("{job} and its Secret are made"), |it| it.get("secrets", job).is_some()).await;
    }
}

impl Drop for FakeCluster {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub fn running() -> Value {
    json!({"phase": "Running", "containerStatuses": [{"name": "agent", "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": {"running": {}}}]})
}

pub fn exited(code: i32, reason: &str) -> Value {
    let state = json!({"terminated": {"exitCode": code, "reason": reason}});
    json!({
        "phase": if code == 0 { "Succeeded" } else { "Failed" },
        "containerStatuses": [{"name": "agent", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state}],
    })
}

pub fn waiting(reason: &str, message: &str) -> Value {
    let state = json!({"waiting": {"reason": reason, "message": message}});
    json!({"phase": "Pending", "containerStatuses": [{"name": "agent", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state}]})
}

impl Shared {
    fn change<T>(&self, change: impl FnOnce(&mut Inside) -> T) -> T {
        let result = change(&mut self.inside.lock().unwrap());
        self.changed.send_replace(());
        result
    }
}

impl Inside {
    fn tell(&mut self, plural: &str, what: &'static str, name: &str) -> Value {
        self.version += 1;
        let key = (plural.to_owned(), name.to_owned());
        let version = self.version;
        let object = self.objects.get_mut(&key).unwrap();
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        let object = object.clone();
        self.changes.push((version, plural.to_owned(), what, object.clone()));
        object
    }

    fn insert(&mut self, plural: &str, mut object: Value) -> Value {
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = json!(format!("uid-{}", self.version + 1));
        }
        self.objects.insert((plural.to_owned(), name.clone()), object);
        self.tell(plural, "ADDED", &name)
    }

    /// The Job controller makes a Job's pod.
    fn insert_pod(&mut self, job: &Value) {
        let name = job["metadata"]["name"].as_str().unwrap();
        let template = &job["spec"]["template"];
        let mut labels = template["metadata"]["labels"].clone();
        labels["job-name"] = json!(name);
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": format!("{name}-x7k2p"), "namespace": NAMESPACE, "labels": labels},
            "spec": template["spec"], "status": {"phase": "Pending"},
        });
        self.insert("pods", pod);
    }

    fn remove(&mut self, plural: &str, name: &str) {
        let key = (plural.to_owned(), name.to_owned());
        if self.objects.contains_key(&key) {
            self.tell(plural, "DELETED", name);
            self.objects.remove(&key);
        }
    }

    fn pods_of(&self, job: &str) -> Vec<String> {
        let of = self
            .objects
            .iter()
            .filter(|((plural, _), object)| plural == "pods" && object["metadata"]["labels"]["job-name"] == job);
        of.map(|((_, name), _)| name.clone()).collect()
    }

    pub fn delete(&mut self, plural: &str, name: &str, foreground: bool) {
        if plural == "jobs" {
            for pod in self.pods_of(name) {
                self.delete("pods", &pod, false);
            }
            self.remove("secrets", name);
            if foreground && !self.pods_of(name).is_empty() {
                self.mark_deleting("jobs", name);
                return;
            }
        }
        if plural == "pods" && self.slow_pods {
            self.mark_deleting("pods", name);
            return;
        }
        self.remove(plural, name);
    }

    fn mark_deleting(&mut self, plural: &str, name: &str) {
        if let Some(object) = self.objects.get_mut(&(plural.to_owned(), name.to_owned())) {
            object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            self.tell(plural, "MODIFIED", name);
        }
    }

    /// Jobs that wait for their pods' end go once these are gone.
    fn collect(&mut self) {
        let jobs: Vec<String> = self
            .objects
            .iter()
            .filter(|((plural, _), object)| plural == "jobs" && !object["metadata"]["deletionTimestamp"].is_null())
            .map(|((_, name), _)| name.clone())
            .collect();
        for job in jobs {
            if self.pods_of(&job).is_empty() {
                self.remove("jobs", &job);
            }
        }
    }

    pub fn pod_status(&mut self, job: &str, status: Value) {
        let Some(pod) = self.pods_of(job).pop() else { return };
        let ended = status["phase"].clone();
        self.objects.get_mut(&("pods".to_owned(), pod.clone())).unwrap()["status"] = status;
        self.tell("pods", "MODIFIED", &pod);
        match ended.as_str() {
            Some("Succeeded") => self.job_ends(job, "Complete", "", ""),
            Some("Failed") => {
                self.job_ends(job, "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
            }
            _ => {}
        }
    }

    pub fn job_ends(&mut self, job: &str, condition: &str, reason: &str, message: &str) {
        let Some(object) = self.objects.get_mut(&("jobs".to_owned(), job.to_owned())) else { return };
        let condition = json!({"type": condition, "status": "True", "reason": reason, "message": message});
        object["status"]["conditions"] = json!([condition]);
        self.tell("jobs", "MODIFIED", job);
    }

    pub fn forget_faults(&mut self) {
        self.faults.clear();
    }

    fn fault(&mut self, call: &str) -> Option<Response> {
        let (code, status) = self.faults.get_mut(call)?.pop_front()?;
        Some((StatusCode::from_u16(code).unwrap(), Json(status)).into_response())
    }
}
