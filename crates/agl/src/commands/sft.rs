//! `agl sft`: a policy's supervised start from chat transcripts, from random weights or from a model directory.

use std::path::{Path, PathBuf};

use agl_engine::{ChatTokenizer, Engine, EngineConfig, LossConfig, LossKind, OptimConfig, TrainRow};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;
use serde_json::Value;

use crate::failure::usage;
use crate::output::line;

/// See `agl sft --help`.
#[derive(Args)]
pub struct SftArgs {
    /// Transcripts, one JSON object per line: `{"messages": […], "tools": […]}` in OpenAI's chat form. The assistant's
    /// messages are learned, everything else is context.
    #[arg(long, value_name = "FILE.jsonl")]
    data: PathBuf,
    /// Model directory: config, tokenizer and chat template, and the weights unless `--from-scratch`.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Start from random weights.
    #[arg(long)]
    from_scratch: bool,
    /// Where the model directory is written.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Passes over the data.
    #[arg(long, default_value_t = 1)]
    epochs: usize,
    /// Transcripts per update.
    #[arg(long, default_value_t = 64)]
    batch_size: usize,
    /// Highest learning rate; it rises over the first twentieth of the updates and falls linearly to a tenth.
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// Weight decay.
    #[arg(long, default_value_t = 0.01)]
    weight_decay: f64,
    /// Seed of the weights and of the order.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// One line of the data.
#[derive(Deserialize)]
struct Transcript {
    messages: Vec<Value>,
    #[serde(default)]
    tools: Vec<Value>,
}

/// Trains and writes the model directory.
pub async fn sft(args: SftArgs) -> anyhow::Result<()> {
    tokio::task::spawn_blocking(move || train(&args)).await?
}

fn train(args: &SftArgs) -> anyhow::Result<()> {
    if args.batch_size == 0 || args.epochs == 0 {
        return Err(usage("--batch-size and --epochs are at least 1"));
    }
    let config = EngineConfig::default();
    let engine = if args.from_scratch {
        Engine::init(&args.model.join("config.json"), &args.model, args.seed, config)?
    } else {
        Engine::load(&args.model, config)?
    };
    let rows = read_rows(&args.data, engine.tokenizer())?;
    let per_epoch = rows.len().div_ceil(args.batch_size);
    let total = per_epoch * args.epochs;
    let bar = ProgressBar::new(total as u64);
    bar.set_style(ProgressStyle::with_template("{bar:32} update {pos}/{len}  loss {msg}  [{elapsed}, {eta} to go]")?);
    let mut rng = ChaCha8Rng::seed_from_u64(args.seed);
    let mut update = 0;
    let mut average = None;
    for _ in 0..args.epochs {
        let mut indexes: Vec<usize> = (0..rows.len()).collect();
        indexes.shuffle(&mut rng);
        for batch in indexes.chunks(args.batch_size) {
            let optim = OptimConfig {
                lr: args.lr * schedule(update, total),
                weight_decay: args.weight_decay,
                betas: [0.9, 0.95],
                ..OptimConfig::default()
            };
            let loss = LossConfig { kind: LossKind::Sft, ..LossConfig::default() };
            let stats = engine.update(&weighed(&rows, batch), &loss, &optim)?;
            average = Some(average.map_or(stats.loss, |average: f64| 0.95 * average + 0.05 * stats.loss));
            update += 1;
            bar.set_message(format!("{:.4}", average.unwrap_or(stats.loss)));
            bar.inc(1);
            if bar.is_hidden() && update % 50 == 0 {
                line(format!(
                    "update {update}/{total}  loss {:.4}  {:.0} tokens/s",
                    average.unwrap_or(0.0),
                    stats.tokens as f64 / stats.seconds
                ));
            }
        }
    }
    bar.finish_and_clear();
    engine.save(&args.out)?;
    line(format!(
        "{} transcripts, {total} updates, loss {:.4}: {}",
        rows.len(),
        average.unwrap_or(0.0),
        args.out.display()
    ));
    Ok(())
}

/// Rises over the first twentieth, then falls linearly to a tenth.
fn schedule(update: usize, total: usize) -> f64 {
    let warmup = (total / 20).max(1);
    if update < warmup {
        return (update + 1) as f64 / warmup as f64;
    }
    1.0 - 0.9 * (update - warmup) as f64 / (total - warmup).max(1) as f64
}

/// A row of a transcript: its tokens, and which of them the assistant said.
struct Row {
    ids: Vec<u32>,
    mask: Vec<bool>,
}

/// The rows of an update; every learned token weighs the same.
fn weighed(rows: &[Row], batch: &[usize]) -> Vec<TrainRow> {
    let learned: usize = batch.iter().map(|&index| rows[index].mask.iter().filter(|&&bit| bit).count()).sum();
    let weight = 1.0 / learned.max(1) as f32;
    batch.iter().map(|&index| TrainRow::supervised(rows[index].ids.clone(), rows[index].mask.clone(), weight)).collect()
}

fn read_rows(path: &Path, tokenizer: &ChatTokenizer) -> anyhow::Result<Vec<Row>> {
    let text = std::fs::read_to_string(path).map_err(|error| usage(format!("{}: {error}", path.display())))?;
    let mut rows = Vec::new();
    for (number, entry) in text.lines().enumerate().filter(|(_, entry)| !entry.trim().is_empty()) {
        let place = || format!("{} line {}", path.display(), number + 1);
        let transcript: Transcript =
            serde_json::from_str(entry).map_err(|error| usage(format!("{}: {error}", place())))?;
        rows.extend(rows_of(&transcript, tokenizer).map_err(|error| usage(format!("{}: {error}", place())))?);
    }
    if rows.is_empty() {
        return Err(usage(format!("{}: there is no assistant message to learn from", path.display())));
    }
    Ok(rows)
}

/// Each assistant message is learned under the prompt the template renders before it. As long as a prompt starts with what
/// came before, the messages share a row; where the template rewrites history, a new row begins.
fn rows_of(transcript: &Transcript, tokenizer: &ChatTokenizer) -> anyhow::Result<Vec<Row>> {
    let eos: Vec<String> =
        tokenizer.eos_token_ids().iter().map(|&id| tokenizer.decode(&[id], false)).collect::<Result<_, _>>()?;
    let mut rows: Vec<Row> = Vec::new();
    let mut so_far = String::new();
    for (index, message) in transcript.messages.iter().enumerate() {
        if message.get("role").and_then(Value::as_str) != Some("assistant") {
            continue;
        }
        let tools = (!transcript.tools.is_empty()).then_some(transcript.tools.as_slice());
        let prompt = tokenizer.apply_chat_template(&transcript.messages[..index], tools, true)?;
        let whole = tokenizer.apply_chat_template(&transcript.messages[..=index], tools, false)?;
        let Some(said) = whole.strip_prefix(&prompt) else {
            anyhow::bail!("message {index}: the chat template does not render it behind its own prompt");
        };
        // What the template puts behind the end of the turn belongs to the next prompt.
        let end =
            eos.iter().filter_map(|eos| said.find(eos.as_str()).map(|at| at + eos.len())).min().unwrap_or(said.len());
        let said = &said[..end];
        let context = match prompt.strip_prefix(&so_far) {
            Some(context) if !rows.is_empty() => context,
            _ => {
                rows.push(Row { ids: Vec::new(), mask: Vec::new() });
                &prompt
            }
        };
        if let Some(row) = rows.last_mut() {
            for (text, learned) in [(context, false), (said, true)] {
                let ids = tokenizer.encode(text)?;
                row.mask.extend(std::iter::repeat_n(learned, ids.len()));
                row.ids.extend(ids);
            }
        }
        so_far = format!("{prompt}{said}");
    }
    Ok(rows)
}
