//! What a person does to rollouts from the command line: look ahead, follow, repeat, end.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Running, agl, eventually, free_port, get, http};

const LIMIT: Duration = Duration::from_secs(60);

/// A gateway, and a run file for a controller of it.
struct Stage {
    folder: tempfile::TempDir,
    url: String,
    _gateway: Running,
}

impl Stage {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("http://127.0.0.1:{}", free_port());
        let text = format!(
            "[gateway]\nlisten = {:?}\nstore = \"memory\"\n[controller]\nwork_dir = \"controller\"\nkill_grace_seconds = 1.0\n",
            url.trim_start_matches("http://")
        );
        std::fs::write(folder.path().join("run.toml"), text).unwrap();
        let gateway = Running::start(agl().arg("serve").arg(run_file(folder.path())), "serve", folder.path());
        eventually("the gateway is up", LIMIT, || get(&format!("{url}/healthz")).is_some());
        Self { folder, url, _gateway: gateway }
    }

    fn create(&self, id: &str, config: Value) {
        let rollouts = json!([{"rollout_id": id, "input": {}, "config": config}]);
        assert_eq!(http("POST", &format!("{}/api/rollouts", self.url), "", Some(&rollouts)).unwrap().0, 201);
    }

    fn state(&self, id: &str) -> String {
        let rollout = get(&format!("{}/api/rollouts/{id}", self.url)).unwrap();
        rollout["rollout"]["status"]["state"].as_str().unwrap().to_owned()
    }

    fn control(&self) -> Running {
        Running::start(agl().arg("control").arg(run_file(self.folder.path())), "control", self.folder.path())
    }

    fn run(&self, arguments: &[&str]) -> String {
        let output = agl().args(arguments).env("AGL_GATEWAY", &self.url).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
        text
    }
}

fn run_file(folder: &Path) -> std::path::PathBuf {
    folder.join("run.toml")
}

fn sh(script: &str) -> Value {
    json!({"process": {"argv": ["sh", "-c", script]}})
}

#[test]
fn a_dry_run_says_what_a_controller_would_do_and_does_nothing() {
    let stage = Stage::start();
    stage.create("good", sh("exit 0"));
    stage.create("misspelt", json!({"process": {"argv": ["echo", "{{ input.qestion }}"]}}));
    stage.create("elsewhere", json!({"k8s": {"job_template": "kind: Job"}}));
    let path = run_file(stage.folder.path());
    let said = stage.run(&["control", path.to_str().unwrap(), "--dry-run"]);
    let line = |id: &str| said.lines().find(|line| line.contains(id)).unwrap_or_else(|| panic!("{id} in {said}"));
    assert!(line("good").starts_with("start") && line("good").contains("exit 0"), "{said}");
    assert!(line("misspelt").starts_with("fail") && line("misspelt").contains("input.qestion"), "{said}");
    assert!(line("elsewhere").starts_with("leave"), "{said}");
    let planned: Value =
        serde_json::from_str(&stage.run(&["control", path.to_str().unwrap(), "--dry-run", "--json"])).unwrap();
    assert_eq!(planned[0]["action"], "start");
    assert_eq!(planned[0]["what"]["agent"]["env"]["AGL_KEY"], "<key>");
    assert_eq!(stage.state("good"), "queuing");
    assert!(!stage.folder.path().join("controller").exists(), "nothing was made");

    // Also beside a controller that runs.
    let _controller = stage.control();
    eventually("the good one ends", LIMIT, || stage.state("good") == "succeeded");
    assert!(!stage.run(&["control", path.to_str().unwrap(), "--dry-run"]).contains("good"));
}

#[test]
fn tail_follows_a_rollout_until_it_ends_and_tells_of_one_that_has() {
    let stage = Stage::start();
    stage.create("r", sh("while ! test -e go; do sleep 0.05; done; exit 3"));
    let log = stage.folder.path().to_owned();
    let mut tail = agl();
    tail.args(["rollouts", "tail", "r"]).env("AGL_GATEWAY", &stage.url);
    let mut tail = Running::start(&mut tail, "tail", &log);
    let _controller = stage.control();
    eventually("it is seen to run", LIMIT, || tail.output().contains("running"));
    assert!(!tail.has_ended());
    let work = stage.folder.path().join("controller/rollouts/r/0/work");
    eventually("its folder is there", LIMIT, || work.is_dir());
    std::fs::write(work.join("go"), "").unwrap();
    tail.succeed(LIMIT);
    let last = tail.output().lines().last().unwrap().to_owned();
    assert!(last.contains("failed") && last.contains("exited with code 3"), "{last}");
    let again = stage.run(&["rollouts", "tail", "r", "--json"]);
    let change: Value = serde_json::from_str(&again).unwrap();
    assert_eq!(change["rollout"]["status"]["state"], "failed");
}

#[test]
fn retry_makes_another_attempt_of_one_that_runs_and_cancel_ends_it() {
    let stage = Stage::start();
    let _controller = stage.control();
    stage.create("r", sh("sleep 1000"));
    let attempts = || get(&format!("{}/api/rollouts/r/attempts", stage.url)).unwrap().as_array().unwrap().clone();
    let runs = |number: usize| attempts().get(number).is_some_and(|attempt| attempt["state"] == "running");
    eventually("the first attempt runs", LIMIT, || runs(0));
    assert_eq!(stage.run(&["rollouts", "retry", "r"]).trim(), "r");
    eventually("the second attempt runs", LIMIT, || runs(1));
    assert_eq!((&attempts()[0]["state"], &attempts()[0]["failure"]), (&json!("failed"), &json!("cancelled")));
    stage.run(&["rollouts", "cancel", "r"]);
    eventually("it has ended", LIMIT, || attempts()[1]["failure"] == "cancelled");
    assert_eq!(stage.state("r"), "failed");
    let new = stage.run(&["rollouts", "retry", "r"]);
    assert_ne!(new.trim(), "r");
}
