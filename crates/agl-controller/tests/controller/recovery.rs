//! A controller that was killed, and the one that comes after it.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use agl_controller::supervisor::record::Spec;
use agl_core::attempt::{AttemptState, FailureClass};
use agl_core::rollout::RolloutState;
use serde_json::{Value, json};

use crate::stage::{PROGRAM, Stage, is_running, pid_in, read, sh, with};

/// A controller as a process of its own, so that it can be killed.
pub struct Process(Child);

impl Process {
    pub fn start(stage: &Stage, settings: &Value) -> Self {
        let path = stage.folder.path().join("controller.json");
        std::fs::write(&path, stage.config(settings).to_string()).unwrap();
        let child = Command::new(PROGRAM)
            .args(["run", "--gateway", &stage.gateway.url, "--config"])
            .arg(path)
            .env("AGL_GATEWAY_KEY", "server-key")
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        Self(child)
    }

    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const UNTIL_GO: &str = "echo $$ > pid; env > environment; until test -e go; do sleep 0.02; done; echo done";

#[tokio::test]
async fn an_agent_outlives_a_killed_controller_and_the_next_one_reports_it() {
    let stage = Stage::empty().await;
    let mut first = Process::start(&stage, &json!({}));
    let id = stage.gateway.create(sh(UNTIL_GO));
    let work = stage.attempt(&id, "0").work();
    let pid = pid_in(&work.join("pid")).await;
    stage.gateway.until("it is reported", |gateway| gateway.calls().len() == 3).await;
    first.kill();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(is_running(pid));
    assert!(!read(work.join("environment")).contains("server-key"));
    let _second = Process::start(&stage, &json!({}));
    // Not only after its end: it is watched while it runs.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(is_running(pid));
    std::fs::write(work.join("go"), "").unwrap();
    let rollout = stage.gateway.ended(&id).await;
    assert_eq!(rollout.status.state, RolloutState::Succeeded);
    assert_eq!(stage.gateway.attempts(&id).len(), 1);
    assert_eq!(read(stage.attempt(&id, "0").stdout()), "done\n");
}

#[tokio::test]
async fn an_agent_that_ended_while_no_controller_ran_is_reported_by_the_next_with_its_evaluation() {
    let stage = Stage::empty().await;
    let mut first = Process::start(&stage, &json!({}));
    let evaluator = json!({"evaluator": {"argv": ["sh", "-c", "echo judged $AGL_EXIT_CODE; touch ../judged"]}});
    let id = stage.gateway.create(with(sh(&format!("{UNTIL_GO}; exit 5")), evaluator));
    let dir = stage.attempt(&id, "0");
    pid_in(&dir.work().join("pid")).await;
    first.kill();
    std::fs::write(dir.work().join("go"), "").unwrap();
    let exit = dir.path().join("exit.json");
    stage.gateway.until("the record is written", |_| exit.exists()).await;
    assert_eq!(read(dir.evaluator_stdout()), "judged 5\n");
    let _second = Process::start(&stage, &json!({}));
    assert_eq!(stage.gateway.ended(&id).await.status.state, RolloutState::Failed);
    let attempt = &stage.gateway.attempts(&id)[0];
    assert_eq!((attempt.failure, attempt.exit_code), (Some(FailureClass::Agent), Some(5)));
}

#[tokio::test]
async fn an_attempt_whose_supervisor_died_too_is_lost_and_made_anew_and_nothing_of_it_runs_on() {
    let stage = Stage::empty().await;
    let mut first = Process::start(&stage, &json!({}));
    let id = stage.gateway.create(sh("test $(basename $(dirname $PWD)) = 1 || { echo $$ > pid; sleep 600; }"));
    let pid = pid_in(&stage.attempt(&id, "0").work().join("pid")).await;
    stage.gateway.until("it is reported", |gateway| gateway.calls().len() == 3).await;
    first.kill();
    let supervisor = i32::try_from(stage.gateway.attempts(&id)[0].runner["supervisor_pid"].as_i64().unwrap()).unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(supervisor), nix::sys::signal::Signal::SIGKILL).unwrap();
    stage.gateway.until("the supervisor is gone", |_| !is_running(supervisor)).await;
    let _second = Process::start(&stage, &json!({}));
    let rollout = stage.gateway.ended(&id).await;
    assert_eq!(rollout.status.last_attempt_id.as_deref(), Some("1"));
    assert_eq!(rollout.status.state, RolloutState::Succeeded);
    let lost = &stage.gateway.attempts(&id)[0];
    assert_eq!(lost.failure, Some(FailureClass::Infrastructure));
    assert!(lost.error_message.as_ref().unwrap().contains("it was lost"), "{:?}", lost.error_message);
    assert!(!is_running(pid));
}

#[tokio::test]
async fn a_supervisor_killed_under_a_living_controller_is_an_infrastructure_failure() {
    let stage = Stage::with(json!({})).await;
    let id = stage.gateway.create(sh("test $(basename $(dirname $PWD)) = 1 || { echo $PPID > pid; sleep 600; }"));
    let supervisor = pid_in(&stage.attempt(&id, "0").work().join("pid")).await;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(supervisor), nix::sys::signal::Signal::SIGKILL).unwrap();
    let rollout = stage.gateway.ended(&id).await;
    assert_eq!(rollout.status.last_attempt_id.as_deref(), Some("1"));
    let message = stage.gateway.attempts(&id)[0].error_message.clone().unwrap();
    assert!(message.contains("its supervisor ended without a record"), "{message}");
}

#[tokio::test]
async fn on_shutdown_leave_lets_agents_go_on_for_the_next_controller() {
    let mut stage = Stage::with(json!({"on_shutdown": "leave"})).await;
    let id = stage.gateway.create(sh(UNTIL_GO));
    let work = stage.attempt(&id, "0").work();
    let pid = pid_in(&work.join("pid")).await;
    stage.gateway.until("it is reported", |gateway| gateway.calls().len() == 3).await;
    stage.stop().await;
    assert!(is_running(pid));
    assert_eq!(stage.gateway.attempts(&id)[0].state, AttemptState::Running);
    stage.start(json!({}));
    std::fs::write(work.join("go"), "").unwrap();
    assert_eq!(stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
    assert_eq!(stage.gateway.attempts(&id).len(), 1);
}

#[tokio::test]
async fn attempts_of_another_controller_are_left_alone_unless_it_is_to_be_replaced() {
    let mut stage = Stage::with(json!({"on_shutdown": "leave"})).await;
    let id = stage.gateway.create(sh("test $(basename $(dirname $PWD)) = 1 || { echo $$ > pid; sleep 600; }"));
    let pid = pid_in(&stage.attempt(&id, "0").work().join("pid")).await;
    stage.gateway.until("it is reported", |gateway| gateway.calls().len() == 3).await;
    stage.stop().await;
    let elsewhere = stage.folder.path().join("elsewhere");
    stage.start(json!({"work_dir": elsewhere}));
    let own = stage.gateway.create(sh("exit 0"));
    stage.gateway.ended(&own).await;
    assert_eq!(stage.gateway.attempts(&id).len(), 1);
    assert_eq!(stage.gateway.attempts(&id)[0].state, AttemptState::Running);
    stage.stop().await;
    stage.start(json!({"work_dir": elsewhere, "take_over": true}));
    stage.gateway.ended(&id).await;
    assert_eq!(stage.gateway.rollout(&id).status.last_attempt_id.as_deref(), Some("1"));
    // This one really is still there; whoever says that it is gone answers for it.
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
}

#[tokio::test]
async fn a_rollout_that_is_cancelled_while_no_controller_runs_loses_its_processes_when_one_is_back() {
    let stage = Stage::empty().await;
    let mut first = Process::start(&stage, &json!({}));
    let id = stage.gateway.create(sh("echo $$ > pid; sleep 600"));
    let pid = pid_in(&stage.attempt(&id, "0").work().join("pid")).await;
    stage.gateway.until("it is reported", |gateway| gateway.calls().len() == 3).await;
    first.kill();
    stage.gateway.cancel(&id);
    assert!(is_running(pid));
    let _second = Process::start(&stage, &json!({}));
    stage.gateway.until("the agent is gone", |_| !is_running(pid)).await;
    let failed = |gateway: &crate::gateway::FakeGateway| gateway.attempts(&id)[0].state == AttemptState::Failed;
    stage.gateway.until("the attempt is closed", failed).await;
    let mark = stage.folder.path().join("work/running/r0@0");
    stage.gateway.until("nothing is left to look after", |_| !mark.exists()).await;
}

#[tokio::test]
async fn a_supervisor_that_was_given_up_before_it_began_starts_nothing() {
    let stage = Stage::empty().await;
    let dir = stage.attempt("r0", "0");
    std::fs::create_dir_all(dir.work()).unwrap();
    std::fs::write(dir.path().join("abandoned"), "").unwrap();
    let spec = json!({
        "agent": {"argv": ["touch", "began"], "env": {}, "cwd": dir.work(), "timeout_seconds": 5},
        "evaluator": null, "input": null, "log_limit_bytes": 4096, "kill_grace_seconds": 1.0,
    });
    let _: Spec = serde_json::from_value(spec.clone()).unwrap();
    let mut child = Command::new(PROGRAM)
        .arg("supervise")
        .arg(dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    use std::io::Write;
    writeln!(child.stdin.take().unwrap(), "{spec}").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("gave this attempt up"));
    assert!(!dir.work().join("began").exists());
}
