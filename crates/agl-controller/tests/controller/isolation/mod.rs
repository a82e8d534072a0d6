//! Agents behind walls: what they reach, what they do not, and that they are supervised as any other.
//!
//! Where a machine does not allow namespaces or limits, tests say so and end.

mod machine;
mod walls;

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use agl_core::attempt::{AttemptState, FailureClass};
use agl_core::rollout::RolloutState;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::stage::{PROGRAM, Stage, is_running, pid_in, read, sh, with};

/// False, and said aloud, where this machine does not let anybody make namespaces.
fn possible() -> bool {
    let made = Command::new("unshare").args(["-Urnmpif", "--mount-proc", "true"]).stderr(Stdio::null()).status();
    let possible = made.is_ok_and(|status| status.success());
    if !possible {
        println!("SKIPPED: this machine does not allow namespaces (unshare -Urnmpif --mount-proc fails)");
    }
    possible
}

fn isolated(more: Value) -> Value {
    json!({"isolation": with(json!({"mode": "namespaces"}), more)})
}

/// What a script said, as `name=value` lines.
fn said(stage: &Stage, id: &str) -> BTreeMap<String, String> {
    let text = read(stage.attempt(id, "0").stdout());
    text.lines().filter_map(|line| line.split_once('=')).map(|(name, value)| (name.into(), value.into())).collect()
}

/// `NAME=yes` if a command succeeds, `NAME=no` if not.
fn can(name: &str, command: &str) -> String {
    format!("if ( {command} ) >>tried 2>&1; then echo {name}=yes; else echo {name}=no; fi\n")
}

fn all_no(said: &BTreeMap<String, String>, names: &[&str]) {
    for name in names {
        assert_eq!(said.get(*name).map(String::as_str), Some("no"), "{name}: {said:#?}");
    }
}

async fn run(settings: Value, config: Value) -> (Stage, String) {
    let stage = Stage::with(settings).await;
    let id = stage.gateway.create(config);
    stage.gateway.ended(&id).await;
    (stage, id)
}

#[tokio::test]
async fn exit_codes_signals_and_logs_are_those_of_the_agent() {
    if !possible() {
        return;
    }
    let stage = Stage::with(isolated(json!({}))).await;
    let scripts = ["echo out; echo err >&2; exit 0", "exit 7", "kill -9 $$", "kill -SEGV $$", "kill -TERM $$"];
    let codes = [0, 7, -9, -11, -15];
    let ids: Vec<String> = scripts.iter().map(|script| stage.gateway.create(sh(script))).collect();
    for (id, code) in ids.iter().zip(codes) {
        stage.gateway.ended(id).await;
        let attempt = &stage.gateway.attempts(id)[0];
        assert_eq!(attempt.exit_code, Some(code), "{:?}", attempt.error_message);
        assert_eq!(attempt.failure, (code != 0).then_some(FailureClass::Agent));
    }
    let dir = stage.attempt(&ids[0], "0");
    assert_eq!((read(dir.stdout()), read(dir.stderr())), ("out\n".to_owned(), "err\n".to_owned()));
    let realtime = stage.gateway.create(sh("kill -35 $$"));
    stage.gateway.ended(&realtime).await;
    assert_eq!(stage.gateway.attempts(&realtime)[0].exit_code, Some(-35));
}

#[tokio::test]
async fn a_program_or_folder_that_is_not_there_is_named_and_not_tried_again() {
    if !possible() {
        return;
    }
    let mut stage = Stage::empty().await;
    let hidden = stage.folder.path().join("agent");
    std::fs::create_dir(&hidden).unwrap();
    stage.start(isolated(json!({})));
    for (config, words) in [
        (json!({"process": {"argv": ["no-such-agent"]}}), ["\"no-such-agent\"", "no such program"]),
        (json!({"process": {"argv": ["true"], "cwd": hidden}}), ["/agent does not exist inside", "isolation.readable"]),
    ] {
        let id = stage.gateway.create(config);
        let message = stage.gateway.ended(&id).await.status.error_message.unwrap();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
        let attempts = stage.gateway.attempts(&id);
        assert_eq!((attempts.len(), attempts[0].failure), (1, Some(FailureClass::Infrastructure)));
    }
}

#[tokio::test]
async fn a_timeout_asks_first_and_then_kills_the_whole_family() {
    if !possible() {
        return;
    }
    let stage = Stage::with(with(isolated(json!({})), json!({"kill_grace_seconds": 0.5}))).await;
    let limit = json!({"timeout_seconds": 1});
    let polite =
        stage.gateway.create(with(sh("trap 'echo asked; exit 3' TERM; while :; do sleep 0.05; done"), limit.clone()));
    let stubborn = "setsid sh -c 'trap \"\" TERM; while :; do sleep 0.1; done' &\n\
                    trap '' TERM; while :; do sleep 0.1; done";
    let stubborn = stage.gateway.create(with(sh(stubborn), limit));
    for (id, code) in [(&polite, 3), (&stubborn, -9)] {
        stage.gateway.ended(id).await;
        let attempt = &stage.gateway.attempts(id)[0];
        assert_eq!((attempt.failure, attempt.exit_code), (Some(FailureClass::Timeout), Some(code)));
        nothing_runs_on(attempt.runner["supervisor_pid"].as_i64(), attempt.runner["agent_pid"].as_i64());
    }
    assert_eq!(read(stage.attempt(&polite, "0").stdout()), "asked\n");
}

/// Neither these processes nor any whose working folder is an attempt's of this test.
fn nothing_runs_on(supervisor: Option<i64>, stage: Option<i64>) {
    for pid in [supervisor, stage] {
        let pid = i32::try_from(pid.unwrap()).unwrap();
        assert!(!is_running(pid) || agl_controller::process_id::descendants(pid).is_empty(), "{pid}");
    }
}

#[tokio::test]
async fn what_an_agent_leaves_behind_is_asked_before_it_is_killed() {
    if !possible() {
        return;
    }
    let stage = Stage::with(isolated(json!({}))).await;
    let script = "setsid sh -c 'trap \"echo asked > asked; exit\" TERM; touch set; while :; do sleep 0.02; done' &\n\
                  until test -e set; do sleep 0.02; done; exit 4";
    let began = Instant::now();
    let id = stage.gateway.create(sh(script));
    stage.gateway.ended(&id).await;
    assert_eq!(stage.gateway.attempts(&id)[0].exit_code, Some(4));
    assert_eq!(read(stage.attempt(&id, "0").work().join("asked")), "asked\n");
    assert!(began.elapsed() < Duration::from_secs(10));
}

/// The host's numbers of all processes that have `word` in their command line.
fn with_word(word: &str) -> Vec<i32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let own = i32::try_from(std::process::id()).unwrap();
    let has = |pid: &i32| {
        std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| String::from_utf8_lossy(&line).contains(word))
    };
    pids.filter(|pid| *pid != own).filter(has).collect()
}

#[tokio::test]
async fn a_killed_supervisor_leaves_nothing_behind() {
    if !possible() {
        return;
    }
    let stage = Stage::with(isolated(json!({}))).await;
    let word = format!("mark-{}", std::process::id());
    let script = format!(
        "test $(basename $(dirname $PWD)) = 1 && exit 0\nsetsid sh -c ': {word}; while :; do sleep 1; done' &\n\
         echo 1 > pid; : {word}; while :; do sleep 1; done"
    );
    let id = stage.gateway.create(sh(&script));
    pid_in(&stage.attempt(&id, "0").work().join("pid")).await;
    stage.gateway.until("it is reported", |gateway| gateway.calls().len() >= 3).await;
    stage.gateway.until("both run", |_| with_word(&word).len() >= 2).await;
    let supervisor = stage.gateway.attempts(&id)[0].runner["supervisor_pid"].as_i64().unwrap();
    kill(Pid::from_raw(i32::try_from(supervisor).unwrap()), Signal::SIGKILL).unwrap();
    stage.gateway.until("all are gone", |_| with_word(&word).is_empty()).await;
    assert_eq!(stage.gateway.ended(&id).await.status.last_attempt_id.as_deref(), Some("1"));
}

#[tokio::test]
async fn a_cancelled_rollout_and_a_shutdown_end_isolated_agents() {
    if !possible() {
        return;
    }
    let mut stage = Stage::with(isolated(json!({}))).await;
    let word = format!("ended-{}", std::process::id());
    let script = format!("echo 1 > pid; : {word}; sleep 600 & wait");
    for shutdown in [false, true] {
        let id = stage.gateway.create(sh(&script));
        pid_in(&stage.attempt(&id, "0").work().join("pid")).await;
        assert!(!with_word(&word).is_empty());
        if shutdown {
            stage.stop().await;
        } else {
            stage.gateway.cancel(&id);
        }
        stage.gateway.until("all are gone", |_| with_word(&word).is_empty()).await;
    }
}

#[tokio::test]
async fn an_isolated_agent_outlives_its_controller_with_its_way_to_the_gateway() {
    if !possible() {
        return;
    }
    let mut stage = Stage::with(with(isolated(json!({})), json!({"on_shutdown": "leave"}))).await;
    let script = "echo 1 > pid; until test -e go; do sleep 0.02; done\n\
                  curl -sS -o /dev/null -w 'gateway=%{http_code}\\n' $AGL_OPENAI_BASE_URL/models; exit 5";
    let id = stage.gateway.create(sh(script));
    let work = stage.attempt(&id, "0").work();
    pid_in(&work.join("pid")).await;
    stage.gateway.until("it is reported", |gateway| gateway.calls().len() == 3).await;
    stage.stop().await;
    assert_eq!(stage.gateway.attempts(&id)[0].state, AttemptState::Running);
    stage.start(isolated(json!({})));
    std::fs::write(work.join("go"), "").unwrap();
    stage.gateway.ended(&id).await;
    assert_eq!(said(&stage, &id)["gateway"], "200");
    let attempts = stage.gateway.attempts(&id);
    assert_eq!((attempts.len(), attempts[0].exit_code), (1, Some(5)));
}

#[tokio::test]
async fn the_evaluator_runs_outside() {
    if !possible() {
        return;
    }
    let evaluator = "test -e ../exit.json || ls .. ; echo url=$AGL_EVENT_URL proxy=$HTTPS_PROXY; cat result";
    let config = with(sh("echo 42 > result"), json!({"evaluator": {"argv": ["sh", "-c", evaluator]}}));
    let (stage, id) = run(isolated(json!({})), config).await;
    assert_eq!(stage.gateway.rollout(&id).status.state, RolloutState::Succeeded);
    let output = read(stage.attempt(&id, "0").evaluator_stdout());
    assert!(output.contains("supervisor.json") && output.ends_with("42\n"), "{output}");
    assert!(output.contains(&format!("url={}/api/", stage.gateway.url)) && !output.contains("4478"), "{output}");
}

#[tokio::test]
async fn what_whoever_started_the_controller_left_open_does_not_lead_out() {
    if !possible() {
        return;
    }
    let stage = Stage::empty().await;
    let config = stage.folder.path().join("controller.json");
    std::fs::write(&config, stage.config(&isolated(json!({}))).to_string()).unwrap();
    let mut controller = Command::new("bash")
        .args(["-c", "exec 9</ && exec \"$0\" run --gateway \"$1\" --config \"$2\"", PROGRAM, &stage.gateway.url])
        .arg(&config)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let id = stage.gateway.create(sh("test ! -e /proc/self/fd/9"));
    let rollout = stage.gateway.ended(&id).await;
    controller.kill().unwrap();
    controller.wait().unwrap();
    assert_eq!(rollout.status.state, RolloutState::Succeeded, "{:?}", rollout.status.error_message);
}
