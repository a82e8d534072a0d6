//! The small models and the few ways the tests use them.

use std::path::PathBuf;

use agl_engine::{Engine, EngineConfig, GenerateOutput, GenerateRequest, SamplingParams, TrainRow};

pub fn dir(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

pub fn engine(name: &str) -> Engine {
    Engine::load(&dir(name), EngineConfig::default()).unwrap()
}

pub async fn generate(engine: &Engine, prompt: &[u32], sampling: SamplingParams) -> GenerateOutput {
    engine.generate(GenerateRequest { prompt: prompt.to_vec(), sampling }).await.unwrap()
}

/// Teaches `engine` to continue `prompt` with `answer`, and nothing else, by supervised updates.
pub fn memorise(engine: &Engine, prompt: &[u32], answer: &[u32]) {
    let ids = [prompt, answer].concat();
    let mask: Vec<bool> = (0..ids.len()).map(|at| at >= prompt.len()).collect();
    let row = TrainRow::supervised(ids, mask, 1.0 / answer.len() as f32);
    let loss = agl_engine::LossConfig { kind: agl_engine::LossKind::Sft, ..Default::default() };
    let optim = agl_engine::OptimConfig { lr: 0.01, ..Default::default() };
    for _ in 0..400 {
        let stats = engine.update(std::slice::from_ref(&row), &loss, &optim).unwrap();
        if stats.loss < 0.01 {
            return;
        }
    }
    panic!("the model did not learn the answer by heart");
}
