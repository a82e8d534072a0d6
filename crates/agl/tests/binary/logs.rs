//! What is logged says whose it is.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Running, agl, eventually, free_port, get, http};

#[test]
fn every_line_of_a_call_carries_the_ids_of_its_rollout_and_attempt() {
    lines_carry_ids(&[]);
}

#[test]
fn the_lines_are_the_same_where_traces_are_exported() {
    lines_carry_ids(&["--otlp-endpoint", &format!("http://127.0.0.1:{}", free_port())]);
}

fn lines_carry_ids(more: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let (port, nobody) = (free_port(), free_port());
    let mut command = agl();
    command.args(["serve", "--listen", &format!("127.0.0.1:{port}"), "--store", "memory"]);
    command.args(["--log", "agl_gateway=info", "--log-format", "json"]).args(more);
    command.args(["--set", "gateway.upstream.max_attempts=2", "--set", "gateway.upstream.backoff_seconds=0.01"]);
    let gateway = Running::start(&mut command, "gateway", folder.path());
    let url = format!("http://127.0.0.1:{port}");
    eventually("the gateway is up", Duration::from_secs(20), || get(&format!("{url}/readyz")).is_some());
    let post = |path: &str, body: Value| http("POST", &format!("{url}{path}"), "", Some(&body)).unwrap();
    post("/api/models", json!([{"model": "policy", "endpoint": format!("http://127.0.0.1:{nobody}/v1")}]));
    post("/api/rollouts", json!([{"rollout_id": "the-rollout", "input": {}}]));
    let call = "/proxy/rollout/the-rollout/attempt/the-attempt/mode/train/openai/v1/chat/completions";
    assert_eq!(post(call, json!({"messages": []})).0, 502);

    let lines: Vec<Value> = gateway.output().lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let of_call = ["trying the upstream again", "gave the upstream up"].map(|message| {
        let said = |line: &&Value| line["fields"]["message"].as_str().is_some_and(|text| text.starts_with(message));
        lines.iter().find(said).unwrap_or_else(|| panic!("{message}: {}", gateway.output()))
    });
    for line in of_call {
        assert_eq!(
            (&line["span"]["rollout_id"], &line["span"]["attempt_id"]),
            (&json!("the-rollout"), &json!("the-attempt")),
            "{line}"
        );
    }
}
