//! Given this rollout and this engine, the controller makes exactly these requests.

use std::time::Duration;

use agl_core::attempt::FailureClass;
use agl_core::rollout::RolloutState;
use serde_json::{Value, json};

use crate::dock::{AGENT, Dock, EVALUATOR, boxed, judged};
use crate::stage::{read, with};

#[tokio::test]
async fn a_good_run_is_claimed_made_watched_and_reported() {
    let dock = Dock::with(json!({}), json!({})).await;
    let gateway = &dock.stage.gateway;
    let id = gateway.create(boxed());
    gateway.until("it is reported to run", |it| it.calls().contains(&"PATCH r0/0 running".to_owned())).await;
    dock.engine.says(AGENT, "out", "err");
    dock.engine.says(AGENT, "put\n", "or\n");
    dock.engine.exits(AGENT, 0);
    let rollout = gateway.ended(&id).await;
    assert_eq!(rollout.status.state, RolloutState::Succeeded);
    let calls = ["POST r0/0", "PATCH r0 running 0", "PATCH r0/0 running", "PATCH r0/0 agent_ended"];
    assert_eq!(gateway.calls(), [&calls[..], &["PATCH r0/0 succeeded", "PATCH r0 succeeded"]].concat());
    assert_eq!(dock.engine.calls(), ["create", "start", "remove"].map(|word| format!("{word} {AGENT}")));
    let dir = dock.stage.attempt("r0", "0");
    assert_eq!((read(dir.stdout()), read(dir.stderr())), ("output\n".to_owned(), "error\n".to_owned()));
    let attempt = &gateway.attempts(&id)[0];
    assert_eq!((attempt.runner["kind"].as_str(), attempt.exit_code), (Some("container"), Some(0)));
    assert_eq!(json!([attempt.runner["container"], attempt.runner["container_id"]]), json!([AGENT, "id1"]));
}

#[tokio::test]
async fn a_container_is_confined_unless_it_is_said_otherwise() {
    let dock = Dock::with(json!({}), json!({})).await;
    dock.stage.gateway.create(boxed());
    dock.engine.runs(AGENT).await;
    let walls = dock.engine.container(AGENT).unwrap().body["HostConfig"].clone();
    assert_eq!(walls["NetworkMode"], "none");
    assert_eq!(json!([walls["ReadonlyRootfs"], walls["Privileged"]]), json!([true, false]));
    assert_eq!(walls["Tmpfs"], json!({"/tmp": "rw,exec,nosuid,nodev,mode=1777"}));
    assert_eq!(json!([walls["CapDrop"], walls["CapAdd"]]), json!([["ALL"], null]));
    assert_eq!(walls["SecurityOpt"], json!(["no-new-privileges"]));
    assert_eq!(json!([walls["Memory"], walls["MemorySwap"]]), json!([4_294_967_296_u64, 4_294_967_296_u64]));
    assert_eq!(json!([walls["PidsLimit"], walls["NanoCpus"]]), json!([1024, null]));
    assert_eq!(json!([walls["AutoRemove"], walls["RestartPolicy"]["Name"]]), json!([false, "no"]));
}

#[tokio::test]
async fn walls_can_be_moved_one_by_one() {
    let dock = Dock::with(
        json!({"agent_url": "http://gateway:8080"}),
        json!({"network": "mine", "memory_bytes": 1000, "pids_limit": 0, "cpus": 0.5, "read_only_root": false,
            "tmpfs": ["/a"], "cap_add": ["CHOWN"], "security_opt": ["label=disable"], "runtime": "runsc",
            "extra_hosts": ["host.docker.internal:host-gateway"], "user": "7:7"}),
    )
    .await;
    dock.stage.gateway.create(boxed());
    dock.engine.runs(AGENT).await;
    let body = dock.engine.container(AGENT).unwrap().body;
    let walls = &body["HostConfig"];
    assert_eq!(json!([walls["NetworkMode"], walls["Runtime"], body["User"]]), json!(["mine", "runsc", "7:7"]));
    assert_eq!(json!([walls["Memory"], walls["PidsLimit"], walls["NanoCpus"]]), json!([1000, null, 500_000_000]));
    assert_eq!(json!([walls["ReadonlyRootfs"], walls["Tmpfs"]]), json!([false, {"/a": ""}]));
    assert_eq!(json!([walls["CapAdd"], walls["CapDrop"]]), json!([["CHOWN"], ["ALL"]]));
    assert_eq!(walls["SecurityOpt"], json!(["no-new-privileges", "label=disable"]));
    assert_eq!(walls["ExtraHosts"], json!(["host.docker.internal:host-gateway"]));
    // On a network nothing stands before the image's own program, and the gateway is where agent_url says.
    assert_eq!(json!([body["Entrypoint"], body["Cmd"]]), json!([["/entry"], ["2+2?"]]));
    let container = dock.engine.container(AGENT).unwrap();
    assert_eq!(container.env("AGL_OPENAI_BASE_URL").unwrap(), format!("http://gateway:8080{PROXY}"));
    assert_eq!((container.env("AGL_RELAY_TOKEN"), container.mount("/agl/relay")), (None, None));
}

const PROXY: &str = "/proxy/rollout/r0/attempt/0/mode/train/openai/v1";

#[tokio::test]
async fn an_agent_without_network_gets_the_way_to_the_gateway_and_the_key_of_its_attempt() {
    let dock = Dock::with(json!({}), json!({})).await;
    dock.stage.gateway.create(boxed());
    dock.engine.runs(AGENT).await;
    let container = dock.engine.container(AGENT).unwrap();
    for name in ["AGL_OPENAI_BASE_URL", "OPENAI_BASE_URL"] {
        assert_eq!(container.env(name).unwrap(), format!("http://127.0.0.1:14747{PROXY}"));
    }
    for name in ["AGL_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY"] {
        assert_eq!(container.env(name).unwrap(), "agent-r0-0");
    }
    assert!(!container.body.to_string().contains("reward-r0-0"), "the evaluator's key is none of the agent's business");
    let work = dock.stage.folder.path().join("work").canonicalize().unwrap();
    let folder = |path: &str| work.join(path).to_string_lossy().into_owned();
    assert_eq!(container.mount("/agl/work"), Some((folder("rollouts/r0/0/work"), false)));
    assert_eq!(container.mount("/agl/input.json"), Some((folder("rollouts/r0/0/input.json"), true)));
    assert_eq!(container.mount("/agl/relay"), Some((folder("relay"), true)));
    assert_eq!(container.env("AGL_INPUT").unwrap(), "/agl/input.json");
    assert_eq!(container.body["WorkingDir"], "/agl/work");
    // The relay is the program; behind it stands what would run without it.
    let words = |key: &str| serde_json::from_value::<Vec<String>>(container.body[key].clone()).unwrap();
    let command = [words("Entrypoint"), words("Cmd")].concat();
    assert!(command[0].starts_with("/agl/relay/"), "{command:?}");
    let tail = ["relay", "inside", "14747", "/agl/relay/gateway.sock", "/entry", "2+2?"];
    assert_eq!(command[command.len() - tail.len()..], tail);
    let labels = &container.body["Labels"];
    assert_eq!(json!([labels["agl/rollout-id"], labels["agl/attempt-id"]]), json!(["r0", "0"]));
    assert_eq!(labels["app.kubernetes.io/managed-by"], "agl");
    // Whatever user the image has can write there, and nobody else of this host comes near.
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &str| std::fs::metadata(folder(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("rollouts/r0/0"), mode("rollouts/r0/0/work")), (0o700, 0o777));
}

#[tokio::test]
async fn a_gateway_that_containers_cannot_reach_is_refused_before_anything_runs() {
    for (agent_url, network, said) in [
        ("http://127.0.0.1:8080", "mine", "in a container of a network of its own that is the container itself"),
        ("https://gateway", "gateway", "cannot stand in for a server with a certificate"),
    ] {
        let dock = Dock::empty().await;
        let settings =
            crate::dock::settings_at(&dock.engine.socket, json!({"agent_url": agent_url}), json!({"network": network}));
        let error = dock.stage.controller(settings).fails().await.to_string();
        assert!(error.contains(said) && error.contains(agent_url), "{error}");
    }
}

#[tokio::test]
async fn an_engine_that_is_not_there_is_named() {
    let dock = Dock::empty().await;
    dock.engine.goes_away();
    let settings = crate::dock::settings_at(&dock.engine.socket, json!({}), json!({}));
    let error = dock.stage.controller(settings).fails().await.to_string();
    assert!(error.contains("finds no Docker or Podman") && error.contains("engine.sock"), "{error}");
}

#[tokio::test]
async fn a_mount_of_what_is_not_there_fails_the_rollout_and_names_it() {
    let dock = Dock::with(json!({}), json!({})).await;
    for source in ["/no/such/folder", "/tmp,ro"] {
        let mounts = json!([{"source": source, "target": "/data"}]);
        let id = dock.stage.gateway.create(json!({"container": {"image": "agent:1", "mounts": mounts}}));
        let message = dock.stage.gateway.ended(&id).await.status.error_message.unwrap();
        assert!(message.contains(source), "{message}");
    }
    assert!(dock.engine.names().is_empty());
}

#[tokio::test]
async fn every_word_of_a_container_is_a_template() {
    let dock = Dock::with(json!({}), json!({})).await;
    dock.engine.has_image("task-4:r0", json!({}));
    let data = tempfile::tempdir().unwrap();
    std::fs::create_dir(data.path().join("r0")).unwrap();
    let source = data.path().to_str().unwrap();
    dock.stage.gateway.create(json!({"container": {
        "image": "task-4:{{ rollout_id }}", "entrypoint": ["sh", "-c"], "argv": ["agent '{{ input.question }}' {{ work_dir }}"],
        "env": {"URL": "{{ openai_base_url }}", "TOKEN": "{{ key }}"}, "cwd": "/src/{{ attempt_id }}", "user": "{{ mode }}",
        "mounts": [
            {"source": format!("{source}/{{{{ rollout_id }}}}"), "target": "/data"},
            {"source": source, "target": "/out", "writable": true},
        ],
    }}));
    dock.engine.runs(AGENT).await;
    let container = dock.engine.container(AGENT).unwrap();
    let body = &container.body;
    assert_eq!(json!([body["Image"], body["WorkingDir"], body["User"]]), json!(["task-4:r0", "/src/0", "train"]));
    assert_eq!(container.env("TOKEN").unwrap(), "agent-r0-0");
    assert_eq!(container.env("URL"), container.env("AGL_OPENAI_BASE_URL"));
    assert_eq!(container.mount("/data"), Some((format!("{source}/r0"), true)));
    assert_eq!(container.mount("/out"), Some((source.to_owned(), false)));
    let command: Vec<String> = serde_json::from_value(body["Cmd"].clone()).unwrap();
    assert_eq!(command[command.len() - 3..], ["sh", "-c", "agent '2+2?' /agl/work"]);
}

#[tokio::test]
async fn a_rollout_that_cannot_be_run_as_it_is_configured_says_what_is_wrong() {
    let dock = Dock::with(json!({}), json!({})).await;
    dock.engine.has_image("empty:1", json!({}));
    for (config, said) in [
        (json!({}), "missing config.container.image"),
        (json!({"container": {"image": ""}}), "missing config.container.image"),
        (json!({"container": {"image": "{{ input.image }}"}}), "there is no input.image"),
        (json!({"container": {"image": "empty:1"}}), "config.container.argv is empty"),
    ] {
        let id = dock.stage.gateway.create(config);
        let message = dock.stage.gateway.ended(&id).await.status.error_message.unwrap();
        assert!(message.contains(said), "{message}");
        assert_eq!(dock.stage.gateway.attempts(&id).len(), 1);
    }
    assert_eq!(dock.engine.names(), Vec::<String>::new());
}

/// How a container ends, whose failure that is, and what the message says.
#[tokio::test]
async fn the_end_of_a_container_says_whose_failure_it_was() {
    type Act = fn(&crate::engine::FakeEngine);
    let cases: [(Act, FailureClass, usize, &str); 5] = [
        (|it| it.exits(AGENT, 3), FailureClass::Agent, 1, "exited with code 3"),
        (|it| it.runs_out_of_memory(AGENT), FailureClass::Agent, 1, "OOMKilled: it used more memory"),
        (|it| it.exits(AGENT, 137), FailureClass::Agent, 1, "exited with code 137"),
        (|it| it.vanishes(AGENT), FailureClass::Infrastructure, 2, "agl-rollout-r0-1 was removed by somebody else"),
        (
            |it| {
                it.began_earlier(AGENT, Duration::from_secs(70));
                it.exits(AGENT, 0);
            },
            FailureClass::Timeout,
            1,
            "timeout_seconds = 60",
        ),
    ];
    for (act, class, attempts, said) in cases {
        let dock = Dock::with(json!({"max_attempts": 2}), json!({})).await;
        let id = dock.stage.gateway.create(boxed());
        dock.engine.runs(AGENT).await;
        act(&dock.engine);
        if attempts == 2 {
            dock.engine.runs("agl-rollout-r0-1").await;
            dock.engine.vanishes("agl-rollout-r0-1");
        }
        let rollout = dock.stage.gateway.ended(&id).await;
        let message = rollout.status.error_message.unwrap();
        assert!(message.contains(said), "{message}");
        let classes: Vec<_> = dock.stage.gateway.attempts(&id).iter().map(|attempt| attempt.failure).collect();
        assert_eq!(classes, vec![Some(class); attempts], "{message}");
        assert_eq!(dock.engine.names(), Vec::<String>::new(), "{message}");
    }
}

#[tokio::test]
async fn a_container_beyond_its_time_limit_is_stopped() {
    let dock = Dock::with(json!({}), json!({})).await;
    let id = dock.stage.gateway.create(with(boxed(), json!({"timeout_seconds": 1})));
    let message = dock.stage.gateway.ended(&id).await.status.error_message.unwrap();
    assert!(message.contains("timeout_seconds = 1"), "{message}");
    assert_eq!(dock.stage.gateway.attempts(&id)[0].failure, Some(FailureClass::Timeout));
    assert_eq!(dock.engine.calls(), ["create", "start", "stop", "remove"].map(|word| format!("{word} {AGENT}")));
}

#[tokio::test]
async fn a_program_that_the_relay_cannot_start_is_a_fault_of_the_configuration() {
    let dock = Dock::with(json!({"max_attempts": 2}), json!({})).await;
    let id = dock.stage.gateway.create(boxed());
    dock.engine.runs(AGENT).await;
    let token = dock.engine.container(AGENT).unwrap().env("AGL_RELAY_TOKEN").unwrap();
    dock.engine.says(AGENT, "", &format!("agl relay {token}: cannot start \"/entry\": No such file or directory\n"));
    dock.engine.exits(AGENT, 127);
    let message = dock.stage.gateway.ended(&id).await.status.error_message.unwrap();
    assert_eq!(message, "cannot start \"/entry\": No such file or directory");
    assert_eq!(dock.stage.gateway.attempts(&id).len(), 1);
    // Without the token it is the agent that says so.
    let id = dock.stage.gateway.create(boxed());
    dock.engine.runs("agl-rollout-r1").await;
    dock.engine.says("agl-rollout-r1", "", "agl relay : cannot start \"/entry\": No such file or directory\n");
    dock.engine.exits("agl-rollout-r1", 127);
    dock.stage.gateway.ended(&id).await;
    assert_eq!(dock.stage.gateway.attempts(&id)[0].failure, Some(FailureClass::Agent));
}

#[tokio::test]
async fn what_the_engine_refuses_fails_the_attempt_with_its_words() {
    for (call, code, said, attempts) in [
        ("create", 400, "invalid mount config for type \"bind\": bind source path does not exist: /data", 1),
        ("start", 404, "network mine not found", 1),
        ("start", 400, "exec: \"agent\": executable file not found in $PATH: unknown", 1),
        ("start", 500, "cannot allocate memory", 2),
    ] {
        let dock = Dock::empty().await;
        for name in [AGENT, "agl-rollout-r0-1"] {
            dock.engine.fail(&format!("{call} {name}"), code, said, 1);
        }
        let mut dock = dock;
        dock.start(json!({"max_attempts": 2}), json!({}));
        let id = dock.stage.gateway.create(boxed());
        let message = dock.stage.gateway.ended(&id).await.status.error_message.unwrap();
        assert!(message.contains(said), "{message}");
        let made = dock.stage.gateway.attempts(&id);
        assert_eq!((made.len(), made[0].failure), (attempts, Some(FailureClass::Infrastructure)), "{message}");
        assert_eq!(dock.engine.names(), Vec::<String>::new());
    }
}

#[tokio::test]
async fn a_limit_that_the_engine_cannot_keep_fails_the_attempt() {
    let dock = Dock::with(json!({}), json!({})).await;
    dock.engine.inside(|inside| {
        inside.warnings = vec!["Your kernel does not support memory limit capabilities. Limitation discarded."];
    });
    let id = dock.stage.gateway.create(boxed());
    let message = dock.stage.gateway.ended(&id).await.status.error_message.unwrap();
    assert!(message.contains("cannot confine") && message.contains("Limitation discarded"), "{message}");
    assert_eq!(dock.engine.calls(), ["create", "remove"].map(|word| format!("{word} {AGENT}")), "it never ran");
}

#[tokio::test]
async fn an_image_is_fetched_when_it_is_missing_or_always_or_never() {
    for (pull, image, expected) in [
        ("missing", "agent:1", &["create", "start"][..]),
        ("missing", "other:2", &["pull other:2", "create", "start"][..]),
        ("always", "agent:1", &["pull agent:1", "create", "start"][..]),
        ("never", "agent:1", &["create", "start"][..]),
    ] {
        let dock = Dock::with(json!({}), json!({"pull": pull})).await;
        dock.stage.gateway.create(json!({"container": {"image": image}}));
        dock.engine.runs(AGENT).await;
        let full = |word: &&str| if word.contains(' ') { (*word).to_owned() } else { format!("{word} {AGENT}") };
        assert_eq!(dock.engine.calls(), expected.iter().map(full).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn an_image_that_does_not_exist_is_not_asked_for_again_and_a_registry_that_is_away_is() {
    let gone = "pull access denied for nope, repository does not exist or may require 'docker login'";
    let away = "Get \"https://registry/v2/\": dial tcp: lookup registry: no such host";
    for (pull, says, attempts, said) in [
        ("missing", vec![gone], 1, gone),
        ("missing", vec![away; 20], 2, away),
        ("never", vec![], 1, "it is not there, and controller.container.pull = \"never\""),
    ] {
        let dock = Dock::with(json!({"max_attempts": 2}), json!({"pull": pull})).await;
        dock.engine.registry_says("nope:1", &says);
        let id = dock.stage.gateway.create(json!({"container": {"image": "nope:1"}}));
        let message = dock.stage.gateway.ended(&id).await.status.error_message.unwrap();
        assert!(message.contains("its image nope:1 cannot be had") && message.contains(said), "{message}");
        let made = dock.stage.gateway.attempts(&id);
        assert_eq!((made.len(), made[0].failure), (attempts, Some(FailureClass::Infrastructure)));
    }
    let dock = Dock::with(json!({}), json!({})).await;
    dock.engine.registry_says("later:1", &[away]);
    let id = dock.stage.gateway.create(json!({"container": {"image": "later:1"}}));
    dock.engine.runs(AGENT).await;
    assert_eq!(dock.stage.gateway.attempts(&id).len(), 1, "it came within its time");
}

#[tokio::test]
async fn the_evaluator_judges_in_another_container_of_the_same_image() {
    for (code, class) in [(0, None), (7, Some(FailureClass::Agent))] {
        let dock = Dock::with(json!({}), json!({"pull": "always"})).await;
        let id = dock.stage.gateway.create(judged());
        dock.engine.runs(AGENT).await;
        assert_eq!(dock.engine.names(), [AGENT]);
        dock.engine.says(AGENT, "the answer", "");
        dock.engine.exits(AGENT, code);
        dock.engine.runs(EVALUATOR).await;
        assert_eq!(dock.stage.gateway.calls()[3..], ["PATCH r0/0 agent_ended"], "its key has ended before");
        let evaluator = dock.engine.container(EVALUATOR).unwrap();
        assert_eq!(evaluator.env("AGL_KEY").unwrap(), "reward-r0-0");
        assert_eq!(evaluator.env("AGL_EXIT_CODE").unwrap(), code.to_string());
        assert_eq!(evaluator.env("AGL_WORKDIR").unwrap(), "/agl/work");
        assert_eq!(evaluator.env("AGL_EVENT_URL").unwrap(), "http://127.0.0.1:14747/api/rollouts/r0/attempt/0/events");
        assert!(!evaluator.body["Env"].to_string().contains("agent-r0-0"));
        for name in ["AGL_INPUT", "AGL_AGENT_STDOUT", "AGL_AGENT_STDERR"] {
            let (source, read_only) = evaluator.mount(&evaluator.env(name).unwrap()).unwrap();
            assert!(read_only && std::fs::exists(&source).unwrap(), "{name} is {source}");
        }
        let (stdout, _) = evaluator.mount("/agl/stdout.log").unwrap();
        assert_eq!(read(stdout), "the answer");
        // The image that the agent ran in, not what its name has come to mean since.
        assert_eq!(evaluator.body["Image"], "sha256:agent:1");
        assert_eq!(evaluator.body["HostConfig"]["NetworkMode"], "none");
        let command: Vec<String> = serde_json::from_value(evaluator.body["Cmd"].clone()).unwrap();
        assert_eq!(command[command.len() - 2..], ["judge", "2+2?"], "the image's entrypoint is the agent's alone");
        dock.engine.exits(EVALUATOR, 0);
        dock.stage.gateway.ended(&id).await;
        assert_eq!(dock.stage.gateway.attempts(&id)[0].failure, class);
        assert_eq!(dock.engine.names(), Vec::<String>::new());
        let pulls = dock.engine.calls().iter().filter(|call| call.starts_with("pull")).count();
        assert_eq!(pulls, 1);
    }
}

#[tokio::test]
async fn an_evaluator_that_fails_is_not_the_agents_failure_and_is_named() {
    type Act = fn(&crate::engine::FakeEngine);
    let cases: [(u64, Act, &str); 3] = [
        (
            60,
            |it| it.exits(EVALUATOR, 2),
            "the evaluator failed: it exited with code 2; its stderr ends with: no tests",
        ),
        (60, |it| it.vanishes(EVALUATOR), "the evaluator failed: its container agl-rollout-r0.evaluator was removed"),
        (1, |_| {}, "the evaluator failed: it ran longer than its timeout_seconds"),
    ];
    for (timeout, act, said) in cases {
        let dock = Dock::with(json!({}), json!({})).await;
        let evaluator: Value = json!({"argv": ["judge"], "timeout_seconds": timeout});
        let id = dock.stage.gateway.create(with(boxed(), json!({"evaluator": evaluator})));
        dock.engine.runs(AGENT).await;
        dock.engine.exits(AGENT, 0);
        dock.engine.runs(EVALUATOR).await;
        dock.engine.says(EVALUATOR, "", "no tests");
        act(&dock.engine);
        let message = dock.stage.gateway.ended(&id).await.status.error_message.unwrap();
        assert!(message.contains(said), "{message}");
        let attempts = dock.stage.gateway.attempts(&id);
        assert_eq!((attempts.len(), attempts[0].failure), (1, Some(FailureClass::Infrastructure)));
    }
}

#[tokio::test]
async fn a_cancelled_rollout_loses_its_container() {
    let dock = Dock::with(json!({}), json!({})).await;
    let id = dock.stage.gateway.create(judged());
    dock.engine.runs(AGENT).await;
    dock.stage.gateway.cancel(&id);
    dock.engine.until("the container is gone", |it| it.names().is_empty()).await;
    dock.stage.gateway.until("the attempt is cancelled", |it| it.attempts(&id)[0].failure.is_some()).await;
    assert_eq!(dock.stage.gateway.attempts(&id)[0].failure, Some(FailureClass::Cancelled));
    assert!(dock.engine.calls().contains(&format!("stop {AGENT}")), "it is asked before it is killed");
}

#[tokio::test]
async fn containers_that_are_to_be_kept_are_kept() {
    let mut dock = Dock::with(json!({}), json!({"keep_containers": true})).await;
    let id = dock.stage.gateway.create(boxed());
    dock.engine.runs(AGENT).await;
    dock.engine.exits(AGENT, 0);
    dock.stage.gateway.ended(&id).await;
    dock.stage.stop().await;
    dock.start(json!({}), json!({"keep_containers": true}));
    let next = dock.stage.gateway.create(boxed());
    dock.engine.runs("agl-rollout-r1").await;
    dock.stage.gateway.cancel(&next);
    dock.engine.until("it is stopped", |it| it.calls().contains(&"stop agl-rollout-r1".to_owned())).await;
    assert_eq!(dock.engine.names(), [AGENT, "agl-rollout-r1"]);
}
