//! What depends on the machine: limits, other users, and where namespaces are not allowed.

use std::process::{Child, Command};

use agl_core::attempt::FailureClass;
use agl_core::rollout::RolloutState;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::{all_no, can, isolated, possible, run, said};
use crate::stage::{PROGRAM, Stage, sh, with};

/// The note that a machine has no limits, if it said so.
fn unlimited(stage: &Stage, id: &str) -> Option<String> {
    let message = stage.gateway.attempts(id)[0].error_message.clone()?;
    let unlimited = message.contains("isolation.require_limits is set");
    unlimited.then(|| {
        println!("SKIPPED: {message}");
        message
    })
}

#[tokio::test]
async fn an_agent_beyond_its_memory_is_killed_and_its_failure_says_so() {
    if !possible() {
        return;
    }
    let limits = json!({"memory_limit_bytes": 64 << 20, "require_limits": true});
    let script = "x = bytearray(200 << 20)\nprint('it fitted')";
    let (stage, id) = run(isolated(limits), json!({"process": {"argv": ["python3", "-c", script]}})).await;
    if unlimited(&stage, &id).is_some() {
        return;
    }
    let attempt = &stage.gateway.attempts(&id)[0];
    assert_eq!((attempt.failure, attempt.exit_code), (Some(FailureClass::Agent), Some(-9)));
    let message = attempt.error_message.clone().unwrap();
    assert!(message.contains("it reached isolation.memory_limit_bytes"), "{message}");
    no_groups_are_left(attempt.runner["supervisor_pid"].as_i64().unwrap());
}

#[tokio::test]
async fn an_agent_gets_no_more_processes_than_its_limit() {
    if !possible() {
        return;
    }
    let limits = json!({"pids_limit": 10, "require_limits": true});
    let script = "import os, time\ncount = 0\ntry:\n    while count < 40:\n        if os.fork() == 0:\n            time.sleep(60)\n        \
                  count += 1\nexcept OSError:\n    pass\nprint('count=%d' % count)";
    let (stage, id) = run(isolated(limits), json!({"process": {"argv": ["python3", "-c", script]}})).await;
    if unlimited(&stage, &id).is_some() {
        return;
    }
    assert_eq!(said(&stage, &id)["count"], "9");
    no_groups_are_left(stage.gateway.attempts(&id)[0].runner["supervisor_pid"].as_i64().unwrap());
}

fn no_groups_are_left(supervisor: i64) {
    let found =
        Command::new("find").args(["/sys/fs/cgroup", "-name", &format!("agl-{supervisor}-*")]).output().unwrap();
    assert!(found.stdout.is_empty(), "{}", String::from_utf8_lossy(&found.stdout));
}

#[tokio::test]
async fn without_isolation_an_https_gateway_is_fine_and_with_it_the_controller_says_what_to_do() {
    let stage = Stage::empty().await;
    let refused = |settings: Value| {
        let config = serde_json::from_value(stage.config(&settings)).unwrap();
        let client = agl_client::GatewayClient::new(&stage.gateway.url, "").unwrap();
        agl_controller::Controller::new(config, client).run(async {})
    };
    let settings = with(isolated(json!({})), json!({"agent_url": "https://gateway.example"}));
    let message = refused(settings).await.unwrap_err().to_string();
    assert!(message.contains("agent_url = https://gateway.example") && message.contains("plain http"), "{message}");
    refused(json!({"agent_url": "https://gateway.example"})).await.unwrap();
}

/// A controller as a process of its own, started by way of `wrapper`.
struct Wrapped(Child);

impl Wrapped {
    fn start(stage: &Stage, wrapper: &[&str], settings: &Value) -> Self {
        let path = stage.folder.path().join("controller.json");
        std::fs::write(&path, stage.config(settings).to_string()).unwrap();
        let mut command = Command::new(wrapper[0]);
        command.args(&wrapper[1..]).args([PROGRAM, "run", "--gateway", &stage.gateway.url, "--config"]).arg(path);
        Self(command.spawn().unwrap())
    }
}

impl Drop for Wrapped {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(i32::try_from(self.0.id()).unwrap()), Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn where_namespaces_are_not_allowed_an_attempt_fails_and_never_runs_without() {
    if !possible() {
        return;
    }
    let stage = Stage::empty().await;
    let forbid = ["unshare", "-Ur", "sh", "-c", "echo 0 > /proc/sys/user/max_user_namespaces && exec \"$@\"", "sh"];
    let _controller = Wrapped::start(&stage, &forbid, &isolated(json!({})));
    let id = stage.gateway.create(sh("touch /tmp/../$PWD/ran; exit 0"));
    let message = stage.gateway.ended(&id).await.status.error_message.unwrap();
    assert!(message.contains("cannot isolate the agent") && message.contains("user.max_user_namespaces"), "{message}");
    let attempts = stage.gateway.attempts(&id);
    assert_eq!((attempts.len(), attempts[0].failure), (1, Some(FailureClass::Infrastructure)));
    assert!(!stage.attempt(&id, "0").work().join("ran").exists());
}

#[tokio::test]
async fn an_ordinary_users_agents_are_isolated_too() {
    if !possible() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can become another user; the other tests have run as an ordinary one");
        return;
    }
    let stage = Stage::empty().await;
    std::os::unix::fs::chown(stage.folder.path(), Some(65534), Some(65534)).unwrap();
    let user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"];
    let readable = Command::new(user[0]).args(&user[1..]).args(["test", "-x", PROGRAM]).status().unwrap();
    if !readable.success() {
        println!("SKIPPED: another user cannot execute {PROGRAM}");
        return;
    }
    let settings = with(isolated(json!({"memory_limit_bytes": 1 << 30})), json!({"max_concurrent": 1}));
    let _controller = Wrapped::start(&stage, &user, &settings);
    let script = [
        "echo user=$(id -u)\ncurl -sS -o /dev/null -w 'gateway=%{http_code}\\n' $AGL_OPENAI_BASE_URL/models\n",
        &can("work", "echo x > file"),
        &can("tmp", "echo x > /tmp/file && echo x > $HOME/file"),
        &can("outside", "curl -sS --noproxy '*' -m 3 http://1.1.1.1"),
        &can("root", "echo x > /agl-was-here"),
        &can("var_tmp", "ls /var/tmp | grep ."),
        &can("processes", "ls /proc | grep -E '^[0-9]{3,}$'"),
        &can("become_root", "su -c true || sudo -n true"),
    ]
    .concat();
    let id = stage.gateway.create(sh(&script));
    let status = stage.gateway.ended(&id).await.status;
    assert_eq!(status.state, RolloutState::Succeeded, "{:?}", status.error_message);
    let said = said(&stage, &id);
    assert_eq!((said["user"].as_str(), said["gateway"].as_str()), ("65534", "200"));
    assert_eq!((said["work"].as_str(), said["tmp"].as_str()), ("yes", "yes"));
    all_no(&said, &["outside", "root", "var_tmp", "processes", "become_root"]);
}
