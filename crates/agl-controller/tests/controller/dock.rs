//! A stage with an engine of containers.

use std::path::Path;

use serde_json::{Value, json};

use crate::engine::FakeEngine;
use crate::stage::Stage;

/// The container of the first rollout.
pub const AGENT: &str = "agl-rollout-r0";
/// And of its evaluator.
pub const EVALUATOR: &str = "agl-rollout-r0.evaluator";

pub struct Dock {
    pub stage: Stage,
    pub engine: FakeEngine,
}

impl Dock {
    /// A dock without a controller.
    pub async fn empty() -> Self {
        let stage = Stage::empty().await;
        let engine = FakeEngine::start(stage.folder.path());
        Self { stage, engine }
    }

    /// One whose controller runs with `settings` in `[controller]` and `container` in `[controller.container]`.
    pub async fn with(settings: Value, container: Value) -> Self {
        let mut dock = Self::empty().await;
        dock.start(settings, container);
        dock
    }

    pub fn start(&mut self, settings: Value, container: Value) {
        let settings = settings_at(&self.engine.socket, settings, container);
        self.stage.start(settings);
    }
}

/// Settings of a controller whose engine is at `socket`.
pub fn settings_at(socket: &Path, mut settings: Value, container: Value) -> Value {
    let mut engine = json!({"host": socket, "pull_timeout_seconds": 0.5});
    engine.as_object_mut().unwrap().extend(container.as_object().unwrap().clone());
    settings["runner"] = json!("container");
    settings["container"] = engine;
    settings
}

/// A rollout in a container.
pub fn boxed() -> Value {
    json!({"container": {"image": "agent:1", "argv": ["{{ input.question }}"]}, "timeout_seconds": 60})
}

/// The same with an evaluator.
pub fn judged() -> Value {
    crate::stage::with(boxed(), json!({"evaluator": {"argv": ["judge", "{{ input.question }}"]}}))
}
