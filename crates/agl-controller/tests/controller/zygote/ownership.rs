//! A warm agent belongs to its supervisor as a cold one does.

use std::time::Duration;

use agl_core::attempt::FailureClass;
use agl_core::rollout::RolloutState;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use super::{interpreter, module, outcome, python, stage, warm_stage, zygote, zygote_of};
use crate::recovery::Process;
use crate::stage::{Stage, is_running, pid_in, read, with};

const UNTIL_GO: &str = "import time\nopen('pid', 'w').write(str(os.getpid()))\n\
    while not os.path.exists('go'): time.sleep(0.02)\nprint('done')\n";

fn kill_hard(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
}

async fn go(stage: &Stage, id: &str) {
    std::fs::write(stage.attempt(id, "0").work().join("go"), "").unwrap();
    let rollout = stage.gateway.ended(id).await;
    assert_eq!(rollout.status.state, RolloutState::Succeeded, "{:?}", rollout.status.error_message);
    assert_eq!(read(stage.attempt(id, "0").stdout()), "done\n");
}

#[tokio::test]
async fn a_timeout_ends_the_whole_family_even_those_that_ignore_it_or_left_the_group() {
    let mut stage = stage().await;
    let settings = with(zygote(&stage, &["marker"]), json!({"kill_grace_seconds": 0.3}));
    stage.start(settings);
    let script = "import signal, subprocess, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n\
        subprocess.Popen(['sh', '-c', 'echo $$ > child; trap \"\" TERM; while :; do sleep 0.1; done'])\n\
        subprocess.Popen(['setsid', 'sh', '-c', 'echo $$ > runaway; sleep 600'])\n\
        subprocess.Popen(['setsid', 'sh', '-c', 'setsid sleep 600 & echo $! > orphan'])\n\
        open('agent', 'w').write(str(os.getpid()))\nwhile True: time.sleep(0.1)\n";
    let id = stage.gateway.create(with(python(script), json!({"timeout_seconds": 2})));
    let mut pids = Vec::new();
    for name in ["agent", "child", "runaway", "orphan"] {
        pids.push(pid_in(&stage.attempt(&id, "0").work().join(name)).await);
        assert!(is_running(*pids.last().unwrap()), "{name}");
    }
    let rollout = stage.gateway.ended(&id).await;
    assert!(rollout.status.error_message.unwrap().contains("timeout_seconds = 2"));
    let attempt = &stage.gateway.attempts(&id)[0];
    assert_eq!((attempt.failure, attempt.exit_code), (Some(FailureClass::Timeout), Some(-9)));
    assert!(pids.iter().all(|pid| !is_running(*pid)), "{pids:?}");
    assert!(zygote_of(&stage, &id).is_some());
}

#[tokio::test]
async fn what_an_agent_leaves_behind_by_forking_twice_ends_with_it() {
    let stage = warm_stage().await;
    let script = "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        \
        open('left', 'w').write(str(os.getpid()))\n        os.execvp('sleep', ['sleep', '600'])\n    os._exit(0)\n\
        os.wait()\nwhile not (os.path.exists('left') and open('left').read()): pass\n";
    let id = stage.gateway.create(python(script));
    assert_eq!(stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
    assert!(!is_running(pid_in(&stage.attempt(&id, "0").work().join("left")).await));
    assert!(zygote_of(&stage, &id).is_some());
}

#[tokio::test]
async fn a_cancelled_agent_is_asked_before_it_is_killed() {
    let stage = warm_stage().await;
    let script = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: (print('asked'), sys.exit(0)))\n\
        open('pid', 'w').write(str(os.getpid()))\nwhile True: time.sleep(1)\n";
    let id = stage.gateway.create(python(script));
    let pid = pid_in(&stage.attempt(&id, "0").work().join("pid")).await;
    stage.gateway.cancel(&id);
    stage.gateway.until("the agent is gone", |_| !is_running(pid)).await;
    stage.gateway.until("its output is kept", |_| read(stage.attempt(&id, "0").stdout()) == "asked\n").await;
}

#[tokio::test]
async fn everybody_is_asked_once() {
    let stage = warm_stage().await;
    let script = "import signal, time\nasked = []\n\
        signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'asked\\n'), asked.append(1)))\n\
        for _ in range(5): os.fork()\n\
        open('up', 'a').write('+')\n\
        while not asked: time.sleep(0.05)\n\
        for _ in range(5): time.sleep(0.05)\n";
    let id = stage.gateway.create(python(script));
    let up = || std::fs::read(stage.attempt(&id, "0").work().join("up")).unwrap_or_default();
    stage.gateway.until("all are up", |_| up().len() == 32).await;
    stage.gateway.cancel(&id);
    stage.gateway.until("all have been asked", |_| read(stage.attempt(&id, "0").stdout()).lines().count() >= 32).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(read(stage.attempt(&id, "0").stdout()), "asked\n".repeat(32));
}

#[tokio::test]
async fn output_is_whole_and_limited_like_any_other() {
    let mut stage = stage().await;
    let settings = with(zygote(&stage, &["marker"]), json!({"log_limit_bytes": 20000}));
    stage.start(settings);
    let script = "for n in range(100000, 200000): print(n)\nprint('few', file=sys.stderr)";
    let (out, err, _) = outcome(&stage, python(script)).await;
    assert!(out.len() < 20_200, "{}", out.len());
    assert!(out.starts_with("100000\n100001\n") && out.ends_with("199998\n199999\n"));
    assert!(out.contains("bytes left out here"));
    assert_eq!(err, "few\n");
    assert!(zygote_of(&stage, "r0").is_some());
}

#[tokio::test]
async fn many_agents_at_once_each_have_what_is_theirs() {
    let mut stage = stage().await;
    let settings = with(zygote(&stage, &["marker"]), json!({"max_concurrent": 51}));
    let script = "import time\nopen('pid', 'w').write(str(os.getpid()))\nwhile not os.path.exists('go'): time.sleep(0.05)\n\
        print(os.environ['AGL_KEY'], len(os.listdir('/proc/self/fd')))\nsys.exit(int(os.environ['AGL_KEY'].split('-')[1][1:]))";
    let ids: Vec<String> = (0..50).map(|_| stage.gateway.create(python(script))).collect();
    stage.start(settings);
    let count = "import os; print(len(os.listdir('/proc/self/fd')))";
    let cold = json!({"process": {"argv": [interpreter(), "-I", "-c", count]}});
    let descriptors = outcome(&stage, cold).await.0;
    for id in &ids {
        pid_in(&stage.attempt(id, "0").work().join("pid")).await;
    }
    for id in &ids {
        std::fs::write(stage.attempt(id, "0").work().join("go"), "").unwrap();
    }
    for (number, id) in ids.iter().enumerate() {
        stage.gateway.ended(id).await;
        assert_eq!(read(stage.attempt(id, "0").stdout()), format!("agent-{id}-0 {descriptors}"));
        assert_eq!(stage.gateway.attempts(id)[0].exit_code, Some(i32::try_from(number).unwrap()));
        assert!(zygote_of(&stage, id).is_some(), "{id}");
    }
}

#[tokio::test]
async fn a_killed_zygote_harms_no_running_agent_and_a_new_one_serves_later_starts() {
    let stage = warm_stage().await;
    let running = stage.gateway.create(python(UNTIL_GO));
    let pid = pid_in(&stage.attempt(&running, "0").work().join("pid")).await;
    let first = zygote_of(&stage, &running).unwrap();
    kill_hard(first);
    // The first may find the dead one, and is then started cold.
    let mut second = None;
    for _ in 0..2 {
        let later = stage.gateway.create(python("pass"));
        assert_eq!(stage.gateway.ended(&later).await.status.state, RolloutState::Succeeded);
        second = zygote_of(&stage, &later);
    }
    assert!(second.is_some_and(|second| second != first && is_running(second)), "{second:?}");
    assert!(is_running(pid));
    go(&stage, &running).await;
    assert_eq!(stage.gateway.attempts(&running).len(), 1);
}

#[tokio::test]
async fn a_zygote_that_does_not_answer_is_replaced_and_the_attempt_runs_all_the_same() {
    let stage = warm_stage().await;
    let first = stage.gateway.create(python("pass"));
    stage.gateway.ended(&first).await;
    let stopped = zygote_of(&stage, &first).unwrap();
    kill(Pid::from_raw(stopped), Signal::SIGSTOP).unwrap();
    let second = stage.gateway.create(python("pass"));
    assert_eq!(stage.gateway.ended(&second).await.status.state, RolloutState::Succeeded);
    assert_eq!(zygote_of(&stage, &second), None);
    assert!(!is_running(stopped));
    let third = stage.gateway.create(python("pass"));
    stage.gateway.ended(&third).await;
    assert!(zygote_of(&stage, &third).is_some());
}

#[tokio::test]
async fn a_warm_agent_outlives_a_killed_controller_and_is_evaluated_and_reported_by_the_next() {
    let stage = stage().await;
    let settings = zygote(&stage, &["marker"]);
    let mut first = Process::start(&stage, &settings);
    let evaluator = json!({"evaluator": {"argv": ["sh", "-c", "echo judged $AGL_EXIT_CODE; env | grep WARM"]}});
    let id = stage.gateway.create(with(python(UNTIL_GO), evaluator));
    let dir = stage.attempt(&id, "0");
    let pid = pid_in(&dir.work().join("pid")).await;
    let mother = zygote_of(&stage, &id).unwrap();
    stage.gateway.until("it is reported", |gateway| gateway.calls().len() == 3).await;
    first.kill();
    stage.gateway.until("the zygote ends with its controller", |_| !is_running(mother)).await;
    assert!(is_running(pid));
    let _second = Process::start(&stage, &settings);
    std::fs::write(dir.work().join("go"), "").unwrap();
    stage.gateway.ended(&id).await;
    assert_eq!(read(dir.evaluator_stdout()), "judged 0\n");
    assert_eq!(stage.gateway.attempts(&id).len(), 1);
}

#[tokio::test]
async fn a_killed_supervisor_is_an_infrastructure_failure_and_its_agent_ends() {
    let stage = warm_stage().await;
    let script = "import time\nif '/1/' in os.getcwd() + '/': sys.exit()\nopen('pid', 'w').write(str(os.getpid()))\n\
        open('parent', 'w').write(str(os.getppid()))\ntime.sleep(600)";
    let id = stage.gateway.create(python(script));
    let work = stage.attempt(&id, "0").work();
    let (agent, supervisor) = (pid_in(&work.join("pid")).await, pid_in(&work.join("parent")).await);
    stage.gateway.until("it is reported", |gateway| gateway.calls().len() == 3).await;
    assert_eq!(stage.gateway.attempts(&id)[0].runner["agent_pid"], agent);
    assert_eq!(stage.gateway.attempts(&id)[0].runner["supervisor_pid"], supervisor);
    kill_hard(supervisor);
    let rollout = stage.gateway.ended(&id).await;
    assert_eq!(rollout.status.last_attempt_id.as_deref(), Some("1"));
    assert_eq!(stage.gateway.attempts(&id)[0].failure, Some(FailureClass::Infrastructure));
    assert!(!is_running(agent));
}

#[tokio::test]
async fn the_zygote_ends_with_its_controller_and_agents_that_are_left_go_on() {
    let mut stage = stage().await;
    let settings = with(zygote(&stage, &["marker"]), json!({"on_shutdown": "leave"}));
    stage.start(settings.clone());
    let id = stage.gateway.create(python(UNTIL_GO));
    let pid = pid_in(&stage.attempt(&id, "0").work().join("pid")).await;
    let mother = zygote_of(&stage, &id).unwrap();
    stage.gateway.until("it is reported", |gateway| gateway.calls().len() == 3).await;
    stage.stop().await;
    stage.gateway.until("the zygote is gone", |_| !is_running(mother)).await;
    assert!(is_running(pid));
    stage.start(settings);
    go(&stage, &id).await;
}

#[tokio::test]
async fn a_controller_that_ends_does_not_wait_for_imports() {
    let mut stage = stage().await;
    module(&stage, "slow", "import time\ntime.sleep(600)\n");
    let settings = zygote(&stage, &["slow"]);
    stage.start(settings);
    let id = stage.gateway.create(python("pass"));
    stage.gateway.until("it is claimed", |gateway| gateway.calls().len() == 2).await;
    let began = std::time::Instant::now();
    stage.stop().await;
    assert!(began.elapsed() < Duration::from_secs(5));
    assert_eq!(stage.gateway.rollout(&id).status.state, RolloutState::Running);
}
