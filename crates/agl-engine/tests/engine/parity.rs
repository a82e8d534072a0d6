//! Agreement with `transformers`, whose answers were recorded in the fixtures.

use std::fs;

use serde_json::{Map, Value};

use super::fixture::{dir, engine};

fn recorded(path: &str) -> Value {
    serde_json::from_slice(&fs::read(dir(path)).unwrap()).unwrap()
}

fn assert_logits_agree(name: &str) {
    let recorded = recorded(&format!("{name}/expected_logits.json"));
    let ids: Vec<u32> = serde_json::from_value(recorded["ids"].clone()).unwrap();
    let expected: Vec<Vec<f32>> = serde_json::from_value(recorded["logits"].clone()).unwrap();
    let logits = engine(name).logits(&ids).unwrap();
    assert_eq!(logits.len(), expected.len());
    for (position, (ours, theirs)) in logits.iter().zip(&expected).enumerate() {
        for (ours, theirs) in ours.iter().zip(theirs) {
            assert!((ours - theirs).abs() < 1e-4, "{name}, position {position}: {ours} instead of {theirs}");
        }
    }
}

#[test]
fn logits_of_qwen3_with_tied_embeddings_agree() {
    assert_logits_agree("qwen3-tied");
}

#[test]
fn logits_of_qwen3_with_untied_embeddings_agree() {
    assert_logits_agree("qwen3-untied");
}

#[test]
fn logits_of_qwen2_agree() {
    assert_logits_agree("qwen2");
}

#[test]
fn logits_of_llama_with_scaled_positions_agree() {
    assert_logits_agree("llama");
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
        let engine = agl_engine::Engine::load(&model, Default::default()).unwrap();
        let cases = recorded["cases"].as_array().unwrap().iter().filter(|case| case["template"] == name.as_str());
        for (number, case) in cases.enumerate() {
            let text = engine
                .tokenizer()
                .apply_chat_template_with(
                    case["messages"].as_array().unwrap(),
                    case.get("tools").and_then(Value::as_array).map(Vec::as_slice),
                    case.get("add_generation_prompt").and_then(Value::as_bool).unwrap_or(true),
                    case.get("variables").and_then(Value::as_object).unwrap_or(&Map::new()),
                )
                .unwrap();
            assert_eq!(text, case["expected"].as_str().unwrap(), "{name}, conversation {number}");
            if let Some(ids) = case["expected_ids"].as_array() {
                let ids: Vec<u32> = ids.iter().map(|id| id.as_u64().unwrap() as u32).collect();
                assert_eq!(engine.tokenizer().encode(&text).unwrap(), ids, "{name}, conversation {number}");
            }
        }
    }
}
