//! The same with a real engine, Docker or Podman, where one is at hand: `DOCKER_HOST`, or one of the usual sockets. The
//! image is made here, of a static busybox, so that no registry is asked for anything.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use agl_core::attempt::{AttemptState, FailureClass};
use agl_core::rollout::RolloutState;
use serde_json::{Value, json};

use crate::dock::settings_at;
use crate::stage::{Stage, read, with};

const IMAGE: &str = "localhost/agl-controller-test:latest";

/// An engine and the image, or why there is none.
async fn engine() -> Result<PathBuf, String> {
    let host = std::env::var("DOCKER_HOST").ok().and_then(|host| host.strip_prefix("unix://").map(PathBuf::from));
    let usual = ["/var/run/docker.sock", "/run/podman/podman.sock"].map(PathBuf::from);
    let socket = host.into_iter().chain(usual).find(|socket| socket.exists()).ok_or("there is no engine")?;
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists());
    let busybox = busybox.ok_or("there is no /bin/busybox to make an image of")?;
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let script = "curl -sf --unix-socket $1 http://engine/images/localhost/agl-controller-test:latest/json > there && exit; \
        mkdir -p root/bin root/tmp && cp $0 root/bin/busybox && \
        for name in sh cat ls id sleep wget head touch env grep tail; do ln -sf busybox root/bin/$name; done && \
        tar -C root -c . > root.tar && curl -sf --unix-socket $1 -X POST --data-binary @root.tar \
        -H 'Content-Type: application/x-tar' 'http://engine/images/create?fromSrc=-&repo=localhost/agl-controller-test'";
    let mut import = Command::new("sh");
    import.args(["-c", script, busybox]).arg(&socket).current_dir(folder.path());
    let output =
        tokio::task::spawn_blocking(move || import.output()).await.unwrap().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(format!("the image cannot be made: {}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(socket)
}

struct Real {
    stage: Stage,
    socket: PathBuf,
    /// All stages name their rollouts alike, and an engine knows a name once.
    _turn: File,
}

/// Waits for the turn at the engine, and clears away what a test left that was killed.
fn turn(socket: &Path) -> std::io::Result<File> {
    let turn = File::create(std::env::temp_dir().join("agl-controller-test-engine.lock"))?;
    turn.lock()?;
    for (number, role) in (0..10).flat_map(|number| [(number, ""), (number, ".evaluator")]) {
        let url = format!("http://engine/containers/agl-rollout-r{number}{role}?force=true");
        Command::new("curl").args(["-s", "-X", "DELETE", &url, "--unix-socket"]).arg(socket).output()?;
    }
    Ok(turn)
}

impl Real {
    /// `None`, with a word why, where there is no engine.
    #[expect(clippy::print_stdout, reason = "a test that tests nothing says so")]
    async fn with(settings: Value) -> Option<Self> {
        let socket = match engine().await {
            Ok(socket) => socket,
            Err(reason) => {
                println!("not tested with a real engine: {reason}");
                return None;
            }
        };
        let at = socket.clone();
        let turn = tokio::task::spawn_blocking(move || turn(&at)).await.unwrap().unwrap();
        let mut real = Self { stage: Stage::empty().await, socket, _turn: turn };
        real.start(settings);
        Some(real)
    }

    fn start(&mut self, settings: Value) {
        let settings =
            settings_at(&self.socket, settings, json!({"pull": "never", "memory_bytes": 67_108_864, "pids_limit": 64}));
        self.stage.start(settings);
    }

    fn create(&self, script: &str, more: Value) -> String {
        let container = json!({"image": IMAGE, "argv": ["sh", "-c", script]});
        self.stage.gateway.create(with(json!({"container": container, "timeout_seconds": 60}), more))
    }
}

const LOOK: &str = "id -u; pwd; cat $AGL_INPUT; echo; touch mine && echo work; touch /tmp/x && echo tmp; \
    touch /bin/x 2>/dev/null || echo read-only; grep CapEff /proc/self/status; grep NoNewPrivs /proc/self/status; \
    ls /sys/class/net; wget -q -O - $BASE/api/rollouts/r0 | head -c 12; echo; \
    wget -q -O - http://1.1.1.1/ 2>/dev/null || echo no way out; \
    cat /proc/1/environ 2>/dev/null | grep -q RELAY_TOKEN || echo no token; echo oops >&2; exit 3";

#[tokio::test]
async fn an_agent_in_a_real_container_reaches_the_gateway_and_nothing_else() {
    let Some(real) = Real::with(json!({})).await else { return };
    let env =
        json!({"container": {"image": IMAGE, "argv": ["sh", "-c", LOOK], "env": {"BASE": "http://127.0.0.1:14747"}}});
    let id = real.stage.gateway.create(env);
    real.stage.gateway.ended(&id).await;
    let attempt = &real.stage.gateway.attempts(&id)[0];
    assert_eq!(
        (attempt.failure, attempt.exit_code),
        (Some(FailureClass::Agent), Some(3)),
        "{:?}",
        attempt.error_message
    );
    let dir = real.stage.attempt(&id, "0");
    let expected = "0\n/agl/work\n{\"question\":\"2+2?\"}\nwork\ntmp\nread-only\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\nlo\n\
        {\"rollout\":{\nno way out\nno token\n";
    assert_eq!(read(dir.stdout()), expected, "{}", read(dir.stderr()));
    assert!(read(dir.stderr()).ends_with("oops\n"));
    assert!(dir.work().join("mine").exists());
}

#[tokio::test]
async fn a_real_evaluator_sees_what_the_agent_left_and_posts_its_reward() {
    let Some(real) = Real::with(json!({})).await else { return };
    let post = "test \"$(cat $AGL_AGENT_STDOUT)\" = four && test -e answer && test $AGL_EXIT_CODE = 0 && \
        wget -q -O - --header \"Authorization: Bearer $AGL_KEY\" --header 'Content-Type: application/json' \
        --post-data '{\"event_type\": \"reward\", \"data\": {\"value\": 1.0}}' $AGL_EVENT_URL";
    let id = real.create("echo four; touch answer", json!({"evaluator": {"argv": ["sh", "-c", post]}}));
    let rollout = real.stage.gateway.ended(&id).await;
    let said = read(real.stage.attempt(&id, "0").evaluator_stderr());
    assert_eq!(rollout.status.state, RolloutState::Succeeded, "{:?} {said}", rollout.status.error_message);
    let events = real.stage.gateway.events();
    assert_eq!((events.len(), &events[0]["key"]), (1, &json!(format!("Bearer reward-{id}-0"))));
}

#[tokio::test]
async fn real_ends_are_told_apart() {
    let Some(real) = Real::with(json!({})).await else { return };
    for (script, timeout, class, said) in [
        ("sleep 600", 1, FailureClass::Timeout, "timeout_seconds = 1"),
        ("trap '' TERM; while :; do sleep 1; done", 1, FailureClass::Timeout, "timeout_seconds = 1"),
        // Not every engine tells that it was for memory.
        ("exec tail /dev/zero", 60, FailureClass::Agent, "exited with code 137"),
        ("kill -9 $$", 60, FailureClass::Agent, "exited with code 137"),
        ("exit 127", 60, FailureClass::Agent, "exited with code 127"),
    ] {
        let id = real.create(script, json!({"timeout_seconds": timeout}));
        let message = real.stage.gateway.ended(&id).await.status.error_message.unwrap();
        assert!(message.contains(said), "{script}: {message}");
        assert_eq!(real.stage.gateway.attempts(&id)[0].failure, Some(class), "{script}");
    }
    let config = |image: &str, program: &str| json!({"container": {"image": image, "argv": [program]}});
    for (config, said) in [
        (config(IMAGE, "agnt"), "cannot start \"agnt\""),
        (config("localhost/agl-controller-test:no-such", "sh"), "localhost/agl-controller-test:no-such cannot be had"),
    ] {
        let id = real.stage.gateway.create(config);
        let message = real.stage.gateway.ended(&id).await.status.error_message.unwrap();
        assert!(message.contains(said), "{message}");
        let attempts = real.stage.gateway.attempts(&id);
        assert_eq!((attempts.len(), attempts[0].failure), (1, Some(FailureClass::Infrastructure)), "{message}");
    }
}

#[tokio::test]
async fn a_real_container_goes_on_without_its_controller() {
    let leave = json!({"on_shutdown": "leave"});
    let Some(mut real) = Real::with(leave.clone()).await else { return };
    let script =
        "echo before; until test -e go; do sleep 0.1; done; wget -q -O - $AGL_EVENT_URL 2>&1 | head -c 9; exit 5";
    let id = real.create(script, json!({}));
    real.stage.gateway.until("it runs", |it| it.attempts(&id).iter().any(|at| at.state == AttemptState::Running)).await;
    real.stage.stop().await;
    std::fs::write(real.stage.attempt(&id, "0").work().join("go"), "").unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    real.start(json!({}));
    real.stage.gateway.ended(&id).await;
    let attempts = real.stage.gateway.attempts(&id);
    assert_eq!((attempts.len(), attempts[0].exit_code), (1, Some(5)), "{:?}", attempts[0].error_message);
    // The relay went on too: the gateway answered, if only that nobody may GET there.
    assert_eq!(read(real.stage.attempt(&id, "0").stdout()), "before\nwget: ser");
    real.stage.stop().await;
}
