//! The engine's side of `scripts/parity/compare.py`: reads `request.json` of a model directory, writes `answer.json`.
//!
//! `parity_probe model DIR`: logits, log-probs, a greedy answer, a gradient, some updates, saved checkpoints.
//! `parity_probe templates DIR`: prompts.

use std::error::Error;
use std::fs;
use std::path::Path;

use agl_engine::{Engine, EngineConfig, GenerateRequest, LossConfig, OptimConfig, SamplingParams, SaveDtype, TrainRow};
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[path = "../tests/engine/recorded_row.rs"]
mod recorded_row;
use recorded_row::RecordedRow;

#[derive(Deserialize)]
struct ModelRequest {
    ids: Vec<u32>,
    prompt: Vec<u32>,
    new_tokens: usize,
    rows: Vec<RecordedRow>,
    loss: LossConfig,
    optim: OptimConfig,
    updates: usize,
}

#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    add_generation_prompt: Option<bool>,
    #[serde(default)]
    variables: Map<String, Value>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kind, dir] = arguments.as_slice() else { return Err("usage: parity_probe model|templates DIR".into()) };
    let dir = Path::new(dir);
    let request = fs::read(dir.join("request.json"))?;
    let engine = Engine::load(dir, EngineConfig { micro_batch_tokens: 64, ..EngineConfig::default() })?;
    let answer = match kind.as_str() {
        "model" => compute(&engine, dir, serde_json::from_slice(&request)?)?,
        _ => render(&engine, &serde_json::from_slice::<Vec<Conversation>>(&request)?)?,
    };
    fs::write(dir.join("answer.json"), serde_json::to_vec(&answer)?)?;
    Ok(())
}

fn compute(engine: &Engine, dir: &Path, request: ModelRequest) -> Result<Value, Box<dyn Error>> {
    let logits = engine.logits(&request.ids)?;
    let sampling = SamplingParams {
        temperature: 0.0,
        max_tokens: Some(request.new_tokens),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let greedy = runtime.block_on(engine.generate(GenerateRequest { prompt: request.prompt, sampling }))?;
    let rows: Vec<TrainRow> = request.rows.into_iter().map(TrainRow::from).collect();
    let temperature = request.loss.temperature;
    let ids: Vec<Vec<u32>> = rows.iter().map(|row| row.ids.clone()).collect();
    let log_probs = engine.log_probs(&ids, temperature)?;
    // An update that changes nothing, with moments that remember nothing but its gradient.
    let observed = Engine::load(dir, EngineConfig { micro_batch_tokens: 64, ..EngineConfig::default() })?;
    let standing = OptimConfig { lr: 0.0, betas: [0.0, 0.0], grad_clip: 0.0, ..OptimConfig::default() };
    observed.update(&rows, &request.loss, &standing)?;
    observed.save_optimizer(&dir.join("gradient"))?;
    let mut losses = Vec::new();
    let mut grad_norms = Vec::new();
    for _ in 0..request.updates {
        let stats = engine.update(&rows, &request.loss, &request.optim)?;
        losses.push(stats.loss);
        grad_norms.push(stats.grad_norm);
    }
    engine.save(&dir.join("saved"))?;
    engine.save_as(&dir.join("saved-bf16"), SaveDtype::Bf16)?;
    let half = Engine::load(&dir.join("saved-bf16"), EngineConfig::default())?;
    Ok(json!({
        "logits": logits,
        "greedy": greedy.token_ids,
        "log_probs": log_probs,
        "losses": losses,
        "grad_norms": grad_norms,
        "logits_after": engine.logits(&request.ids)?,
        "logits_bf16": half.logits(&request.ids)?,
    }))
}

fn render(engine: &Engine, conversations: &[Conversation]) -> Result<Value, Box<dyn Error>> {
    let mut prompts = Vec::new();
    for conversation in conversations {
        let rendered = engine.tokenizer().apply_chat_template_with(
            &conversation.messages,
            conversation.tools.as_deref(),
            conversation.add_generation_prompt.unwrap_or(true),
            &conversation.variables,
        );
        prompts.push(match rendered {
            Ok(prompt) => json!({"prompt": prompt}),
            Err(error) => json!({"refused": error.to_string()}),
        });
    }
    Ok(json!(prompts))
}
