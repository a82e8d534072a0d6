//! `kill -9` of each part in the middle of a run, with at least eight model calls in flight. The run goes on; no acknowledged
//! event is missing; no rollout is trained twice in the lineage of the final weights.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::support::{Running, agl, babbling_policy, eventually, free_port, get, pause, python, questions, test_agent};
use serde_json::Value;

const STEPS: u64 = 3;
const GROUPS: usize = 4;
const SIBLINGS: usize = 4;
const IN_FLIGHT: u64 = 8;
const LONG: Duration = Duration::from_secs(120);

/// A run in three processes on the sqlite store.
struct Run {
    folder: tempfile::TempDir,
    port: u16,
    gateway: Running,
    controller: Running,
    trainer: Running,
}

impl Run {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let policy = babbling_policy(path);
        let questions = questions(path, 64);
        fs::create_dir(path.join("acknowledged")).unwrap();
        let port = free_port();
        let text = format!(
            r#"
            [gateway]
            listen = "127.0.0.1:{port}"
            [controller]
            max_concurrent = 16
            [model]
            path = {policy:?}
            [data]
            train_files = [{questions:?}]
            train_batch_size = {GROUPS}
            [rollout]
            n = {SIBLINGS}
            timeout_seconds = 200
            [rollout.process]
            argv = [{python:?}, "-S", "-E", {agent:?}, "{{{{ input.question }}}}"]
            [rollout.process.env]
            ACKNOWLEDGED = {acknowledged:?}
            [trainer]
            default_local_dir = "run"
            total_training_steps = {STEPS}
            save_freq = 1
            "#,
            python = python(),
            agent = test_agent("acknowledging.py"),
            acknowledged = path.join("acknowledged"),
        );
        fs::write(path.join("run.toml"), text).unwrap();
        let gateway = part("serve", path, &[]);
        let controller = part("control", path, &[]);
        let trainer = part("train", path, &[]);
        Self { port, gateway, controller, trainer, folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}/{path}", self.port)
    }

    /// Waits for the middle of the run: the first checkpoint is written, and calls are at the server.
    fn wait_for_calls_in_flight(&mut self) {
        let first = self.path().join("run/checkpoints/step-000001/state.json");
        self.wait_until("a first checkpoint is written", |_| first.exists());
        self.wait_until("eight calls are in flight", |run| {
            get(&run.url("proxy/state")).is_some_and(|state| state["inflight"].as_u64() >= Some(IN_FLIGHT))
        });
    }

    fn wait_until(&mut self, what: &str, mut check: impl FnMut(&Self) -> bool) {
        let deadline = Instant::now() + LONG;
        while !check(self) {
            let ended =
                [&mut self.gateway, &mut self.controller, &mut self.trainer].into_iter().any(Running::has_ended);
            if ended || Instant::now() > deadline {
                let outputs = [&self.gateway, &self.controller, &self.trainer].map(Running::output).join("\n--\n");
                panic!("{}: {what}\n{outputs}", if ended { "a part ended before" } else { "not in time" });
            }
            pause(5);
        }
    }

    fn finish(mut self) {
        self.trainer.succeed(LONG);
        let run = self.path().join("run");
        let trained = lineage(&run);
        assert_eq!(trained.len(), STEPS as usize * GROUPS * SIBLINGS);
        self.assert_every_acknowledged_call_is_stored();
        for rollout in &trained {
            let found = get(&self.url(&format!("api/rollouts/{rollout}"))).unwrap();
            assert!(
                found["rollout"]["consumed"]["step"].is_u64(),
                "{rollout} was trained on but is not marked consumed"
            );
        }
        assert!(self.controller.terminate().success(), "{}", self.controller.output());
        assert!(self.gateway.terminate().success(), "{}", self.gateway.output());
    }

    fn assert_every_acknowledged_call_is_stored(&self) {
        let mut acknowledged = 0;
        for entry in fs::read_dir(self.path().join("acknowledged")).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let (rollout, attempt) = name.rsplit_once('.').unwrap();
            let url = self.url(&format!("api/rollouts/{rollout}/sequences?level=transition&attempt_id={attempt}"));
            let stored: HashSet<String> = get(&url).unwrap_or_else(|| panic!("{rollout} is gone"))["sequences"]
                .as_array()
                .unwrap()
                .iter()
                .flat_map(|row| row["calls"].as_array().unwrap())
                .map(|call| call["call_id"].as_str().unwrap().to_owned())
                .collect();
            for call in fs::read_to_string(&path).unwrap().lines() {
                acknowledged += 1;
                assert!(stored.contains(call), "{rollout} attempt {attempt}: the acknowledged call {call} is lost");
            }
        }
        assert!(acknowledged >= STEPS as usize * GROUPS * SIBLINGS * 3, "only {acknowledged} calls were acknowledged");
    }
}

fn part(command: &str, folder: &Path, more: &[&str]) -> Running {
    Running::start(agl().arg(command).arg(folder.join("run.toml")).args(["--log", "info"]).args(more), command, folder)
}

/// The rollouts that the final weights were trained on, checkpoint by checkpoint back to the first.
fn lineage(run: &Path) -> HashSet<String> {
    let mut trained = HashSet::new();
    let mut step = Some(STEPS);
    while let Some(current) = step {
        let path: PathBuf = run.join(format!("checkpoints/step-{current:06}/state.json"));
        let state: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        for rollout in state["consumed"].as_array().unwrap() {
            let rollout = rollout.as_str().unwrap().to_owned();
            assert!(trained.insert(rollout.clone()), "{rollout} was trained twice");
        }
        step = state["parent"].as_u64();
    }
    trained
}

#[test]
fn the_gateway_killed_in_the_middle_of_a_run_loses_nothing() {
    let mut run = Run::start();
    run.wait_for_calls_in_flight();
    run.gateway.kill();
    pause(500);
    run.gateway = part("serve", run.folder.path(), &[]);
    run.finish();
}

#[test]
fn the_controller_killed_in_the_middle_of_a_run_is_replaced() {
    let mut run = Run::start();
    run.wait_for_calls_in_flight();
    run.controller.kill();
    pause(500);
    run.controller = part("control", run.folder.path(), &[]);
    run.finish();
}

#[test]
fn the_trainer_killed_in_the_middle_of_a_run_resumes_from_its_checkpoint() {
    let mut run = Run::start();
    run.wait_for_calls_in_flight();
    run.trainer.kill();
    run.trainer = part("train", run.folder.path(), &["--resume"]);
    run.finish();
}

#[test]
fn a_killed_quickstart_goes_on_with_resume() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let quickstart = |more: &[&str]| {
        let mut command = agl();
        command.args(["quickstart", "--log", "info", "--out"]).arg(&out).args(more);
        Running::start(&mut command, "quickstart", folder.path())
    };
    let small = [
        "--steps",
        "3",
        "--set",
        "trainer.save_freq=1",
        "--set",
        "data.train_batch_size=4",
        "--set",
        "rollout.n=4",
        "--set",
        "data.val_batch_size=8",
    ];
    let mut first = quickstart(&small);
    eventually("a first checkpoint", LONG, || {
        assert!(!first.has_ended(), "{}", first.output());
        out.join("checkpoints/step-000001/state.json").exists()
    });
    first.kill();
    assert!(!out.join("summary.json").exists(), "the run was to be killed in its middle");
    let mut second = quickstart(&["--resume"]);
    second.succeed(LONG);
    assert_eq!(lineage(&out).len(), 3 * 4 * 4);
    let steps: Vec<u64> = fs::read_to_string(out.join("metrics.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|line| line.get("reward/mean").is_some())
        .map(|line| line["step"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, [1, 2, 3]);
}
