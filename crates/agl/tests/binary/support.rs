//! What the tests of the binary share: processes that end with the test, ports, folders, a tiny policy.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// The binary under test.
pub fn agl() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_agl"));
    command.env_remove("AGL_LOG").env_remove("AGL_LOG_FORMAT").env_remove("AGL_GATEWAY").stdin(Stdio::null());
    command.env_remove("OTEL_EXPORTER_OTLP_ENDPOINT").env_remove("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
    command
}

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

pub fn recipe() -> PathBuf {
    repository().join("recipes/calculator")
}

pub fn test_agent(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/agents").join(name)
}

/// The interpreter itself: a version manager's shim costs a tenth of a second at every start.
pub fn python() -> String {
    let found = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    String::from_utf8(found.stdout).unwrap().trim().to_owned()
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A child process that is killed with its test, and whose output is kept for the message of a failure.
pub struct Running {
    child: Child,
    log: PathBuf,
    name: String,
}

impl Running {
    pub fn start(command: &mut Command, name: &str, folder: &Path) -> Self {
        let log = folder.join(format!("{name}-{}.log", fs::read_dir(folder).unwrap().count()));
        let out = File::create(&log).unwrap();
        let child = command.stdout(out.try_clone().unwrap()).stderr(out).spawn().unwrap();
        Self { child, log, name: name.to_owned() }
    }

    pub fn output(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM, and what it came to.
    pub fn terminate(&mut self) -> ExitStatus {
        let status = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
        self.wait(Duration::from_secs(60))
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "{} did not end within {limit:?}:\n{}", self.name, self.output());
            pause(20);
        }
    }

    pub fn succeed(&mut self, limit: Duration) {
        let status = self.wait(limit);
        assert!(status.success(), "{} ended with {status}:\n{}", self.name, self.output());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lets other processes go on.
#[expect(clippy::disallowed_methods, reason = "tests wait for processes on their own thread")]
pub fn pause(milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(milliseconds));
}

/// Waits for something to become true.
pub fn eventually(what: &str, limit: Duration, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !check() {
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        pause(5);
    }
}

/// A request without a library: what a harness in any language would send.
pub fn http(method: &str, url: &str, key: &str, body: Option<&Value>) -> Option<(u16, Value)> {
    let rest = url.strip_prefix("http://")?;
    let (address, path) = rest.split_once('/')?;
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(60))).ok()?;
    let body = body.map(Value::to_string).unwrap_or_default();
    write!(
        stream,
        "{method} /{path} HTTP/1.0\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok()?;
    let text = String::from_utf8_lossy(&answer);
    let (head, content) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some((status, serde_json::from_str(content).unwrap_or(Value::Null)))
}

pub fn get(url: &str) -> Option<Value> {
    http("GET", url, "", None).filter(|(status, _)| *status == 200).map(|(_, value)| value)
}

/// A policy with random weights and the recipe's tokenizer. It hardly ever ends an answer by itself, so its calls take long.
pub fn babbling_policy(folder: &Path) -> PathBuf {
    let target = folder.join("babbling-policy");
    let source = recipe().join("policy");
    let engine = agl_engine::Engine::init(&source.join("config.json"), &source, 1, agl_engine::EngineConfig::default());
    engine.unwrap().save(&target).unwrap();
    target
}

/// Questions that need no answer.
pub fn questions(folder: &Path, count: usize) -> PathBuf {
    let path = folder.join("questions.jsonl");
    let lines: Vec<String> = (0..count)
        .map(|index| format!("{{\"data_id\": \"q{index}\", \"question\": \"What is {index} plus 2?\", \"answer\": 1}}"))
        .collect();
    fs::write(&path, lines.join("\n") + "\n").unwrap();
    path
}
