//! Agents behind walls: what they reach, what they do not, and that they are supervised as any other.
//!
//! Where a machine does not allow namespaces or limits, tests say so and end.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
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

const SOCKETS: &str = r#"
import socket
def attempt(name, act):
    try:
        act()
        print(name + '=yes')
    except OSError as error:
        print(name + '=no')
def udp():
    query = b'\xab\xcd\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x06secret\x07example\x03com\x00\x00\x01\x00\x01'
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2)
    s.sendto(query, ('8.8.8.8', 53)); s.recvfrom(512)
def udp6():
    socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b'x', ('2001:4860:4860::8888', 53))
attempt('tcp', lambda: socket.create_connection(('1.1.1.1', 443), 2))
attempt('udp', udp)
attempt('udp6', udp6)
attempt('dns', lambda: socket.getaddrinfo('secret.example.com', 80))
attempt('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt('packet', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt('vsock', lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))
"#;

#[tokio::test]
async fn an_agent_reaches_the_gateway_and_nothing_else() {
    if !possible() {
        return;
    }
    let other = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = other.local_addr().unwrap().port();
    let script = [
        "curl -sS -o /dev/null -w 'gateway=%{http_code}\\n' $AGL_OPENAI_BASE_URL/models\n",
        "curl -sS -o /dev/null -w 'event=%{http_code}\\n' -H \"authorization: Bearer $AGL_KEY\" \
         --json '{\"event_type\": \"note\", \"data\": {}}' $AGL_EVENT_URL\n",
        "echo url=$OPENAI_BASE_URL\necho rendered=$RENDERED\n",
        &can("neighbour", &format!("curl -sS --noproxy '*' -m 3 http://127.0.0.1:{port}")),
        &can("outside", "curl -sS --noproxy '*' -m 3 http://1.1.1.1"),
        &can("name", "curl -sS --noproxy '*' -m 3 http://example.com"),
        &can("pip", "pip download --no-cache-dir --retries 0 --timeout 3 -d . six"),
        &can("pip_past_proxy", "env -u HTTPS_PROXY -u https_proxy -u ALL_PROXY -u all_proxy pip download --no-cache-dir --retries 0 --timeout 3 -d . six"),
        &can("git", "git clone https://github.com/octocat/Hello-World"),
        "echo devices=$(ls /proc/sys/net/ipv4/conf | tr '\\n' ' ')\n",
        &format!("cat > sockets.py <<'END'\n{SOCKETS}\nEND\npython3 sockets.py\n"),
    ]
    .concat();
    let config = json!({"process": {"argv": ["sh", "-c", script], "env": {"RENDERED": "{{ anthropic_base_url }}"}}});
    let (stage, id) = run(isolated(json!({})), config).await;
    let said = said(&stage, &id);
    assert_eq!(said["gateway"], "200", "{}", read(stage.attempt(&id, "0").stderr()));
    assert_eq!(said["event"], "200");
    assert!(stage.gateway.events().iter().any(|event| event["body"]["event_type"] == "note"));
    assert_eq!(said["url"], "http://127.0.0.1:4477/proxy/rollout/r0/attempt/0/mode/train/openai/v1");
    assert_eq!(said["rendered"], "http://127.0.0.1:4477/proxy/rollout/r0/attempt/0/mode/train/anthropic");
    all_no(&said, &["neighbour", "outside", "name", "pip", "pip_past_proxy", "git"]);
    all_no(&said, &["tcp", "udp", "udp6", "dns", "raw", "packet", "vsock"]);
    assert_eq!(said["devices"].trim(), "all default lo");
}

#[tokio::test]
async fn attempts_through_the_proxy_are_refused_and_become_events_while_the_agents_key_is_good() {
    if !possible() {
        return;
    }
    let script = "curl -s -m 5 -w 'code=%{http_code}\\n' http://user:secret@example.com/page\n\
                  curl -s -m 5 https://pypi.org/simple/\n\
                  pip download --no-cache-dir --retries 0 -d . six";
    let (stage, id) = run(isolated(json!({})), sh(script)).await;
    let output = read(stage.attempt(&id, "0").stdout());
    assert!(output.contains("the network is closed to this agent") && output.contains("code=403"), "{output}");
    let events = stage.gateway.events();
    let refused: Vec<&Value> = events.iter().map(|event| &event["body"]["data"]).collect();
    assert_eq!(refused[0], &json!({"method": "GET", "host": "example.com", "port": 80}));
    assert_eq!(refused[1], &json!({"method": "CONNECT", "host": "pypi.org", "port": 443}));
    assert_eq!(refused[2], &json!({"method": "CONNECT", "host": "pypi.org", "port": 443}));
    assert!(events.iter().all(|event| event["body"]["event_type"] == "network_refused"));
    assert!(events.iter().all(|event| event["key"] == "Bearer agent-r0-0"), "{events:#?}");
    let calls = stage.gateway.calls();
    let place = |call: &str| calls.iter().rposition(|made| made == call).unwrap();
    assert!(place("EVENT r0/0") < place("PATCH r0/0 agent_ended"), "{calls:#?}");
}

#[tokio::test]
async fn of_many_refused_attempts_the_first_are_told_and_the_others_counted() {
    if !possible() {
        return;
    }
    let script = "import socket\nfor n in range(130):\n    s = socket.create_connection(('127.0.0.1', 4478))\n    \
                  s.sendall(b'CONNECT host%d:443 HTTP/1.1\\r\\n\\r\\n' % n)\n    s.recv(1000)\n    s.close()\n";
    let (stage, id) = run(isolated(json!({})), json!({"process": {"argv": ["python3", "-c", script]}})).await;
    let events = stage.gateway.events();
    assert_eq!(events.len(), 101, "{}", read(stage.attempt(&id, "0").stderr()));
    assert_eq!(events[99]["body"]["data"]["host"], "host99");
    assert_eq!(events[100]["body"]["data"], json!({"further": 30}));
}

#[tokio::test]
async fn an_agent_writes_into_its_own_places_and_sees_nothing_of_other_attempts() {
    if !possible() {
        return;
    }
    let mut stage = Stage::empty().await;
    let folder = stage.folder.path().to_owned();
    for name in ["data", "given", "secret"] {
        std::fs::create_dir(folder.join(name)).unwrap();
        std::fs::write(folder.join(name).join("file"), name).unwrap();
    }
    std::fs::create_dir(folder.join("data/secret")).unwrap();
    std::fs::write(folder.join("data/secret/file"), "deeper").unwrap();
    let neighbour = stage.attempt("r9", "0").path().to_owned();
    std::fs::create_dir_all(neighbour.join("work")).unwrap();
    std::fs::write(neighbour.join("input.json"), "other").unwrap();
    let here = folder.display();
    let script = [
        can("work", "echo x > file && cat file"),
        can("tmp", "echo x > /tmp/file && echo x > /var/tmp/file && echo x > /dev/shm/file"),
        can("home", "test $HOME = /tmp/home && echo x > $HOME/file"),
        can("input", "grep 2+2 $AGL_INPUT"),
        can("data", &format!("grep data {here}/data/file && echo x > {here}/data/new")),
        can("given", &format!("grep given {here}/given/file")),
        can("terminal", "python3 -c 'import pty, os; print(os.ttyname(pty.openpty()[1]))'"),
        can("random", "head -c 1 /dev/urandom > /dev/null && echo x > /dev/null"),
        can("change_input", "echo x > $AGL_INPUT"),
        can("change_given", &format!("echo x > {here}/given/file")),
        can("secret", &format!("cat {here}/secret/file || cat {here}/data/secret/file")),
        can("neighbour", &format!("cat {}/input.json", neighbour.display())),
        can("records", "ls .. | grep -E 'supervisor|agent|exit'"),
        can("root", "echo x > /agl-was-here"),
        can("etc", "echo x > /etc/agl-was-here"),
        can("usr", "touch /usr/bin/agl-was-here"),
        can("sys", "echo 1 > /sys/kernel/mm/ksm/run"),
        can("core_pattern", "echo core > /proc/sys/kernel/core_pattern"),
        can("sysrq", "echo h > /proc/sysrq-trigger"),
        can("remount", "mount -o remount,bind,rw /"),
        can("unmount", &format!("umount {here}/work || umount /tmp")),
        can("namespace", "unshare -Ur true"),
        can("disk", "find /dev -type b | grep . || mknod disk b 254 0"),
        can("run", "find /run -mindepth 1 | grep ."),
        can("privileges", "grep -E 'CapEff' /proc/self/status | grep -vE '0{16}'"),
        can("kill", &format!("kill -0 {}", std::process::id())),
        can("processes", "ls /proc | grep -E '^[0-9]{3,}$'"),
        can("first", "kill -9 1; cat /proc/1/environ"),
        can("ipc", "ipcs -m | grep 0x"),
        "echo files=$(ls | tr '\\n' ' ')\n".to_owned(),
    ]
    .concat();
    let hidden = [folder.join("secret"), folder.join("data/secret")];
    // All lies below /tmp, which is private: only what is named is there.
    stage.start(isolated(json!({
        "writable": [folder.join("data")], "readable": [folder.join("given")], "hidden": hidden,
    })));
    let id = stage.gateway.create(sh(&script));
    stage.gateway.ended(&id).await;
    let said = said(&stage, &id);
    for name in ["work", "tmp", "home", "input", "data", "given", "terminal", "random"] {
        let why = read(stage.attempt(&id, "0").work().join("tried"));
        assert_eq!(said.get(name).map(String::as_str), Some("yes"), "{name}: {said:#?}\n{why}");
    }
    all_no(&said, &["change_input", "change_given", "secret", "neighbour", "records", "root", "etc", "usr", "sys"]);
    all_no(&said, &["core_pattern", "sysrq", "remount", "unmount", "namespace", "disk", "run", "privileges"]);
    all_no(&said, &["kill", "processes", "first", "ipc"]);
    assert_eq!(said["files"].trim(), "file tried");
    assert_eq!(read(folder.join("data/new")), "x\n");
    assert_eq!(read(stage.attempt(&id, "0").work().join("file")), "x\n");
    for path in ["/tmp/file", "/var/tmp/file", "/dev/shm/file", "/tmp/home"] {
        assert!(!Path::new(path).exists(), "{path} is none of the machine's");
    }
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
    assert!(with_word(&word).len() >= 2);
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
