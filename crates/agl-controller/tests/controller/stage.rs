//! A fake gateway, a work directory, and a controller between them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use agl_client::GatewayClient;
use agl_controller::work_dir::AttemptDir;
use agl_controller::{Controller, ControllerConfig, ControllerError};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::gateway::FakeGateway;

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_agl-controller");

/// A controller inside the test.
pub struct RunningController {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ControllerError>>,
}

impl RunningController {
    pub async fn stop(self) {
        self.stop.send(()).unwrap();
        tokio::time::timeout(Duration::from_secs(20), self.task).await.unwrap().unwrap().unwrap();
    }

    /// Waits until it gives up by itself.
    pub async fn fails(self) -> ControllerError {
        tokio::time::timeout(Duration::from_secs(20), self.task).await.unwrap().unwrap().unwrap_err()
    }
}

pub struct Stage {
    pub gateway: FakeGateway,
    pub folder: TempDir,
    controller: Option<RunningController>,
}

impl Stage {
    /// A stage without a controller.
    pub async fn empty() -> Self {
        Self { gateway: FakeGateway::start().await, folder: tempfile::tempdir().unwrap(), controller: None }
    }

    pub async fn with(settings: Value) -> Self {
        let mut stage = Self::empty().await;
        stage.start(settings);
        stage
    }

    /// Settings that make tests quick, and `settings` over them.
    pub fn config(&self, settings: &Value) -> Value {
        let mut config = json!({
            "work_dir": self.folder.path().join("work"), "supervisor": PROGRAM, "kill_grace_seconds": 1.0,
            "retry_backoff_seconds": 0.01, "max_concurrent": 4,
        });
        config.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        config
    }

    /// Starts a controller inside the test.
    pub fn start(&mut self, settings: Value) {
        self.controller = Some(self.controller(settings));
    }

    /// One more controller inside the test.
    pub fn controller(&self, settings: Value) -> RunningController {
        let config: ControllerConfig = serde_json::from_value(self.config(&settings)).unwrap();
        let client = GatewayClient::new(&self.gateway.url, "").unwrap();
        let (stop, stopped) = oneshot::channel();
        let run = Controller::new(config, client).run(async {
            let _ = stopped.await;
        });
        RunningController { stop, task: tokio::spawn(run) }
    }

    /// Tells it to end and waits for that.
    pub async fn stop(&mut self) {
        self.controller.take().unwrap().stop().await;
    }

    pub fn attempt(&self, rollout: &str, attempt: &str) -> AttemptDir {
        AttemptDir::new(self.folder.path().join("work/rollouts").join(rollout).join(attempt))
    }
}

/// A rollout that runs a shell script.
pub fn sh(script: &str) -> Value {
    json!({"process": {"argv": ["sh", "-c", script]}, "timeout_seconds": 60})
}

/// The same with more keys.
pub fn with(mut config: Value, more: Value) -> Value {
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

pub fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path.as_ref()).unwrap_or_else(|error| panic!("{}: {error}", path.as_ref().display()))
}

/// The process number that a script wrote into a file, once it has.
pub async fn pid_in(path: &PathBuf) -> i32 {
    for _ in 0..1000 {
        if let Ok(text) = std::fs::read_to_string(path)
            && let Ok(pid) = text.trim().parse()
        {
            return pid;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("nobody wrote a process number into {}", path.display());
}

pub fn is_running(pid: i32) -> bool {
    agl_controller::process_id::ProcessId::of(pid).is_some_and(|process| process.is_alive())
}
