//! Warm starts, through the real program.

mod fallback;
mod likeness;
mod ownership;

use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::stage::{Stage, with};

/// A module for the zygote to import. Where it was imported before the fork, its process is not the agent's.
const MARKER: &str = "import os\nPID = os.getpid()\nstate = 'as imported'\n";

/// A stage without a controller, and what the zygote imports in its folder.
async fn stage() -> Stage {
    let stage = Stage::empty().await;
    module(&stage, "marker", MARKER);
    stage
}

fn module(stage: &Stage, name: &str, source: &str) {
    let path = stage.folder.path().join("modules").join(format!("{name}.py"));
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, source).unwrap();
}

/// The interpreter itself: `python3` may be a script that starts it.
fn interpreter() -> &'static str {
    static FOUND: LazyLock<String> = LazyLock::new(|| {
        let asked = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
        String::from_utf8(asked.stdout).unwrap().trim().to_owned()
    });
    &FOUND
}

/// Settings with a zygote that imports these.
fn zygote(stage: &Stage, imports: &[&str]) -> Value {
    let path = [stage.folder.path().join("modules")];
    json!({"python": interpreter(), "zygote": {"imports": imports, "path": path}})
}

async fn warm_stage() -> Stage {
    let mut stage = stage().await;
    let settings = zygote(&stage, &["marker"]);
    stage.start(settings);
    stage
}

/// Says into the file `zygote` in which process `marker` was imported, where that was not this one; then runs the script.
fn code(script: &str) -> String {
    format!(
        "import os, sys\nif 'marker' in sys.modules:\n    open('zygote', 'w').write(str(sys.modules['marker'].PID))\n{script}"
    )
}

fn python(script: &str) -> Value {
    json!({"process": {"argv": [interpreter(), "-c", code(script)]}, "timeout_seconds": 60})
}

/// The zygote that an attempt came from; `None` where it was started cold.
fn zygote_of(stage: &Stage, id: &str) -> Option<i32> {
    std::fs::read_to_string(stage.attempt(id, "0").work().join("zygote")).ok().map(|pid| pid.parse().unwrap())
}

/// Runs a rollout to its end and gives its output, its errors and its exit code.
async fn outcome(stage: &Stage, config: Value) -> (String, String, Option<i32>) {
    let id = stage.gateway.create(with(json!({"timeout_seconds": 60}), config));
    stage.gateway.ended(&id).await;
    let dir = stage.attempt(&id, "0");
    let text = |path| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
    (text(dir.stdout()), text(dir.stderr()), stage.gateway.attempts(&id)[0].exit_code)
}

fn write(path: impl AsRef<Path>, text: &str) -> String {
    std::fs::write(path.as_ref(), text).unwrap();
    path.as_ref().to_string_lossy().into_owned()
}
