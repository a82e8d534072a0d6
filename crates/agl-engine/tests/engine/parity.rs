//! Agreement with `transformers`, whose answers were recorded in the fixtures.

use std::fs;

use agl_engine::{Engine, EngineConfig, LossConfig, OptimConfig, SamplingParams, TrainRow};
use safetensors::SafeTensors;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::fixture::{dir, engine, generate};
use super::recorded_row::RecordedRow;

/// What `scripts/parity/make_fixtures.py` wrote about one model.
#[derive(Deserialize)]
struct Expected {
    ids: Vec<u32>,
    rows: Vec<RecordedRow>,
    loss_config: LossConfig,
    loss: f64,
    /// Of each row's tokens but the first.
    log_probs: Vec<Vec<f32>>,
    greedy: Greedy,
}

#[derive(Deserialize)]
struct Greedy {
    prompt: Vec<u32>,
    ids: Vec<u32>,
    /// How far each token's logit was ahead of the second.
    gaps: Vec<f32>,
}

fn recorded(path: &str) -> Value {
    serde_json::from_slice(&fs::read(dir(path)).unwrap()).unwrap()
}

fn expected(name: &str) -> (Expected, Vec<u8>) {
    let json = serde_json::from_value(recorded(&format!("{name}/expected.json"))).unwrap();
    (json, fs::read(dir(name).join("expected.safetensors")).unwrap())
}

fn values(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let data = file.tensor(name).unwrap();
    data.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn assert_near(ours: &[f32], theirs: &[f32], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (at, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert!((ours - theirs).abs() < 1e-4, "{what}, number {at}: {ours} instead of {theirs}");
    }
}

fn norm(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

/// Loss and gradients of one step of the clipped policy gradient. An update with a learning rate of 0 changes nothing, and
/// with betas of 0 its first moment is the gradient.
fn assert_gradients_agree(name: &str, expected: &Expected, tensors: &SafeTensors<'_>) {
    let engine = Engine::load(&dir(name), EngineConfig { micro_batch_tokens: 64, ..Default::default() }).unwrap();
    let optim = OptimConfig { lr: 0.0, betas: [0.0, 0.0], grad_clip: 0.0, ..Default::default() };
    let rows: Vec<TrainRow> = expected.rows.iter().cloned().map(TrainRow::from).collect();
    let stats = engine.update(&rows, &expected.loss_config, &optim).unwrap();
    assert!((stats.loss - expected.loss).abs() < 1e-4 * expected.loss.abs(), "{name}: loss {}", stats.loss);
    let temp = tempfile::tempdir().unwrap();
    let saved = temp.path().join("optimizer");
    engine.save_optimizer(&saved).unwrap();
    let bytes = fs::read(saved.join("optimizer.safetensors")).unwrap();
    let moments = SafeTensors::deserialize(&bytes).unwrap();
    let mut compared = 0;
    for recorded in tensors.names() {
        let Some(parameter) = recorded.strip_prefix("gradient.") else { continue };
        let (ours, theirs) = (values(&moments, &format!("exp_avg.{parameter}")), values(tensors, recorded));
        let difference = norm(ours.iter().zip(&theirs).map(|(a, b)| a - b));
        // A gradient that all but vanishes (of the bias of keys, which rotation alone keeps from cancelling) is nothing
        // but rounding error.
        let length = norm(theirs.into_iter()).max(1e-3 * stats.grad_norm);
        assert!(
            difference <= 1e-4 * length,
            "{name}, {parameter}: off by {difference:.1e}, the gradient's length {length}"
        );
        compared += 1;
    }
    assert_eq!(2 * compared, moments.len(), "{name}: a gradient of every parameter was recorded");
}

/// Equal up to the first token where two are as good as tied; what follows a different token is another text.
fn assert_greedy_agrees(name: &str, ours: &[u32], greedy: &Greedy) {
    assert_eq!(ours.len(), greedy.ids.len());
    let differing = ours.iter().zip(&greedy.ids).position(|(ours, theirs)| ours != theirs);
    let tied = differing.is_none_or(|at| greedy.gaps[at] < 1e-4);
    assert!(tied, "{name}: token {differing:?} of {ours:?} differs from {:?}", greedy.ids);
}

async fn assert_agrees(name: &str) {
    let (expected, bytes) = expected(name);
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let engine = engine(name);
    let logits = engine.logits(&expected.ids).unwrap().concat();
    assert_near(&logits, &values(&tensors, "logits"), &format!("{name}, logits"));
    let ids: Vec<Vec<u32>> = expected.rows.iter().map(|row| row.ids.clone()).collect();
    let log_probs = engine.log_probs(&ids, expected.loss_config.temperature).unwrap();
    for (row, (ours, theirs)) in log_probs.iter().zip(&expected.log_probs).enumerate() {
        assert_near(&ours[1..], theirs, &format!("{name}, log-probs of row {row}"));
    }
    assert_gradients_agree(name, &expected, &tensors);
    let sampling = SamplingParams {
        temperature: 0.0,
        max_tokens: Some(expected.greedy.ids.len()),
        ignore_eos: true,
        ..Default::default()
    };
    let answer = generate(&engine, &expected.greedy.prompt, sampling).await;
    assert_greedy_agrees(name, &answer.token_ids, &expected.greedy);
    // What was recorded while sampling from the cache is what the training forward computes.
    let whole = [expected.greedy.prompt.clone(), answer.token_ids].concat();
    let again = engine.log_probs(&[whole], 1.0).unwrap().concat();
    assert_near(
        &answer.log_probs,
        &again[expected.greedy.prompt.len()..],
        &format!("{name}, log-probs while sampling"),
    );
}

#[tokio::test]
async fn qwen3_with_tied_embeddings_agrees() {
    assert_agrees("qwen3-tied").await;
}

#[tokio::test]
async fn qwen3_with_untied_embeddings_agrees() {
    assert_agrees("qwen3-untied").await;
}

#[tokio::test]
async fn qwen3_with_a_sliding_window_in_some_layers_agrees() {
    assert_agrees("qwen3-window").await;
}

#[tokio::test]
async fn qwen2_agrees() {
    assert_agrees("qwen2").await;
}

#[tokio::test]
async fn qwen2_stretched_by_yarn_agrees() {
    assert_agrees("qwen2-yarn").await;
}

#[tokio::test]
async fn llama_with_scaled_positions_agrees() {
    assert_agrees("llama").await;
}

#[tokio::test]
async fn llama_with_biases_everywhere_agrees() {
    assert_agrees("llama-biases").await;
}

#[tokio::test]
async fn smollm2_agrees() {
    assert_agrees("smollm2").await;
}

#[tokio::test]
async fn smollm3_with_a_layer_without_positions_agrees() {
    assert_agrees("smollm3").await;
}

#[tokio::test]
async fn gemma3_with_local_and_global_layers_agrees() {
    assert_agrees("gemma3").await;
}

#[test]
fn conversations_render_and_tokenise_as_in_transformers() {
    let recorded = recorded("chat_templates.json");
    let temp = tempfile::tempdir().unwrap();
    for (name, source) in recorded["templates"].as_object().unwrap() {
        let model = temp.path().join(name);
        fs::create_dir(&model).unwrap();
        for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
            fs::copy(dir("qwen3-tied").join(file), model.join(file)).unwrap();
        }
        fs::write(model.join("chat_template.jinja"), source.as_str().unwrap()).unwrap();
        let engine = Engine::load(&model, Default::default()).unwrap();
        let cases = recorded["cases"].as_array().unwrap().iter().filter(|case| case["template"] == name.as_str());
        for (number, case) in cases.enumerate() {
            let rendered = engine.tokenizer().apply_chat_template_with(
                case["messages"].as_array().unwrap(),
                case.get("tools").and_then(Value::as_array).map(Vec::as_slice),
                case.get("add_generation_prompt").and_then(Value::as_bool).unwrap_or(true),
                case.get("variables").and_then(Value::as_object).unwrap_or(&Map::new()),
            );
            if let Some(words) = case.get("refused").and_then(Value::as_str) {
                let error = rendered.expect_err(&format!("{name}, conversation {number}")).to_string();
                assert!(error.contains(words), "{name}, conversation {number}: {error}");
                continue;
            }
            let text = rendered.unwrap_or_else(|error| panic!("{name}, conversation {number}: {error}"));
            assert_eq!(text, case["expected"].as_str().unwrap(), "{name}, conversation {number}");
            if let Some(ids) = case["expected_ids"].as_array() {
                let ids: Vec<u32> = ids.iter().map(|id| id.as_u64().unwrap() as u32).collect();
                assert_eq!(engine.tokenizer().encode(&text).unwrap(), ids, "{name}, conversation {number}");
            }
        }
    }
}
