//! Harnesses on the real SDKs of every dialect, unmodified, against a gateway with a scripted server behind it. Each does the
//! task of `agents/task.py`: two calls with a tool between them. Both are captured with token ids, and they merge into one
//! training row, because the history that comes back extends the very tokens that were sampled.
//!
//! `./x test` installs the SDKs and says where they are.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot be set up has failed")]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use agl_gateway::{Gateway, GatewayConfig};
use agl_mock_llm::{Answer, MockLlm, Script, Select, ToolCall};
use serde_json::{Value, json};
use tokio::process::Command;

const KEY: &str = "server-key";

struct Stage {
    url: String,
    http: reqwest::Client,
    model: MockLlm,
}

impl Stage {
    /// `streams` says how streams come about.
    async fn start(streams: &str) -> Self {
        // The arguments as models like to write them: no SDK sends these spaces back by itself.
        let call = ToolCall { name: "multiply".to_owned(), arguments: json!(r#"{"a":6,  "b": 7}"#) };
        let script = Script {
            answers: vec![
                Answer::Tools { text: String::new(), tool_calls: vec![call] },
                Answer::Text("It is 42.".to_owned()),
            ],
            select: Select::Turn,
            ..Script::default()
        };
        let model = MockLlm::start(script).await.unwrap();
        let config = GatewayConfig {
            listen: "127.0.0.1:0".to_owned(),
            key: KEY.to_owned(),
            store: "memory".to_owned(),
            ..GatewayConfig::default()
        };
        let gateway = Gateway::bind(config).await.unwrap();
        let url = format!("http://{}", gateway.addr());
        tokio::spawn(gateway.serve(std::future::pending()));
        let stage = Self { url, http: reqwest::Client::builder().no_proxy().build().unwrap(), model };
        let policy = json!({"model": "policy", "endpoint": stage.model.endpoint(), "stream": streams});
        stage.post("/api/models", json!([policy])).await;
        stage.post("/api/rollouts", json!([{"rollout_id": "r", "input": {}}])).await;
        stage
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let request = self.http.post(format!("{}{path}", self.url)).bearer_auth(KEY);
        let answer = request.body(body.to_string()).send().await.unwrap();
        assert!(answer.status().is_success(), "{path}: {}", answer.text().await.unwrap());
        serde_json::from_str(&answer.text().await.unwrap()).unwrap()
    }

    async fn get(&self, path: &str) -> Value {
        let answer = self.http.get(format!("{}{path}", self.url)).bearer_auth(KEY).send().await.unwrap();
        serde_json::from_str(&answer.text().await.unwrap()).unwrap()
    }
}

/// Runs an agent with nothing but the variables that the controller sets, and looks at what was captured.
async fn captured(program: &str, folder: &Path, arguments: &[&str], dialect: &str, streams: &str) {
    let stage = Stage::start(streams).await;
    let attempt = stage.post("/api/rollouts/r/attempts", json!({})).await;
    let key = attempt["key"].as_str().unwrap();
    let base = format!("{}/proxy/rollout/r/attempt/0/mode/train", stage.url);
    let agent = Command::new(program)
        .args(arguments)
        .current_dir(folder)
        .env("OPENAI_BASE_URL", format!("{base}/openai/v1"))
        .env("OPENAI_API_BASE", format!("{base}/openai/v1"))
        .env("OPENAI_API_KEY", key)
        .env("ANTHROPIC_BASE_URL", format!("{base}/anthropic"))
        .env("ANTHROPIC_API_KEY", key)
        .env("GOOGLE_GEMINI_BASE_URL", format!("{base}/gemini"))
        .env("GEMINI_API_KEY", key)
        .env("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(120), agent).await.unwrap().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let events = stage.get("/api/rollouts/r/events").await;
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?} failed:\n{said}{errors}\n{events:#}");
    assert!(said.contains("ANSWER: It is 42."), "{said}");

    let stream = arguments.contains(&"stream");
    for event in events.as_array().unwrap() {
        let data = &event["data"];
        assert_eq!((&data["dialect"], &data["stream"]), (&json!(dialect), &json!(stream)), "{data}");
        assert!(data["response"]["choices"][0]["token_ids"].is_array(), "{data}");
    }
    let sequences = stage.get("/api/rollouts/r/sequences").await;
    let counts = &sequences["counts"];
    assert_eq!(
        (&counts["calls"], &counts["live"], &counts["breaks"]),
        (&json!(2), &json!(2), &json!(0)),
        "{sequences:#}"
    );
    assert_eq!(sequences["sequences"].as_array().unwrap().len(), 1, "{sequences:#}");
}

fn agents() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sdk/agents")
}

async fn python(arguments: &[&str], dialect: &str) {
    python_with(arguments, dialect, "synthesise").await;
}

async fn python_with(arguments: &[&str], dialect: &str, streams: &str) {
    let python =
        std::env::var("AGL_TEST_SDK_PYTHON").expect("AGL_TEST_SDK_PYTHON is not set: run the tests with ./x test");
    captured(&python, &agents(), arguments, dialect, streams).await;
}

/// Node looks for packages beside the script, and we keep none beside ours.
async fn node(arguments: &[&str], dialect: &str) {
    let packages =
        std::env::var("AGL_TEST_SDK_NODE").expect("AGL_TEST_SDK_NODE is not set: run the tests with ./x test");
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(packages, folder.path().join("node_modules")).unwrap();
    for script in ["task.mjs", arguments[0]] {
        std::fs::copy(agents().join(script), folder.path().join(script)).unwrap();
    }
    captured("node", folder.path(), arguments, dialect, "synthesise").await;
}

/// A test for the whole answers and one for the streamed ones.
macro_rules! harness {
    ($name:ident, $run:ident, $dialect:literal, [$($argument:literal),+]) => {
        mod $name {
            #[tokio::test]
            async fn whole() {
                super::$run(&[$($argument),+], $dialect).await;
            }

            #[tokio::test]
            async fn streamed() {
                super::$run(&[$($argument),+, "stream"], $dialect).await;
            }
        }
    };
}

harness!(openai_chat, python, "openai.chat", ["openai_chat.py"]);
harness!(openai_responses, python, "openai.responses", ["openai_responses.py"]);
harness!(anthropic_messages, python, "anthropic.messages", ["anthropic_messages.py"]);
harness!(google_genai, python, "gemini", ["google_genai.py"]);
harness!(litellm_openai, python, "openai.chat", ["litellm_chat.py", "openai/gpt-4o"]);
harness!(litellm_anthropic, python, "anthropic.messages", ["litellm_chat.py", "anthropic/claude-sonnet-4-5"]);
harness!(langchain_openai, python, "openai.chat", ["langchain_chat.py"]);
harness!(openai_agents, python, "openai.responses", ["openai_agents.py"]);
harness!(npm_openai_chat, node, "openai.chat", ["openai.mjs", "chat"]);
harness!(npm_openai_responses, node, "openai.responses", ["openai.mjs", "responses"]);
harness!(npm_anthropic, node, "anthropic.messages", ["anthropic.mjs"]);

/// Streams that pass as the server speaks.
mod through {
    #[tokio::test]
    async fn openai_chat() {
        super::python_with(&["openai_chat.py", "stream"], "openai.chat", "through").await;
    }

    #[tokio::test]
    async fn openai_responses() {
        super::python_with(&["openai_responses.py", "stream"], "openai.responses", "through").await;
    }

    #[tokio::test]
    async fn anthropic_messages() {
        super::python_with(&["anthropic_messages.py", "stream"], "anthropic.messages", "through").await;
    }

    #[tokio::test]
    async fn google_genai() {
        super::python_with(&["google_genai.py", "stream"], "gemini", "through").await;
    }
}
