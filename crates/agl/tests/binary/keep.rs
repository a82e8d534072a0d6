//! Rollouts are written out, and then deleted by the limits of the run file: what was exported still reads.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use crate::support::{Running, agl, eventually, free_port, get, http};
use agl_mock_llm::tokenizer::{MESSAGE_END, encode, render_chat};
use agl_mock_llm::{MockLlm, Script};
use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(60);

struct Scene {
    folder: tempfile::TempDir,
    url: String,
    gateway: Running,
    model: MockLlm,
}

impl Scene {
    async fn start(retention: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = free_port();
        let url = format!("http://127.0.0.1:{port}");
        let file = folder.path().join("run.toml");
        fs::write(&file, format!("gateway.listen = \"127.0.0.1:{port}\"\n[gateway.retention]\n{retention}\n")).unwrap();
        let gateway = Running::start(agl().arg("serve").arg(&file), "serve", folder.path());
        // It says what it is told.
        let model = MockLlm::start(Script::default()).await.unwrap();
        eventually("the gateway is up", LIMIT, || get(&format!("{url}/healthz")).is_some());
        let scene = Self { folder, url, gateway, model };
        scene.post("api/models", &json!([{"model": "policy", "endpoint": scene.model.endpoint(), "version": 2}]));
        scene
    }

    fn send(&self, method: &str, path: &str, body: Option<&Value>) -> Value {
        let (status, answer) = http(method, &format!("{}/{path}", self.url), "", body).unwrap();
        assert!(status < 300, "{method} {path}: {status} {answer}");
        answer
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        self.send("POST", path, Some(body))
    }

    /// A train rollout with two calls, the second of which goes on with the first, and a reward.
    fn rollout(&self, id: &str, reward: f64) {
        let metadata = json!({"run_id": "run-a", "group": "g", "data_id": "task"});
        self.post("api/rollouts", &json!([{"rollout_id": id, "input": {"question": id}, "metadata": metadata}]));
        let proxy = format!("proxy/rollout/{id}/attempt/0/mode/train/openai/v1/chat/completions");
        let mut messages = vec![json!({"role": "user", "content": id})];
        for _ in 0..2 {
            let answer = self.post(&proxy, &json!({"messages": messages}));
            messages.push(answer["choices"][0]["message"].clone());
            messages.push(json!({"role": "user", "content": "and then?"}));
        }
        let event = json!({"event_type": "reward", "data": {"value": reward}});
        self.post(&format!("api/rollouts/{id}/attempt/0/events"), &event);
        for state in ["running", "succeeded"] {
            self.send("PATCH", &format!("api/rollouts/{id}"), Some(&json!({"status": {"state": state}})));
        }
    }

    fn living(&self) -> Vec<Value> {
        let all = "state_in=queuing&state_in=running&state_in=succeeded&state_in=failed";
        let listed = self.send("GET", &format!("api/rollouts?{all}"), None);
        listed.as_array().unwrap().iter().map(|rollout| rollout["rollout_id"].clone()).collect()
    }

    /// Runs `agl rollouts export` and gives its exit code, standard output and standard error.
    fn export(&self, args: &[&str]) -> (i32, String, String) {
        let mut command = agl();
        command.current_dir(self.folder.path()).args(["rollouts", "export", "--gateway", &self.url]).args(args);
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }
}

fn parquet_rows(path: &Path) -> Vec<Value> {
    let reader = SerializedFileReader::new(File::open(path).unwrap()).unwrap();
    reader.get_row_iter(None).unwrap().map(|row| row.unwrap().to_json_value()).collect()
}

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn column(rows: &[Value], name: &str) -> Vec<Value> {
    rows.iter().map(|row| row[name].clone()).collect()
}

fn log_probs(rows: &[Value]) -> Vec<f32> {
    let lists = rows.iter().flat_map(|row| row["response_log_probs"].as_array().unwrap());
    lists.map(|value| value.as_f64().unwrap() as f32).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_exported_still_reads_after_retention_has_deleted_it() {
    let limits = "keep_rollouts = 2\nprotect_seconds = 0\nprotect_unconsumed_seconds = 3600\nevery_seconds = 0.2";
    let scene = Scene::start(limits).await;
    let ids: Vec<String> = (0..6).map(|number| format!("r{number}")).collect();
    for (number, id) in ids.iter().enumerate() {
        scene.rollout(id, number as f64);
    }
    eventually("the log says that the limit cannot be kept", LIMIT, || {
        scene.gateway.output().contains("the limits cannot be kept")
    });
    assert!(scene.gateway.output().contains("gateway.retention.protect_unconsumed_seconds"));
    assert_eq!(scene.living(), ids, "no checkpoint has consumed them");

    let (code, _, said) = scene.export(&["rows.parquet", "--run", "run-a"]);
    assert_eq!((code, said.trim()), (0, "6 rows of 6 rollouts in rows.parquet"));
    assert_eq!(scene.export(&["rows.jsonl", "--run", "run-a"]).0, 0);
    assert_eq!(scene.export(&["calls.jsonl", "--what", "calls"]).0, 0);
    let (_, lines, _) = scene.export(&["-", "--what", "rollouts", "--id", "r3", "--id", "r1"]);
    let rollouts = json_lines(&lines);
    assert_eq!(column(&rollouts, "rollout_id"), ["r3", "r1"]);
    assert_eq!((&rollouts[0]["reward"], &rollouts[0]["input"]), (&json!(3.0), &json!({"question": "r3"})));

    let consumed = &ids[..5];
    scene.post("api/rollouts/consumed", &json!({"run_id": "run-a", "step": 1, "rollout_ids": consumed}));
    eventually("the oldest have been deleted", LIMIT, || scene.living() == ["r4", "r5"]);

    let table = parquet_rows(&scene.file("rows.parquet"));
    let lines = json_lines(&fs::read_to_string(scene.file("rows.jsonl")).unwrap());
    assert_eq!(column(&table, "rollout_id"), ids);
    for name in ["reward", "group", "prompt_ids", "response_ids", "response_mask", "response_versions"] {
        assert_eq!(column(&table, name), column(&lines, name), "{name}");
    }
    assert_eq!(log_probs(&table), log_probs(&lines));
    let prompt = render_chat(&[json!({"role": "user", "content": "r0"})], None);
    assert_eq!(table[0]["prompt_ids"], json!(prompt));
    let mut first = encode("r0");
    first.push(MESSAGE_END);
    let response = table[0]["response_ids"].as_array().unwrap();
    assert_eq!(response[..first.len()], json!(first).as_array().unwrap()[..], "the exact ids that were sampled");
    assert_eq!(table[0]["response_mask"][first.len()], 0, "what the harness said in between is context");
    assert_eq!(table[0]["response_versions"][0], 2);
    let calls = json_lines(&fs::read_to_string(scene.file("calls.jsonl")).unwrap());
    assert_eq!(calls.len(), 12);
    assert_eq!(calls[1]["request"]["messages"][2]["content"], "and then?");
    assert_eq!(calls[1]["response"]["choices"][0]["message"]["content"], "and then?");

    let (code, _, refused) = scene.export(&["rows.parquet"]);
    assert_eq!(code, 2, "{refused}");
    assert!(refused.contains("rows.parquet") && refused.contains("--force"), "{refused}");
    assert_eq!(scene.export(&["rows.parquet", "--force"]).0, 0);
    assert_eq!(column(&parquet_rows(&scene.file("rows.parquet")), "rollout_id"), ["r4", "r5"]);
    let (code, _, gone) = scene.export(&["gone.jsonl", "--id", "r0"]);
    assert!(code == 1 && gone.contains("r0"), "{gone}");
    let names = fs::read_dir(scene.folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(!names.map(|name| name.into_string().unwrap()).any(|name| name.contains("gone") || name.ends_with(".new")));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_that_cannot_be_is_refused_with_the_remedy() {
    let scene = Scene::start("").await;
    let (code, _, said) = scene.export(&["rows.csv"]);
    assert!(code == 2 && said.contains("rows.csv") && said.contains("--format"), "{said}");
    let (code, _, said) = scene.export(&["-", "--format", "parquet"]);
    assert!(code == 2 && said.contains("name a file"), "{said}");
    let (code, _, said) = scene.export(&["nowhere/rows.jsonl"]);
    assert!(code == 1 && said.contains("nowhere"), "{said}");
    let (code, _, said) = scene.export(&["rows.jsonl"]);
    assert_eq!((code, said.trim()), (0, "0 rows of 0 rollouts in rows.jsonl"));
    let url = format!("http://127.0.0.1:{}", free_port());
    let output = agl().args(["rollouts", "export", "-", "--gateway", &url]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && said.contains(&url) && said.contains("agl serve"), "{said}");
}
