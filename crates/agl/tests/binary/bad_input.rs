//! Mistakes that people make: each has a message that names the thing and the remedy, and the right exit code.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use crate::support::{Running, agl, babbling_policy, eventually, free_port, get, http, python, questions, recipe};
use agl_mock_llm::{Fault, FaultRule, MockLlm, Script};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(90);

/// Runs to the end and expects failure; returns what was said on standard error.
fn refused(args: &[&str], code: i32) -> String {
    let output = agl().args(args).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{message}");
    message
}

fn contains_all(message: &str, expected: &[&str]) {
    for part in expected {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

fn write(folder: &Path, text: &str) -> String {
    let path = folder.join("run.toml");
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn an_unknown_key_of_a_run_file_is_named_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "[actor.optim]\nlearning_rate = 1e-4\n");
    contains_all(&refused(&["up", &path], 2), &["run.toml", "learning_rate", "actor.optim", "lr"]);
    let path = write(folder.path(), "[trainr]\n");
    contains_all(&refused(&["train", &path], 2), &["run.toml", "trainr", "trainer"]);
    contains_all(&refused(&["serve", "--set", "gateway.lisen=1"], 2), &["--set: ", "lisen", "listen"]);
    let path = write(folder.path(), "actor.kl_loss_type = \"k9\"\n");
    contains_all(&refused(&["train", &path], 2), &["run.toml: `actor.kl_loss_type`: ", "k9", "k3"]);
}

#[test]
fn a_missing_run_file_is_named() {
    contains_all(&refused(&["up", "nowhere.toml"], 2), &["nowhere.toml", "no such run file"]);
}

#[test]
fn a_missing_model_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let questions = questions(folder.path(), 4);
    let text = format!(
        "[gateway]\nlisten = \"127.0.0.1:0\"\n[model]\npath = \"no-model\"\n[data]\ntrain_files = [{questions:?}]\n\
         [rollout.process]\nargv = [\"true\"]\n"
    );
    let path = write(folder.path(), &text);
    contains_all(&refused(&["up", &path], 1), &["no-model", "config.json"]);
    contains_all(&refused(&["models", "serve", "no-model"], 1), &["no-model", "config.json"]);
    contains_all(&refused(&["eval", "no-model"], 2), &["no-model", "config.json"]);
}

#[test]
fn a_data_file_with_a_broken_line_is_named_with_the_line() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("tasks.jsonl");
    fs::write(&data, "{\"question\": 1}\nnot json\n").unwrap();
    let text = format!(
        "[gateway]\nlisten = \"127.0.0.1:0\"\n[model]\npath = {:?}\n[data]\ntrain_files = [{data:?}]\n\
         [rollout.process]\nargv = [\"true\"]\n",
        recipe().join("policy")
    );
    contains_all(&refused(&["up", &write(folder.path(), &text)], 1), &["tasks.jsonl", "line 2"]);
}

#[test]
fn a_port_in_use_is_named_with_the_remedy() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let message = refused(&["serve", "--store", "memory", "--listen", &address], 1);
    contains_all(&message, &[&address, "in use", "listen"]);
}

#[test]
fn a_database_of_another_version_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("gateway.db");
    let made = format!(
        "import sqlite3; c = sqlite3.connect({:?}); c.execute('PRAGMA user_version = 999'); c.commit()",
        database.display().to_string()
    );
    assert!(std::process::Command::new(python()).args(["-c", &made]).status().unwrap().success());
    let before = fs::read(&database).unwrap();
    let store = format!("sqlite:{}", database.display());
    contains_all(
        &refused(&["serve", "--listen", "127.0.0.1:0", "--store", &store], 1),
        &["gateway.db", "999", "version"],
    );
    assert_eq!(fs::read(&database).unwrap(), before);
}

#[test]
fn a_gateway_that_does_not_answer_is_named_with_its_address() {
    let url = format!("http://127.0.0.1:{}", free_port());
    contains_all(&refused(&["rollouts", "list", "--gateway", &url], 1), &[&url, "agl serve"]);
}

#[test]
fn a_full_disk_is_an_error_and_not_a_lost_answer() {
    // A file system of one megabyte. Where the tests may not mount one there is nothing to test.
    let folder = tempfile::tempdir().unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
        .arg(folder.path())
        .status()
        .is_ok_and(|status| status.success());
    if !mounted {
        eprintln!("cannot mount a small file system here: not root");
        return;
    }
    let logs = tempfile::tempdir().unwrap();
    let port = free_port();
    let url = format!("http://127.0.0.1:{port}");
    let mut command = agl();
    command.args(["serve", "--listen", &format!("127.0.0.1:{port}"), "--store"]);
    command.arg(format!("sqlite:{}", folder.path().join("gateway.db").display()));
    let mut gateway = Running::start(&mut command, "serve", logs.path());
    eventually("the gateway is up", LIMIT, || get(&format!("{url}/healthz")).is_some());
    let mut stored = Vec::new();
    let mut refusal = None;
    for number in 0..400 {
        // Random text, so that compression does not save the day.
        let noise: String =
            (0..20_000_u64).map(|i| char::from(33 + (i.wrapping_mul(number * 7919 + 31) % 89) as u8)).collect();
        let body = json!([{"rollout_id": format!("r{number}"), "input": noise}]);
        let (status, answer) = http("POST", &format!("{url}/api/rollouts"), "", Some(&body)).unwrap();
        if status == 201 {
            stored.push(format!("r{number}"));
        } else {
            refusal = Some((status, answer));
            break;
        }
    }
    let (status, answer) = refusal.expect("a megabyte holds no eight");
    assert!(status >= 500, "{status}");
    contains_all(&answer.to_string(), &["no room left", "gateway.db", "free space"]);
    for id in &stored {
        assert!(get(&format!("{url}/api/rollouts/{id}")).is_some(), "{id} was acknowledged");
    }
    gateway.kill();
    assert!(std::process::Command::new("umount").arg(folder.path()).status().unwrap().success());
}

/// Gateway and controller, and a run that trains with what they make of `argv`.
fn train_with(argv: &str, more: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let policy = babbling_policy(folder.path());
    let questions = questions(folder.path(), 4);
    let text = format!(
        "[gateway]\nlisten = \"127.0.0.1:0\"\n[model]\npath = {policy:?}\n[data]\ntrain_files = [{questions:?}]\n\
         train_batch_size = 1\n[rollout]\nn = 2\nmax_attempts = 1\n[rollout.process]\nargv = {argv}\n\
         [trainer]\ntotal_training_steps = 1\n{more}"
    );
    let output = agl().args(["up", &write(folder.path(), &text)]).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    message
}

#[test]
fn a_command_that_does_not_exist_is_named() {
    contains_all(&train_with("[\"no-such-agent\"]", ""), &["no-such-agent"]);
}

#[test]
fn a_harness_that_never_calls_the_model_is_named_with_the_likely_cause() {
    contains_all(&train_with("[\"true\"]", ""), &["no model call", "OPENAI_BASE_URL"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_token_ids_is_named_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let fault = FaultRule::with_probability(Fault::MissingIds, 1.0);
    let server = MockLlm::start(Script::default().with_fault(fault)).await.unwrap();
    let port = free_port();
    let url = format!("http://127.0.0.1:{port}");
    let mut command = agl();
    command.args(["serve", "--store", "memory", "--listen", &format!("127.0.0.1:{port}")]);
    let gateway = Running::start(&mut command, "serve", folder.path());
    eventually("the gateway is up", LIMIT, || get(&format!("{url}/healthz")).is_some());
    let model = json!([{"model": "policy", "endpoint": server.endpoint()}]);
    http("POST", &format!("{url}/api/models"), "", Some(&model)).unwrap();
    http("POST", &format!("{url}/api/rollouts"), "", Some(&json!([{"rollout_id": "r", "input": 1}]))).unwrap();
    let call = json!({"messages": [{"role": "user", "content": "hello"}]});
    let proxy = format!("{url}/proxy/rollout/r/attempt/0/mode/train/openai/v1/chat/completions");
    let (status, _) = http("POST", &proxy, "", Some(&call)).unwrap();
    assert_eq!(status, 200, "the answer is passed on");
    let sequences: Value = get(&format!("{url}/api/rollouts/r/sequences")).unwrap();
    assert_eq!(sequences["counts"]["without_token_ids"], 1);
    contains_all(&gateway.output(), &["token ids", "return_token_ids"]);
}
