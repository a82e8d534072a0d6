//! What agents and evaluators find, and how they are ended.

use std::time::{Duration, Instant};

use agl_core::attempt::FailureClass;
use agl_core::rollout::RolloutState;
use serde_json::{Value, json};

use crate::stage::{Stage, is_running, pid_in, read, sh, with};

#[tokio::test]
async fn an_agent_finds_its_contract_in_its_environment_and_no_key_but_its_own() {
    let stage = Stage::with(json!({"agent_url": "http://agents.example:9"})).await;
    let id = stage.gateway.create(sh("env; cat $AGL_INPUT; echo; pwd; tr '\\0' '\\n' < /proc/$PPID/cmdline"));
    stage.gateway.ended(&id).await;
    let dir = stage.attempt(&id, "0");
    let output = read(dir.stdout());
    let base = "http://agents.example:9/proxy/rollout/r0/attempt/0/mode/train/openai/v1";
    for line in [
        &format!("AGL_OPENAI_BASE_URL={base}"),
        "AGL_EVENT_URL=http://agents.example:9/api/rollouts/r0/attempt/0/events",
        "AGL_KEY=agent-r0-0",
        &format!("OPENAI_BASE_URL={base}"),
        &format!("OPENAI_API_BASE={base}"),
        "OPENAI_API_KEY=agent-r0-0",
        &dir.work().to_string_lossy(),
    ] {
        assert!(output.lines().any(|found| found == line), "{line} is not in {output}");
    }
    assert!(output.contains(r#"{"question":"2+2?"}"#));
    assert!(!output.contains("reward-"), "the reward key is nowhere in sight");
    let left: String = std::fs::read_dir(dir.path())
        .unwrap()
        .filter_map(|entry| std::fs::read_to_string(entry.unwrap().path()).ok())
        .collect();
    assert!(!left.contains("reward-"), "nor is it on disk");
}

#[tokio::test]
async fn an_original_agent_class_runs_sync_and_async_with_its_env_map() {
    let stage = Stage::empty().await;
    let package = stage.folder.path().join("my_agents");
    std::fs::create_dir(&package).unwrap();
    std::fs::write(
        package.join("__init__.py"),
        "import os\nclass Plain:\n    def run(self):\n        print('plain', os.environ['Q'], os.environ['ALL'])\n\
         class Later:\n    async def run(self):\n        print('later', os.environ['AGL_KEY'])\n\
         class Broken:\n    def run(self):\n        raise RuntimeError('broken on purpose')\nnot_a_class = 3\n",
    )
    .unwrap();
    let mut stage = stage;
    let python_path = stage.folder.path().to_str().unwrap();
    let map = json!({"Q": "input.question", "ALL": "input", "PYTHONPATH": python_path});
    let local = |class: &str| json!({"local": {"agent_class": class, "env_map": map}});
    let ids: Vec<String> = ["my_agents:Plain", "my_agents.Later", "my_agents:Broken", "my_agents:not_a_class"]
        .map(|class| stage.gateway.create(local(class)))
        .to_vec();
    let bad_path = stage.gateway.create(json!({"local": {"agent_class": "a:B", "env_map": {"X": "input.nope"}}}));
    stage.start(json!({}));
    let states = [RolloutState::Succeeded, RolloutState::Succeeded, RolloutState::Failed, RolloutState::Failed];
    for (id, state) in ids.iter().zip(states) {
        let rollout = stage.gateway.ended(id).await;
        assert_eq!(rollout.status.state, state, "{:?}", rollout.status.error_message);
    }
    assert_eq!(read(stage.attempt("r0", "0").stdout()), "plain 2+2? {\"question\": \"2+2?\"}\n");
    assert_eq!(read(stage.attempt("r1", "0").stdout()), "later agent-r1-0\n");
    assert!(read(stage.attempt("r2", "0").stderr()).contains("RuntimeError: broken on purpose"));
    assert!(read(stage.attempt("r3", "0").stderr()).contains("my_agents:not_a_class is not a class"));
    let message = stage.gateway.ended(&bad_path).await.status.error_message.unwrap();
    assert_eq!(message, "local.env_map path not found: input.nope");
}

#[tokio::test]
async fn a_timeout_ends_the_whole_family_even_those_that_ignore_it_or_left_the_group() {
    let stage = Stage::with(json!({"kill_grace_seconds": 0.3})).await;
    let script = "trap '' TERM\n\
        sh -c 'echo $$ > child; trap \"\" TERM; while :; do sleep 0.1; done' &\n\
        setsid sh -c 'echo $$ > runaway; sleep 600' &\n\
        setsid sh -c 'setsid sleep 600 & echo $! > orphan' &\n\
        echo $$ > agent; while :; do sleep 0.1; done";
    let id = stage.gateway.create(with(sh(script), json!({"timeout_seconds": 1})));
    let work = stage.attempt(&id, "0").work();
    let mut pids = Vec::new();
    for name in ["agent", "child", "runaway", "orphan"] {
        let pid = pid_in(&work.join(name)).await;
        assert!(is_running(pid), "{name}");
        pids.push(pid);
    }
    let rollout = stage.gateway.ended(&id).await;
    assert!(rollout.status.error_message.unwrap().contains("timeout_seconds = 1"));
    let attempt = &stage.gateway.attempts(&id)[0];
    assert_eq!((attempt.failure, attempt.exit_code), (Some(FailureClass::Timeout), Some(-9)));
    assert!(pids.iter().all(|pid| !is_running(*pid)), "{pids:?}");
}

#[tokio::test]
async fn what_an_agent_leaves_behind_ends_with_it() {
    let stage = Stage::with(json!({})).await;
    let id = stage.gateway.create(sh("setsid sleep 600 & echo $! > left; exit 0"));
    assert_eq!(stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
    assert!(!is_running(pid_in(&stage.attempt(&id, "0").work().join("left")).await));
}

#[tokio::test]
async fn output_beyond_the_limit_keeps_its_head_and_tail() {
    let stage = Stage::with(json!({"log_limit_bytes": 20000})).await;
    let id = stage.gateway.create(sh("seq 100000 199999; echo few >&2"));
    stage.gateway.ended(&id).await;
    let dir = stage.attempt(&id, "0");
    let log = read(dir.stdout());
    assert!(log.len() < 20_200, "{}", log.len());
    assert!(log.starts_with("100000\n100001\n") && log.ends_with("199998\n199999\n"));
    assert!(log.contains("bytes left out here"));
    assert_eq!(read(dir.stderr()), "few\n");
}

const POST_REWARD: &str = "import json, os, urllib.request\n\
    body = {'event_type': 'reward', 'data': {'value': 1.0, 'code': os.environ['AGL_EXIT_CODE'],\n\
        'input': json.load(open(os.environ['AGL_INPUT'])), 'work': sorted(os.listdir(os.environ['AGL_WORKDIR'])),\n\
        'out': open(os.environ['AGL_AGENT_STDOUT']).read(), 'err': open(os.environ['AGL_AGENT_STDERR']).read(),\n\
        'proxy': [name for name in os.environ if 'OPENAI_BASE' in name and name.startswith('AGL')]}}\n\
    request = urllib.request.Request(os.environ['AGL_EVENT_URL'], json.dumps(body).encode(),\n\
        {'content-type': 'application/json', 'authorization': 'Bearer ' + os.environ['AGL_KEY']})\n\
    urllib.request.urlopen(request)\n";

fn judged(script: &str, more: Value) -> Value {
    with(with(sh(script), json!({"evaluator": {"argv": ["python3", "-c", POST_REWARD]}})), more)
}

#[tokio::test]
async fn the_evaluator_judges_what_an_agent_left_also_after_failure_and_timeout() {
    let stage = Stage::with(json!({})).await;
    let tamper = "echo '{}' > $AGL_INPUT; echo '{}' > ../evaluator.input.json";
    let good = stage.gateway.create(judged(&format!("echo out; echo err >&2; touch answer; {tamper}"), json!({})));
    let bad = stage.gateway.create(judged("exit 7", json!({})));
    let slow = stage.gateway.create(judged("sleep 600", json!({"timeout_seconds": 1})));
    for id in [&good, &bad, &slow] {
        stage.gateway.ended(id).await;
    }
    let events = stage.gateway.events();
    let data = |id: &str| {
        let event = events.iter().find(|event| event["rollout"] == id).unwrap();
        assert_eq!(event["key"], format!("Bearer reward-{id}-0"));
        event["body"]["data"].clone()
    };
    let found = data(&good);
    assert_eq!((&found["code"], &found["out"], &found["err"]), (&json!("0"), &json!("out\n"), &json!("err\n")));
    assert_eq!(found["input"], json!({"question": "2+2?"}), "the agent cannot change what the evaluator judges by");
    assert_eq!(found["work"], json!(["answer"]));
    assert_eq!(found["proxy"], json!([]));
    assert_eq!(data(&bad)["code"], "7");
    assert_eq!(data(&slow)["code"], "-15");
    let classes = [&good, &bad, &slow].map(|id| stage.gateway.attempts(id)[0].failure);
    assert_eq!(classes, [None, Some(FailureClass::Agent), Some(FailureClass::Timeout)]);
}

#[tokio::test]
async fn the_agents_key_is_withdrawn_before_the_evaluator_begins_and_the_attempt_ends_after_it() {
    let stage = Stage::with(json!({})).await;
    let id = stage.gateway.create(judged("exit 0", json!({})));
    stage.gateway.ended(&id).await;
    assert_eq!(
        stage.gateway.calls()[2..],
        ["PATCH r0/0 running", "PATCH r0/0 agent_ended", "EVENT r0/0", "PATCH r0/0 succeeded", "PATCH r0 succeeded"]
    );
}

#[tokio::test]
async fn an_attempt_that_is_repeated_anyway_is_not_judged() {
    let stage = Stage::with(json!({})).await;
    stage.gateway.say_calls("0", 1, 503);
    let id = stage.gateway.create(judged("exit 1", json!({})));
    stage.gateway.ended(&id).await;
    let attempts: Vec<_> = stage.gateway.events().iter().map(|event| event["attempt"].clone()).collect();
    assert_eq!(attempts, ["1"]);
}

#[tokio::test]
async fn an_evaluator_that_fails_is_not_the_agents_failure_and_is_named() {
    let stage = Stage::with(json!({})).await;
    let config = with(sh("exit 0"), json!({"evaluator": {"argv": ["sh", "-c", "echo no tests found >&2; exit 2"]}}));
    let id = stage.gateway.create(config);
    let slow = stage
        .gateway
        .create(with(sh("exit 0"), json!({"evaluator": {"argv": ["sleep", "600"], "timeout_seconds": 1}})));
    let rollout = stage.gateway.ended(&id).await;
    let message = rollout.status.error_message.unwrap();
    assert!(
        message.contains("the evaluator failed: it exited with code 2") && message.contains("no tests found"),
        "{message}"
    );
    let attempts = stage.gateway.attempts(&id);
    assert_eq!((attempts.len(), attempts[0].failure), (1, Some(FailureClass::Infrastructure)));
    let message = stage.gateway.ended(&slow).await.status.error_message.unwrap();
    assert!(message.contains("ran longer than its timeout_seconds"), "{message}");
}

#[tokio::test]
async fn an_agent_that_writes_without_end_is_not_slowed_by_a_full_log() {
    let stage = Stage::with(json!({"log_limit_bytes": 4096})).await;
    let started = Instant::now();
    let id = stage.gateway.create(sh("head -c 50000000 /dev/zero"));
    assert_eq!(stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
    assert!(started.elapsed() < Duration::from_secs(20));
}
