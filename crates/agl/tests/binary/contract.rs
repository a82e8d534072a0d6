//! Agents that were written for something else run unchanged, and their calls become exactly the rows of DESIGN §4.
//! Gateway, controller and model server are the real ones, each its own process.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::support::{Running, agl, babbling_policy, eventually, free_port, get, http, python, test_agent};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(90);

struct Stack {
    folder: tempfile::TempDir,
    url: String,
    _parts: [Running; 3],
}

impl Stack {
    /// With a server key, so that agents have only their attempt's own.
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        let policy = babbling_policy(&path);
        let (port, model_port) = (free_port(), free_port());
        let url = format!("http://127.0.0.1:{port}");
        let model_url = format!("http://127.0.0.1:{model_port}/v1");
        let mut model = agl();
        model.args(["models", "serve"]).arg(&policy).args(["--listen", &format!("127.0.0.1:{model_port}")]);
        let model = Running::start(&mut model, "models", &path);
        let mut gateway = agl();
        gateway.args(["serve", "--key", KEY, "--listen", &format!("127.0.0.1:{port}"), "--store"]);
        gateway.arg(format!("sqlite:{}", path.join("gateway.db").display()));
        let gateway = Running::start(&mut gateway, "serve", &path);
        let mut controller = agl();
        controller.args(["control", "--gateway", &url, "--key", KEY, "--set"]);
        controller.arg(format!("controller.work_dir={}", path.join("work").display()));
        let controller = Running::start(&mut controller, "control", &path);
        eventually("gateway and model server are up", LIMIT, || {
            get(&format!("{url}/healthz")).is_some() && get(&format!("{model_url}/models")).is_some()
        });
        let registered = agl()
            .args(["models", "register", "--gateway", &url, "--key", KEY, "policy", &model_url, "--kind", "agl"])
            .status()
            .unwrap();
        assert!(registered.success());
        Self { folder, url, _parts: [model, gateway, controller] }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Value {
        let (status, answer) = http(method, &format!("{}/{path}", self.url), KEY, body).unwrap();
        assert!(status < 300, "{method} {path}: {status} {answer}");
        answer
    }

    /// Creates a rollout and waits for its end.
    fn run(&self, input: Value, config: Value) -> String {
        let created = self.call("POST", "api/rollouts", Some(&json!([{"input": input, "config": config}])));
        let id = created[0]["rollout_id"].as_str().unwrap().to_owned();
        eventually("the rollout ends", LIMIT, || {
            let state = &self.call("GET", &format!("api/rollouts/{id}"), None)["rollout"]["status"]["state"];
            state == "succeeded" || state == "failed"
        });
        let rollout = self.call("GET", &format!("api/rollouts/{id}"), None);
        let logs = agl().args(["rollouts", "logs", "--gateway", &self.url, "--key", KEY, &id]).output().unwrap();
        let logs = String::from_utf8_lossy(&logs.stdout).into_owned();
        assert_eq!(rollout["rollout"]["status"]["state"], "succeeded", "{rollout}\n{logs}");
        id
    }

    fn cli(&self, args: &[&str]) -> String {
        let (action, rest) = args.split_first().unwrap();
        let output =
            agl().args(["rollouts", action, "--gateway", &self.url, "--key", KEY]).args(rest).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

const KEY: &str = "server-key";

#[test]
fn an_agent_written_for_agent_lightning_runs_unchanged() {
    let stack = Stack::start();
    let agents = test_agent("");
    // `config.local` as the original's trainer sends it: a class, and variables out of the input.
    let config =
        json!({"local": {"agent_class": "lightning:Agent", "env_map": {"TASK": "input", "PYTHONPATH": agents}}});
    let id = stack.run(json!({"question": "1 + 1?", "data_id": "q"}), config);
    let events = stack.call("GET", &format!("api/rollouts/{id}/events"), None);
    let types: Vec<&str> =
        events.as_array().unwrap().iter().map(|event| event["event_type"].as_str().unwrap()).collect();
    assert_eq!(types, ["model_request", "reward"]);
    assert_eq!(events[1]["data"]["value"], 0.25);
    let triplets =
        stack.call("GET", &format!("api/rollouts/{id}/events?event_type=model_request&format=triplet"), None);
    let triplet = &triplets[0]["data"];
    let sampled = triplet["response_token_ids"].as_array().unwrap().len();
    assert!(sampled > 0 && triplet["response_log_probs"].as_array().unwrap().len() == sampled, "{triplet}");
    let detail = stack.call("GET", &format!("api/rollouts/{id}"), None);
    assert_eq!(detail["attempts"], json!(["0"]));
}

#[test]
fn an_agent_on_the_openai_package_needs_nothing_but_its_own_two_variables() {
    let Ok(python) = std::env::var("AGL_TEST_OPENAI_PYTHON") else {
        panic!("AGL_TEST_OPENAI_PYTHON is not set: run the tests with ./x test, which installs the openai package");
    };
    let stack = Stack::start();
    let config = json!({"process": {"argv": [python, test_agent("openai_package.py"), "{{ input.question }}"]}});
    let id = stack.run(json!({"question": "1 + 1?"}), config);
    let sequences = stack.call("GET", &format!("api/rollouts/{id}/sequences"), None);
    assert_eq!(sequences["counts"]["live"], 2, "{sequences}");
    // The recipe's own variant of the same kind, tool loop included.
    let config = json!({"process": {"argv": [python, crate::support::recipe().join("agent_openai.py"), "{{ input.question }}"]}});
    let id = stack.run(json!({"question": "What is 12 times 34 plus 5?"}), config);
    assert!(stack.cli(&["logs", &id]).contains("ANSWER:"));
}

#[test]
fn a_harness_with_a_sub_agent_and_a_rewritten_history_yields_exactly_its_rows() {
    let stack = Stack::start();
    let config = json!({"process": {"argv": [python(), test_agent("interleaved.py")]}});
    let id = stack.run(json!({}), config);
    let printed = stack.cli(&["logs", &id]);
    let calls: Vec<Value> = serde_json::from_str(printed.lines().find(|line| line.starts_with('[')).unwrap()).unwrap();
    let ids = |call: usize, key: &str| -> Vec<u64> {
        calls[call][key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
    };
    let context = |call: usize| [ids(call, "prompt"), ids(call, "sampled")].concat();
    // Calls in order: main 1, sub 1, main 2, sub 2, main 3 (history rewritten), main 4.
    let expected = [(context(2), vec![0, 2]), (context(3), vec![1, 3]), (context(5), vec![4, 5])];

    let answer = stack.call("GET", &format!("api/rollouts/{id}/sequences?level=trajectory"), None);
    let rows = answer["sequences"].as_array().unwrap();
    assert_eq!(rows.len(), expected.len(), "{answer}");
    for (row, (tokens, members)) in rows.iter().zip(&expected) {
        let row_ids: Vec<u64> = row["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
        assert_eq!(&row_ids, tokens);
        let mut mask = vec![0; tokens.len()];
        for &call in members {
            let start = ids(call, "prompt").len();
            mask[start..start + ids(call, "sampled").len()].fill(1);
        }
        assert_eq!(row["mask"], json!(mask), "exactly what the policy sampled is trained");
        assert_eq!(row["log_probs"].as_array().unwrap().len(), tokens.len());
        assert_eq!(row["policy_versions"].as_array().unwrap().len(), tokens.len());
    }
    assert_eq!(answer["counts"]["merges"], 3);
    assert_eq!(answer["counts"]["breaks"], 1, "the rewritten history; the sub-agent is a conversation of its own");
    let transition = stack.call("GET", &format!("api/rollouts/{id}/sequences?level=transition"), None);
    let trained = |answer: &Value| -> usize {
        let rows = answer["sequences"].as_array().unwrap().iter();
        rows.map(|row| row["mask"].as_array().unwrap().iter().filter(|bit| **bit == 1).count()).sum()
    };
    assert_eq!(transition["sequences"].as_array().unwrap().len(), 6);
    assert_eq!(trained(&transition), trained(&answer), "both levels train the same tokens");
}

#[test]
fn a_rollout_can_be_listed_shown_and_read() {
    let stack = Stack::start();
    let config = json!({
        "process": {"argv": [python(), "-S", "-E", crate::support::recipe().join("agent.py"), "{{ input.question }}"]},
        "evaluator": {"argv": [python(), "-S", "-E", crate::support::recipe().join("evaluator.py")]},
        "reward_source": "evaluator",
    });
    let id = stack.run(json!({"question": "What is 12 times 34 plus 5?", "answer": 413}), config);
    let listed = stack.cli(&["list", "--state", "succeeded"]);
    assert!(listed.contains(&id), "{listed}");
    let shown = stack.cli(&["show", &id]);
    for expected in
        ["state     succeeded", "reward    ", "system  Answer", "user  What is 12 times 34 plus 5?", "── call 0"]
    {
        assert!(shown.contains(expected), "{expected:?} is not in:\n{shown}");
    }
    assert!(stack.cli(&["events", &id, "--type", "reward"]).contains("evaluator"));
    assert!(stack.cli(&["sequences", &id]).contains("trained"));
    assert!(stack.cli(&["logs", &id, "--evaluator"]).contains("expected 413"));
    assert!(fs::metadata(stack.path().join("gateway.db")).is_ok());
}
