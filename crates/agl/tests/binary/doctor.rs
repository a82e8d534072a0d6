//! `agl doctor` on harnesses of several habits, and `agl init`, whose files it reads.

use std::fs;
use std::path::Path;
use std::time::Duration;

use agl_mock_llm::{MockLlm, Script, WhenDone};
use serde_json::{Value, json};

use crate::support::{Running, agl, eventually, free_port, get, http, python, recipe, test_agent};

const LIMIT: Duration = Duration::from_secs(90);

/// What the doctor says of a harness of this habit, and its exit code.
fn looked_at(habit: &str, more: &[&str]) -> (String, Option<i32>) {
    let command = format!("{} {} {habit}", python(), test_agent("looked_at.py").display());
    doctor(&[&["--command", &command], more].concat())
}

fn doctor(args: &[&str]) -> (String, Option<i32>) {
    let mut command = agl();
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
        command.env_remove(name);
    }
    let output = command.arg("doctor").args(args).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (String::from_utf8(said).unwrap(), output.status.code())
}

fn says(said: &str, expected: &[&str]) {
    for part in expected {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
}

#[test]
fn a_harness_that_keeps_its_history_is_one_row_whole_or_streamed() {
    for (habit, dialect) in [("whole", "chat (2×)"), ("streamed", "chat, streamed (2×)")] {
        let (said, code) = looked_at(habit, &["--evaluator", "true"]);
        let expected = [
            "2 calls captured",
            dialect,
            "2 of 2 answered calls have them",
            "one for every sampled token",
            "2 calls in 1 row: 1 merge",
        ];
        says(&said, &expected);
        // The evaluator posted nothing, and that is what fails.
        says(&said, &["FAILS  reward", "the evaluator posted none"]);
        assert_eq!(code, Some(1), "{said}");
    }
    let (said, code) = looked_at("whole", &[]);
    says(&said, &["look  reward", "none was posted"]);
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn a_harness_that_rewrites_its_history_is_shown_the_first_tokens_that_differ() {
    let (said, code) = looked_at("forgetful", &[]);
    says(&said, &["2 calls in 2 rows: 0 merges, 1 break", "call 1 parts from call 0 at token", "rewritten history"]);
    // Both sides decoded, with their ids: `<tool_call>` and what stands in its place.
    says(&said, &["was       \"<tool_call>shell", "[60, 116", "came back \"(I ran a command.)<|end|>", "[40, 73"]);
    assert_eq!(code, Some(0), "it trains, if slower: {said}");
}

#[test]
fn a_harness_that_bypasses_the_gateway_is_told_where_it_went() {
    let (said, code) = looked_at("bypass", &[]);
    says(&said, &["FAILS  calls", "no model through the gateway", "api.openai.com:443 was called 1× past the gateway"]);
    says(&said, &["OPENAI_BASE_URL"]);
    assert_eq!(code, Some(1));
}

#[test]
fn a_wrong_path_and_a_wrong_key_are_named() {
    let (said, code) = looked_at("wrong_path", &[]);
    says(&said, &["POST /openai/v1/v1/chat/completions was refused with 404", "put behind the base URL"]);
    says(&said, &["POST /openai/v1/chat/completions was refused with 401", "without the attempt's key"]);
    assert_eq!(code, Some(1));
}

#[test]
fn a_harness_that_crashes_is_quoted() {
    let (said, code) = looked_at("crash", &[]);
    says(
        &said,
        &["FAILS  agent", "exited with code 1", "│ the harness is broken", "1 call captured", "nothing to merge"],
    );
    assert_eq!(code, Some(1));
    says(&doctor(&["--command", "no-such-harness"]).0, &["no-such-harness"]);
}

#[test]
fn the_checklist_is_json_too_and_the_probe_says_what_it_is_told() {
    let command = format!("{} {} whole", python(), test_agent("looked_at.py").display());
    let output =
        agl().args(["doctor", "--json", "--answer", "Nothing to see.", "--command", &command]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let verdict = |name: &str| checks.iter().find(|check| check["name"] == name).unwrap()["verdict"].clone();
    assert_eq!(verdict("agent"), "ok");
    assert_eq!(verdict("turns"), "unknown");
    assert!(report["times"]["waiting_for_model"].as_f64().unwrap() > 0.0);
}

#[test]
fn a_recipe_is_looked_at_with_its_own_policy_task_and_evaluator() {
    let folder = tempfile::tempdir().unwrap();
    let tasks = folder.path().join("tasks.jsonl");
    fs::write(&tasks, "{\"data_id\": \"q\", \"question\": \"What is 2 * 3 + 4?\", \"answer\": 10}\n").unwrap();
    let run_file = recipe().join("run.toml");
    let data = format!("data.train_files=[{tasks:?}]");
    let out = folder.path().join("out");
    let args = [run_file.to_str().unwrap(), "--set", &data, "--out", out.to_str().unwrap()];
    let (said, code) = doctor(&args);
    says(&said, &["policy, the native engine", "ok  reward", "ok  token ids", "ok  log-probs"]);
    assert_eq!(code, Some(0), "{said}");
    says(&said, &[&format!("agl serve --store sqlite:{}", out.join("gateway.db").display())]);
    let (said, code) = doctor(&args);
    says(&said, &["holds an earlier rollout", "choose another"]);
    assert_eq!(code, Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_ones_own_or_one_that_a_gateway_knows_answers() {
    let script = Script { when_done: WhenDone::Probe, ..Script::default() };
    let server = MockLlm::start(script).await.unwrap();
    // What the server is called there is asked of it, and its tokens are decoded by it.
    let (said, code) = looked_at("forgetful", &["--endpoint", &server.endpoint()]);
    says(&said, &["rewritten history", "was       \"<tool_call>shell", "came back \"(I ran a command.)<|end|>"]);
    assert_eq!(code, Some(0), "{said}");

    let folder = tempfile::tempdir().unwrap();
    let url = format!("http://127.0.0.1:{}", free_port());
    let mut command = agl();
    command.args(["serve", "--store", "memory", "--listen", url.trim_start_matches("http://")]);
    let _gateway = Running::start(&mut command, "serve", folder.path());
    eventually("the gateway is up", LIMIT, || get(&format!("{url}/healthz")).is_some());
    let model = json!([{"model": "mine", "endpoint": server.endpoint()}]);
    http("POST", &format!("{url}/api/models"), "", Some(&model)).unwrap();
    let asked = server.received();
    let (said, code) = looked_at("whole", &["--registered", "mine", "--gateway", &url]);
    says(&said, &["2 calls in 1 row: 1 merge", &server.endpoint()]);
    assert_eq!((code, server.received() - asked), (Some(0), 2), "{said}");
    assert_eq!(
        get(&format!("{url}/api/rollouts?state_in=succeeded")).unwrap(),
        json!([]),
        "that gateway is left alone"
    );
    let (said, code) = looked_at("whole", &["--registered", "other", "--gateway", &url]);
    says(&said, &["--registered other", "it knows mine"]);
    assert_eq!(code, Some(2));
    let nobody = format!("http://127.0.0.1:{}/v1", free_port());
    let (said, code) = looked_at("whole", &["--endpoint", &nobody]);
    says(&said, &[&nobody, "--model-name"]);
    assert_eq!(code, Some(1));
}

#[test]
fn what_is_to_be_looked_at_must_be_said() {
    let folder = tempfile::tempdir().unwrap();
    let output = agl().arg("doctor").current_dir(folder.path()).output().unwrap();
    says(&String::from_utf8_lossy(&output.stderr), &["--command", "run file"]);
    assert_eq!(output.status.code(), Some(2));
    let (said, code) = doctor(&["--command", "true", "--input", "{"]);
    says(&said, &["--input {"]);
    assert_eq!(code, Some(2));
}

/// Runs `agl init` in the folder; what it printed.
fn init(folder: &Path, args: &[&str]) -> (String, Option<i32>) {
    let output = agl().arg("init").args(args).current_dir(folder).output().unwrap();
    (String::from_utf8([output.stdout, output.stderr].concat()).unwrap(), output.status.code())
}

#[test]
fn what_init_writes_passes_the_doctor() {
    let folder = tempfile::tempdir().unwrap();
    let (said, code) = init(folder.path(), &["mine"]);
    says(&said, &["wrote mine/run.toml", "wrote mine/agent.py", "agl doctor mine/run.toml"]);
    assert_eq!(code, Some(0));
    let run_file = folder.path().join("mine/run.toml");
    let (said, code) = doctor(&[run_file.to_str().unwrap()]);
    says(&said, &["a probe", "2 calls captured", "2 calls in 1 row: 1 merge", "ok  reward     0"]);
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn init_takes_a_command_and_overwrites_nothing_unasked() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tasks.jsonl"), "mine\n").unwrap();
    let (said, code) = init(folder.path(), &["--command", "my \"agent\" '{{ input.question }}'"]);
    says(&said, &["tasks.jsonl", "--force"]);
    assert_eq!(code, Some(2));
    assert_eq!(fs::read_to_string(folder.path().join("tasks.jsonl")).unwrap(), "mine\n");
    assert!(!folder.path().join("run.toml").exists());
    let (_, code) = init(folder.path(), &["--force", "--command", "echo \"a\" '{{ input.question }}'"]);
    assert_eq!(code, Some(0));
    assert!(!folder.path().join("agent.py").exists());
    let run_file = folder.path().join("run.toml");
    let (said, _) = doctor(&[run_file.to_str().unwrap()]);
    says(&said, &["ok  agent", "no model through the gateway"]);
    // The command runs in the folder that it was given in.
    let here = folder.path().canonicalize().unwrap();
    says(&fs::read_to_string(run_file).unwrap(), &[&format!("cwd = \"{}\"", here.display())]);
}
