//! An engine of one file: what a controller uses of Docker's interface, behind a Unix socket. The programs in its
//! containers are played by the test. It notes every request that changes something, breaks on demand, and goes away.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// One container.
#[derive(Clone)]
pub struct Kept {
    /// As it was asked for.
    pub body: Value,
    id: String,
    status: &'static str,
    code: i32,
    oom_killed: bool,
    started: Option<Timestamp>,
    finished: Option<Timestamp>,
    /// Frames of its log.
    log: Vec<u8>,
}

#[derive(Default)]
pub struct Inside {
    pub containers: BTreeMap<String, Kept>,
    /// Images by their name, with their configuration.
    images: HashMap<String, Value>,
    /// What a registry says about images, in turn; nothing is that they are there.
    registry: HashMap<String, VecDeque<&'static str>>,
    calls: Vec<String>,
    faults: HashMap<String, VecDeque<(u16, &'static str)>>,
    /// What it warns of when a container is made.
    pub warnings: Vec<&'static str>,
    /// Streams that began under an earlier number break.
    epoch: u64,
    made: u64,
}

#[derive(Clone)]
struct Shared {
    inside: Arc<Mutex<Inside>>,
    changed: Arc<watch::Sender<()>>,
}

pub struct FakeEngine {
    pub socket: PathBuf,
    shared: Shared,
    task: JoinHandle<()>,
}

impl FakeEngine {
    /// One with the image `agent:1`.
    pub fn start(folder: &FilePath) -> Self {
        let shared = Shared { inside: Arc::default(), changed: Arc::new(watch::Sender::new(())) };
        let socket = folder.join("engine.sock");
        let engine = Self { task: serve(&socket, shared.clone()), socket, shared };
        engine.has_image("agent:1", json!({"Entrypoint": ["/entry"], "Cmd": ["agent", "--all"]}));
        engine
    }

    /// Nobody listens any more, and what was being streamed breaks off.
    pub fn goes_away(&self) {
        self.task.abort();
        std::fs::remove_file(&self.socket).unwrap();
        self.shared.change(|inside| inside.epoch += 1);
    }

    pub fn comes_back(&mut self) {
        self.task = serve(&self.socket, self.shared.clone());
    }

    pub fn inside<T>(&self, look: impl FnOnce(&mut Inside) -> T) -> T {
        look(&mut self.shared.inside.lock().unwrap())
    }

    pub fn has_image(&self, name: &str, config: Value) {
        self.inside(|inside| inside.images.insert(name.to_owned(), config));
    }

    /// What the registry answers the next times that this image is asked for.
    pub fn registry_says(&self, image: &str, words: &[&'static str]) {
        self.inside(|inside| inside.registry.insert(image.to_owned(), words.iter().copied().collect()));
    }

    /// The next request of this name, such as `start agl-rollout-r0`, is answered with this status.
    pub fn fail(&self, call: &str, code: u16, message: &'static str, times: usize) {
        self.inside(|inside| {
            let faults = inside.faults.entry(call.to_owned()).or_default();
            faults.extend(std::iter::repeat_n((code, message), times));
        });
    }

    pub fn calls(&self) -> Vec<String> {
        self.inside(|inside| inside.calls.clone())
    }

    pub fn names(&self) -> Vec<String> {
        self.inside(|inside| inside.containers.keys().cloned().collect())
    }

    pub fn container(&self, name: &str) -> Option<Kept> {
        self.inside(|inside| inside.containers.get(name).cloned())
    }

    /// The program of a container exits.
    pub fn exits(&self, name: &str, code: i32) {
        self.shared.change(|inside| inside.end(name, code));
    }

    /// The kernel ends it for its memory.
    pub fn runs_out_of_memory(&self, name: &str) {
        self.shared.change(|inside| {
            inside.containers.get_mut(name).unwrap().oom_killed = true;
            inside.end(name, 137);
        });
    }

    pub fn says(&self, name: &str, stdout: &str, stderr: &str) {
        self.shared.change(|inside| {
            let log = &mut inside.containers.get_mut(name).unwrap().log;
            for (stream, text) in [(1, stdout), (2, stderr)] {
                log.extend([stream, 0, 0, 0]);
                log.extend(u32::try_from(text.len()).unwrap().to_be_bytes());
                log.extend(text.as_bytes());
            }
        });
    }

    /// It began earlier than it did.
    pub fn began_earlier(&self, name: &str, by: Duration) {
        self.shared.change(|inside| {
            let container = inside.containers.get_mut(name).unwrap();
            container.started = Some(container.started.unwrap() - by);
        });
    }

    /// Somebody removes it.
    pub fn vanishes(&self, name: &str) {
        self.shared.change(|inside| inside.containers.remove(name));
    }

    pub fn puts(&self, name: &str, container: Kept) {
        self.shared.change(|inside| inside.containers.insert(name.to_owned(), container));
    }

    pub async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let waited = tokio::time::timeout(Duration::from_secs(30), async {
            while !condition(self) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        assert!(waited.await.is_ok(), "waited in vain until {what}; calls so far: {:#?}", self.calls());
    }

    /// Waits until a container runs.
    pub async fn runs(&self, name: &str) {
        let runs = |it: &Self| it.container(name).is_some_and(|container| container.status == "running");
        self.until(&format!("{name} runs"), runs).await;
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Kept {
    /// One variable of its environment.
    pub fn env(&self, name: &str) -> Option<String> {
        let all = self.body["Env"].as_array().unwrap().iter().filter_map(Value::as_str);
        all.filter_map(|line| line.split_once('=')).find(|(known, _)| *known == name).map(|(_, value)| value.to_owned())
    }

    /// What of the host it sees at a place.
    pub fn mount(&self, target: &str) -> Option<(String, bool)> {
        let mounts = self.body["HostConfig"]["Mounts"].as_array().unwrap();
        let mount = mounts.iter().find(|mount| mount["Target"] == target)?;
        assert_eq!(mount["Type"], "bind");
        Some((mount["Source"].as_str().unwrap().to_owned(), mount["ReadOnly"].as_bool().unwrap()))
    }

    fn state(&self) -> Value {
        let time = |time: Option<Timestamp>| time.map_or("0001-01-01T00:00:00Z".to_owned(), |time| time.to_string());
        json!({
            "Status": self.status, "Running": self.status == "running", "ExitCode": self.code,
            "OOMKilled": self.oom_killed, "StartedAt": time(self.started), "FinishedAt": time(self.finished),
        })
    }
}

impl Inside {
    fn end(&mut self, name: &str, code: i32) {
        let container = self.containers.get_mut(name).unwrap();
        (container.status, container.code, container.finished) = ("exited", code, Some(Timestamp::now()));
    }

    pub fn forget_faults(&mut self) {
        self.faults.clear();
    }

    fn fault(&mut self, call: &str) -> Option<Response> {
        let (code, message) = self.faults.get_mut(call)?.pop_front()?;
        Some(refuse(code, message))
    }
}

impl Shared {
    fn change<T>(&self, change: impl FnOnce(&mut Inside) -> T) -> T {
        let result = change(&mut self.inside.lock().unwrap());
        self.changed.send_replace(());
        result
    }

    /// Notes a request, and does it unless it is to fail or there is no such container.
    fn act(&self, word: &str, name: &str, act: impl FnOnce(&mut Inside) -> u16) -> Response {
        self.change(|inside| {
            let call = format!("{word} {name}");
            if let Some(fault) = inside.fault(&call) {
                return fault;
            }
            if !inside.containers.contains_key(name) {
                return refuse(404, &format!("No such container: {name}"));
            }
            inside.calls.push(call);
            StatusCode::from_u16(act(inside)).unwrap().into_response()
        })
    }
}

fn serve(socket: &FilePath, shared: Shared) -> JoinHandle<()> {
    let router = Router::new()
        .route("/version", get(async || Json(json!({"ApiVersion": "1.41"}))))
        .route("/images/create", post(pull))
        .route("/images/{*name}", get(image))
        .route("/containers/json", get(list))
        .route("/containers/create", post(create))
        .route("/containers/{name}", delete(remove))
        .route("/containers/{name}/json", get(inspect))
        .route("/containers/{name}/start", post(start))
        .route("/containers/{name}/stop", post(stop))
        .route("/containers/{name}/wait", post(wait))
        .route("/containers/{name}/logs", get(logs))
        .with_state(shared);
    let listener = UnixListener::bind(socket).unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() })
}

fn refuse(code: u16, message: &str) -> Response {
    (StatusCode::from_u16(code).unwrap(), Json(json!({"message": message}))).into_response()
}

type Asked = Query<HashMap<String, String>>;

async fn image(State(shared): State<Shared>, Path(name): Path<String>) -> Response {
    let name = name.strip_suffix("/json").unwrap().to_owned();
    let inside = shared.inside.lock().unwrap();
    let id = |name: &str| format!("sha256:{name}");
    match inside.images.iter().find(|(known, _)| **known == name || id(known) == name) {
        Some((known, config)) => Json(json!({"Id": id(known), "Config": config})).into_response(),
        None => refuse(404, &format!("No such image: {name}")),
    }
}

/// A stream of lines; an error is one of them.
async fn pull(State(shared): State<Shared>, Query(query): Asked) -> Response {
    let name = query["fromImage"].clone();
    shared.change(|inside| {
        inside.calls.push(format!("pull {name}"));
        let said = inside.registry.get_mut(&name).and_then(VecDeque::pop_front);
        let mut lines = json!({"status": format!("Pulling {name}")}).to_string() + "\r\n";
        match said {
            Some(said) => lines += &(json!({"errorDetail": {"message": said}, "error": said}).to_string() + "\r\n"),
            None => drop(inside.images.insert(name, json!({"Cmd": ["pulled"]}))),
        }
        lines.into_response()
    })
}

async fn create(State(shared): State<Shared>, Query(query): Asked, Json(body): Json<Value>) -> Response {
    let name = query["name"].clone();
    shared.change(|inside| {
        if let Some(fault) = inside.fault(&format!("create {name}")) {
            return fault;
        }
        if inside.containers.contains_key(&name) {
            return refuse(409, &format!("Conflict. The container name \"/{name}\" is already in use"));
        }
        inside.calls.push(format!("create {name}"));
        inside.made += 1;
        let id = format!("id{}", inside.made);
        let answer = json!({"Id": id, "Warnings": inside.warnings});
        let container = Kept {
            body,
            id,
            status: "created",
            code: 0,
            oom_killed: false,
            started: None,
            finished: None,
            log: Vec::new(),
        };
        inside.containers.insert(name, container);
        (StatusCode::CREATED, Json(answer)).into_response()
    })
}

async fn list(State(shared): State<Shared>, Query(query): Asked) -> Json<Value> {
    let filters: Value = serde_json::from_str(&query["filters"]).unwrap();
    let wanted: Vec<&str> = filters["label"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let inside = shared.inside.lock().unwrap();
    let fits = |container: &Kept| {
        wanted.iter().all(|label| {
            let (name, value) = label.split_once('=').unwrap();
            container.body["Labels"][name] == value
        })
    };
    let found = inside.containers.iter().filter(|(_, container)| fits(container));
    let shown = |(name, it): (&String, &Kept)| json!({"Names": [format!("/{name}")], "Labels": it.body["Labels"], "State": it.status});
    Json(found.map(shown).collect())
}

async fn inspect(State(shared): State<Shared>, Path(name): Path<String>) -> Response {
    let inside = shared.inside.lock().unwrap();
    let Some(container) = inside.containers.get(&name) else {
        return refuse(404, &format!("No such container: {name}"));
    };
    let image = format!("sha256:{}", container.body["Image"].as_str().unwrap());
    let config = json!({"Labels": container.body["Labels"]});
    Json(json!({"Id": container.id, "Image": image, "Config": config, "State": container.state()})).into_response()
}

async fn start(State(shared): State<Shared>, Path(name): Path<String>) -> Response {
    shared.act("start", &name, |inside| {
        let container = inside.containers.get_mut(&name).unwrap();
        (container.status, container.started) = ("running", Some(Timestamp::now()));
        204
    })
}

async fn stop(State(shared): State<Shared>, Path(name): Path<String>) -> Response {
    shared.act("stop", &name, |inside| {
        if inside.containers[&name].status != "running" {
            return 304;
        }
        inside.end(&name, 143);
        204
    })
}

async fn remove(State(shared): State<Shared>, Path(name): Path<String>) -> Response {
    shared.act("remove", &name, |inside| {
        inside.containers.remove(&name);
        204
    })
}

/// Says nothing until the container has ended.
async fn wait(State(shared): State<Shared>, Path(name): Path<String>) -> Response {
    follow(shared, name, |container| match container.status {
        "running" => (String::new(), false),
        _ => (json!({"StatusCode": container.code}).to_string() + "\n", true),
    })
}

async fn logs(State(shared): State<Shared>, Path(name): Path<String>) -> Response {
    let mut told = 0;
    follow(shared, name, move |container| {
        let news = container.log[told..].to_vec();
        told = container.log.len();
        (news, container.status != "running")
    })
}

/// Streams what `look` tells, until it says that this was all, the container is gone or the engine goes away.
fn follow<T: Into<Vec<u8>>>(
    shared: Shared,
    name: String,
    look: impl FnMut(&Kept) -> (T, bool) + Send + 'static,
) -> Response {
    let epoch = shared.inside.lock().unwrap().epoch;
    let changed = shared.changed.subscribe();
    let stream = futures_util::stream::unfold(Some((shared, changed, look)), move |state| {
        let name = name.clone();
        async move {
            let (shared, mut changed, mut look) = state?;
            loop {
                let (news, is_all) = {
                    let inside = shared.inside.lock().unwrap();
                    if inside.epoch != epoch {
                        return Some((Err(std::io::Error::other("the engine goes away")), None));
                    }
                    inside.containers.get(&name).map_or((Vec::new(), true), |it| {
                        let (news, is_all) = look(it);
                        (news.into(), is_all)
                    })
                };
                match (news.is_empty(), is_all) {
                    (true, true) => return None,
                    (false, true) => return Some((Ok(news), None)),
                    (false, false) => return Some((Ok(news), Some((shared, changed, look)))),
                    (true, false) => changed.changed().await.ok()?,
                }
            }
        }
    });
    Body::from_stream(stream).into_response()
}
