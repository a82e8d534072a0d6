//! The controller against a real API server, with its Job controller; a kubelet that runs pods as processes is played.
//!
//! `AGL_TEST_KUBECONFIG` names the API server; `./x test` starts one. Without it these tests say that they are skipped.

mod chaos;
mod cluster;
mod rate;

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use self::cluster::Cluster;
use crate::support::{Running, agl, eventually, free_port, get, http, python, questions, recipe};

const LONG: Duration = Duration::from_secs(120);

/// Gateway and controller of a cluster, each a process.
struct Stage {
    cluster: Cluster,
    folder: tempfile::TempDir,
    url: String,
    _gateway: Running,
    controller: Running,
}

impl Stage {
    /// `None`, having said so, where there is no cluster. `more` are lines of `[controller.kubernetes]`.
    fn start(more: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let cluster = Cluster::shared(folder.path())?;
        let url = format!("http://127.0.0.1:{}", free_port());
        fs::write(folder.path().join("run.toml"), run_file(&cluster, &url, more)).unwrap();
        let gateway = part("serve", folder.path());
        let controller = part("control", folder.path());
        eventually("the gateway is up", LONG, || get(&format!("{url}/healthz")).is_some());
        Some(Self { cluster, folder, url, _gateway: gateway, controller })
    }

    fn create(&self, id: &str, script: &str, config: Value) {
        let mut whole = json!({"k8s": {"job_template": template(&["sh", "-c", script])}, "timeout_seconds": 60});
        whole.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        let rollouts = json!([{"rollout_id": id, "input": {"question": "2+2?"}, "config": whole}]);
        let (status, answer) = http("POST", &format!("{}/api/rollouts", self.url), "", Some(&rollouts)).unwrap();
        assert_eq!(status, 201, "{answer}");
    }

    fn rollout(&self, id: &str) -> Value {
        get(&format!("{}/api/rollouts/{id}", self.url)).unwrap()["rollout"].clone()
    }

    fn attempts(&self, id: &str) -> Vec<Value> {
        get(&format!("{}/api/rollouts/{id}/attempts", self.url)).unwrap().as_array().unwrap().clone()
    }

    fn ended(&self, id: &str) -> Value {
        let mut rollout = Value::Null;
        eventually(&format!("{id} ends\n{}", self.controller.output()), LONG, || {
            rollout = self.rollout(id);
            matches!(rollout["status"]["state"].as_str(), Some("succeeded" | "failed"))
        });
        rollout
    }
}

fn run_file(cluster: &Cluster, url: &str, more: &str) -> String {
    format!(
        r#"
        [gateway]
        listen = "{}"
        store = "sqlite:gateway.db"
        [controller]
        runner = "kubernetes"
        max_attempts = 2
        retry_backoff_seconds = 0.1
        work_dir = "controller"
        [controller.kubernetes]
        namespace = "{}"
        kubeconfig = {:?}
        {more}
        "#,
        url.trim_start_matches("http://"),
        cluster.namespace,
        cluster.kubeconfig,
    )
}

fn part(command: &str, folder: &Path) -> Running {
    Running::start(agl().arg(command).arg(folder.join("run.toml")).args(["--log", "info"]), command, folder)
}

/// A Job that runs these words; they may hold templates.
fn template(words: &[&str]) -> String {
    let words: Vec<String> = words.iter().map(|word| Value::from(*word).to_string()).collect();
    format!(
        "apiVersion: batch/v1\nkind: Job\nspec:\n  template:\n    spec:\n      containers:\n        - name: agent\n          \
         image: \"{{{{ metadata.image | default('agent') }}}}\"\n          command: [{}]\n",
        words.join(", ")
    )
}

#[test]
fn a_whole_training_run_of_the_calculator_passes_through_a_cluster() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let Some(cluster) = Cluster::shared(path) else { return };
    let questions = questions(path, 8);
    let agent = recipe().join("agent.py");
    let question = "{{ input.question | yaml_escape }}";
    let job = template(&[&python(), "-S", "-E", agent.to_str().unwrap(), "QUESTION"]).replace("\"QUESTION\"", question);
    fs::write(path.join("job.yaml"), job).unwrap();
    let url = format!("http://127.0.0.1:{}", free_port());
    let text = run_file(&cluster, &url, "")
        + &format!(
            r#"
        [model]
        path = {policy:?}
        [data]
        train_files = [{questions:?}]
        train_batch_size = 2
        [rollout]
        n = 4
        timeout_seconds = 100
        reward_source = "evaluator"
        [rollout.k8s]
        job_template_path = "job.yaml"
        [rollout.evaluator]
        argv = [{python:?}, "-S", "-E", {evaluator:?}]
        [trainer]
        default_local_dir = "run"
        total_training_steps = 2
        "#,
            policy = recipe().join("policy"),
            python = python(),
            evaluator = recipe().join("evaluator.py"),
        );
    fs::write(path.join("run.toml"), text).unwrap();
    part("up", path).succeed(LONG);
    let summary: Value = serde_json::from_str(&fs::read_to_string(path.join("run/summary.json")).unwrap()).unwrap();
    assert_eq!(summary["steps"], 2, "{summary}");
    let rollouts = summary["rollouts"].as_u64().unwrap();
    assert!(rollouts >= 16, "{summary}");
    assert!(summary["model_calls"].as_u64().unwrap() >= 16, "{summary}");
    let ran = cluster.ledger();
    assert!(ran.len() as u64 >= rollouts, "{} processes for {rollouts} rollouts", ran.len());
    let metrics = fs::read_to_string(path.join("run/metrics.jsonl")).unwrap();
    assert!(metrics.lines().count() >= 2, "{metrics}");
}

#[test]
fn what_becomes_of_a_pod_is_read_from_a_real_cluster() {
    let Some(stage) = Stage::start("image_pull_grace_seconds = 0.5") else { return };
    stage.create("good", "exit 0", json!({}));
    stage.create("bad", "echo the reason; exit 3", json!({}));
    stage.create("slow", "sleep 1000", json!({"timeout_seconds": 2}));
    stage.create("vanishing", "test -e /tmp/none; sleep 1000", json!({"max_attempts": 1}));
    let image = json!([{
        "rollout_id": "imageless", "input": {}, "metadata": {"image": "missing:1"},
        "config": {"k8s": {"job_template": template(&["true"])}, "max_attempts": 2},
    }]);
    http("POST", &format!("{}/api/rollouts", stage.url), "", Some(&image)).unwrap();

    eventually("the vanishing one runs", LONG, || stage.cluster.runs("vanishing"));
    stage.cluster.delete_job("agl-rollout-vanishing");
    for (id, state, class, attempts, said) in [
        ("good", "succeeded", Value::Null, 1, ""),
        ("bad", "failed", json!("agent"), 1, "the reason"),
        ("slow", "failed", json!("timeout"), 1, "timeout_seconds = 2"),
        ("vanishing", "failed", json!("infrastructure"), 1, "its Job was deleted"),
        ("imageless", "failed", json!("infrastructure"), 2, "ImagePullBackOff"),
    ] {
        let rollout = stage.ended(id);
        assert_eq!(rollout["status"]["state"], state, "{id}: {rollout}");
        let made = stage.attempts(id);
        assert_eq!((made.len(), &made[0]["failure"]), (attempts, &class), "{id}: {made:?}");
        let message = rollout["status"]["error_message"].as_str().unwrap_or_default();
        assert!(message.contains(said), "{id}: {message}");
    }
    assert!(!stage.cluster.overlaps(), "an attempt ran while another of the same rollout did");
}

#[test]
fn the_key_of_a_pod_is_not_in_its_job_and_ends_with_it() {
    let Some(stage) = Stage::start("") else { return };
    stage.create("r", "echo $AGL_KEY; sleep 1000", json!({}));
    eventually("it runs", LONG, || stage.attempts("r").first().is_some_and(|attempt| attempt["state"] == "running"));
    let job = stage.cluster.job("agl-rollout-r").unwrap();
    let log = stage.cluster.log("agl-rollout-r");
    let key = log.trim();
    assert!(key.starts_with("agl-agent-"), "{log:?}");
    assert!(!job.to_string().contains(key), "the key can be read in the Job");
    let pod = stage.cluster.pod("agl-rollout-r").unwrap();
    assert!(!pod.to_string().contains(key), "the key can be read in the pod");

    let event = json!({"event_type": "note", "data": {}});
    let events = format!("{}/api/rollouts/r/attempt/0/events", stage.url);
    assert_eq!(http("POST", &events, key, Some(&event)).unwrap().0, 200);
    http("POST", &format!("{}/api/rollouts/r/cancel", stage.url), "", Some(&json!({}))).unwrap();
    eventually("the attempt has ended", LONG, || stage.attempts("r")[0]["state"] == "failed");
    let (status, answer) = http("POST", &events, key, Some(&event)).unwrap();
    assert!(status == 401 || status == 403, "{status} {answer}");
    eventually("the Job is gone", LONG, || stage.cluster.job("agl-rollout-r").is_none());
}
