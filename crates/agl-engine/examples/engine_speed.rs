//! The engine's side of `benches/engine/compare.py`: tokens per second of training and of decoding, as JSON.
//!
//! `engine_speed DIR ROWS ROW_LEN STEPS BATCH PROMPT NEW`

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use agl_engine::{Engine, EngineConfig, GenerateRequest, LossConfig, OptimConfig, SamplingParams, TrainRow};

/// As the `agl` binary does.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dir, sizes @ ..] = arguments.as_slice() else { return Err("usage: engine_speed DIR SIZES…".into()) };
    let sizes = sizes.iter().map(|size| size.parse()).collect::<Result<Vec<usize>, _>>()?;
    let [rows, row_len, steps, batch, prompt, new] = sizes[..] else { return Err("six sizes are needed".into()) };
    let engine = Engine::load(Path::new(dir), EngineConfig::default())?;
    let train = train(&engine, rows, row_len, steps)?;
    let decode = decode(&engine, batch, prompt, new)?;
    let figures = serde_json::json!({"train_tokens_per_second": train, "decode_tokens_per_second": decode});
    std::io::Write::write_all(&mut std::io::stdout(), figures.to_string().as_bytes())?;
    Ok(())
}

fn token(seed: usize) -> u32 {
    (3 + seed * 7919 % 421) as u32
}

fn train(engine: &Engine, rows: usize, row_len: usize, steps: usize) -> Result<f64, Box<dyn Error>> {
    let rows: Vec<TrainRow> = (0..rows)
        .map(|row| {
            let ids: Vec<u32> = (0..row_len).map(|at| token(row * row_len + at)).collect();
            let mut row = TrainRow::supervised(ids, vec![true; row_len], 1e-3);
            row.old_log_probs = vec![-6.9; row_len];
            row
        })
        .collect();
    let optim = OptimConfig { lr: 1e-4, ..OptimConfig::default() };
    engine.update(&rows, &LossConfig::default(), &optim)?;
    let started = Instant::now();
    for _ in 0..steps {
        engine.update(&rows, &LossConfig::default(), &optim)?;
    }
    Ok((steps * rows.len() * row_len) as f64 / started.elapsed().as_secs_f64())
}

fn decode(engine: &Engine, batch: usize, prompt: usize, new: usize) -> Result<f64, Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let answers = (0..batch).map(|i| {
        let prompt = (0..prompt).map(|at| token(i * prompt + at)).collect();
        let sampling = SamplingParams { max_tokens: Some(new), ignore_eos: true, ..SamplingParams::default() };
        engine.generate(GenerateRequest { prompt, sampling })
    });
    let started = Instant::now();
    runtime.block_on(futures_util::future::try_join_all(answers))?;
    Ok((batch * new) as f64 / started.elapsed().as_secs_f64())
}
