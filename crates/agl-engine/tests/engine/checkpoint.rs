//! Model directories and optimiser state on disk.

use std::fs;
use std::path::Path;

use agl_engine::{Engine, EngineConfig, LossConfig, LossKind, OptimConfig, SaveDtype, TrainRow};

use super::fixture::{dir, engine};

fn learn(engine: &Engine, updates: usize) {
    let row = TrainRow::supervised((1..30).collect(), vec![true; 29], 0.05);
    let loss = LossConfig { kind: LossKind::Sft, ..LossConfig::default() };
    for _ in 0..updates {
        engine.update(std::slice::from_ref(&row), &loss, &OptimConfig { lr: 1e-3, ..OptimConfig::default() }).unwrap();
    }
}

fn load_error(dir: &Path) -> String {
    Engine::load(dir, EngineConfig::default()).unwrap_err().to_string()
}

fn copy_of(name: &str) -> tempfile::TempDir {
    let temp = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(dir(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, temp.path().join(path.file_name().unwrap())).unwrap();
    }
    temp
}

#[test]
fn a_saved_model_loads_with_the_same_numbers_and_the_same_tokenizer() {
    let temp = tempfile::tempdir().unwrap();
    let saved = temp.path().join("step-1");
    let engine = engine("qwen3-untied");
    learn(&engine, 2);
    engine.save(&saved).unwrap();
    let again = Engine::load(&saved, EngineConfig::default()).unwrap();
    assert_eq!(again.logits(&[1, 2, 3]).unwrap(), engine.logits(&[1, 2, 3]).unwrap());
    let messages = [serde_json::json!({"role": "user", "content": "Hi"})];
    assert_eq!(
        again.tokenizer().apply_chat_template(&messages, None, true).unwrap(),
        engine.tokenizer().apply_chat_template(&messages, None, true).unwrap()
    );
}

#[test]
fn a_model_saved_in_half_precision_is_near_and_says_so() {
    let temp = tempfile::tempdir().unwrap();
    let saved = temp.path().join("half");
    let engine = engine("qwen3-tied");
    engine.save_as(&saved, SaveDtype::Bf16).unwrap();
    assert!(fs::read_to_string(saved.join("config.json")).unwrap().contains("bfloat16"));
    let again = Engine::load(&saved, EngineConfig::default()).unwrap();
    let (a, b) = (engine.logits(&[1, 2]).unwrap(), again.logits(&[1, 2]).unwrap());
    let difference = a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(difference > 0.0 && difference < 0.3, "{difference}");
}

#[test]
fn training_resumed_from_disk_goes_on_to_the_bit() {
    let temp = tempfile::tempdir().unwrap();
    let (model, optimizer) = (temp.path().join("model"), temp.path().join("optimizer"));
    let uninterrupted = engine("qwen3-tied");
    learn(&uninterrupted, 3);
    uninterrupted.save(&model).unwrap();
    uninterrupted.save_optimizer(&optimizer).unwrap();
    learn(&uninterrupted, 3);
    let resumed = Engine::load(&model, EngineConfig::default()).unwrap();
    resumed.load_optimizer(&optimizer).unwrap();
    learn(&resumed, 3);
    assert_eq!(resumed.logits(&[7, 8, 9]).unwrap(), uninterrupted.logits(&[7, 8, 9]).unwrap());
    // Without the moments it would not: the test can fail.
    let forgetful = Engine::load(&model, EngineConfig::default()).unwrap();
    learn(&forgetful, 3);
    assert_ne!(forgetful.logits(&[7, 8, 9]).unwrap(), uninterrupted.logits(&[7, 8, 9]).unwrap());
}

#[test]
fn an_optimiser_state_of_another_model_is_refused() {
    let temp = tempfile::tempdir().unwrap();
    let saved = temp.path().join("optimizer");
    engine("qwen3-tied").save_optimizer(&saved).unwrap();
    let error = engine("qwen2").load_optimizer(&saved).unwrap_err().to_string();
    assert!(
        error.contains("optimizer.safetensors: tensor `exp_avg.model.layers.0.self_attn.q_proj.bias` is missing"),
        "{error}"
    );
}

#[test]
fn a_missing_file_is_named() {
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        let model = copy_of("qwen3-tied");
        fs::remove_file(model.path().join(file)).unwrap();
        let error = load_error(model.path());
        assert!(error.starts_with(&format!("cannot read {}", model.path().join(file).display())), "{error}");
    }
}

#[test]
fn a_tensor_of_another_architecture_is_named() {
    let model = copy_of("qwen2");
    let config = fs::read_to_string(model.path().join("config.json")).unwrap();
    fs::write(model.path().join("config.json"), config.replace("Qwen2ForCausalLM", "LlamaForCausalLM")).unwrap();
    let error = load_error(model.path());
    assert!(error.contains("_proj.bias` does not belong to the architecture that config.json describes"), "{error}");
}

#[test]
fn a_missing_tensor_is_named() {
    let model = copy_of("llama");
    let config = fs::read_to_string(model.path().join("config.json")).unwrap();
    fs::write(model.path().join("config.json"), config.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"))
        .unwrap();
    assert!(load_error(model.path()).contains("tensor `model.layers.2.input_layernorm.weight` [32] is missing"));
}

#[test]
fn a_tensor_of_another_shape_is_named_with_both_shapes() {
    let model = copy_of("qwen3-tied");
    let config = fs::read_to_string(model.path().join("config.json")).unwrap();
    fs::write(
        model.path().join("config.json"),
        config.replace("\"intermediate_size\": 48", "\"intermediate_size\": 64"),
    )
    .unwrap();
    let error = load_error(model.path());
    assert!(error.contains("has shape") && error.contains("but config.json implies"), "{error}");
}

#[test]
fn a_weight_file_cut_short_is_named() {
    let model = copy_of("qwen3-tied");
    let path = model.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let error = load_error(model.path());
    assert!(error.contains("model.safetensors: not a whole safetensors file"), "{error}");
}

#[test]
fn an_unknown_architecture_and_a_missing_key_are_named() {
    let model = copy_of("qwen3-tied");
    let path = model.path().join("config.json");
    let config = fs::read_to_string(&path).unwrap();
    fs::write(&path, config.replace("Qwen3ForCausalLM", "MambaForCausalLM")).unwrap();
    let error = load_error(model.path());
    assert!(error.starts_with(&format!("{}: `architectures` says `MambaForCausalLM`", path.display())), "{error}");
    assert!(error.contains("supported are Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM,"), "{error}");
    fs::write(&path, config.replace("\"vocab_size\"", "\"vocabulary\"")).unwrap();
    assert!(load_error(model.path()).contains("the key `vocab_size` is missing"));
}

#[test]
fn a_model_split_over_several_files_loads() {
    let model = copy_of("qwen3-tied");
    fs::rename(model.path().join("model.safetensors"), model.path().join("model-00001-of-00001.safetensors")).unwrap();
    let index = r#"{"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}"#;
    fs::write(model.path().join("model.safetensors.index.json"), index).unwrap();
    let loaded = Engine::load(model.path(), EngineConfig::default()).unwrap();
    assert_eq!(loaded.logits(&[1]).unwrap(), engine("qwen3-tied").logits(&[1]).unwrap());
}

#[test]
fn a_fresh_model_depends_on_its_seed_only() {
    let fresh = |seed| {
        Engine::init(&dir("qwen3-tied").join("config.json"), &dir("qwen3-tied"), seed, EngineConfig::default()).unwrap()
    };
    assert_eq!(fresh(1).logits(&[1, 2]).unwrap(), fresh(1).logits(&[1, 2]).unwrap());
    assert_ne!(fresh(1).logits(&[1, 2]).unwrap(), fresh(2).logits(&[1, 2]).unwrap());
}

#[test]
fn a_tokenizer_may_have_added_tokens_the_model_does_not_know_but_no_others() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("config.json");
    let config = fs::read_to_string(dir("gemma3").join("config.json")).unwrap();
    let with_vocabulary = |size: usize| {
        fs::write(&path, config.replace("\"vocab_size\": 128", &format!("\"vocab_size\": {size}"))).unwrap();
        Engine::init(&path, &dir("gemma3"), 0, EngineConfig::default())
    };
    let engine = with_vocabulary(115).unwrap();
    assert!(engine.tokenizer().vocab_size() > 115);
    let error = with_vocabulary(100).unwrap_err().to_string();
    assert!(error.contains("it has 113 tokens, but config.json gives the model a `vocab_size` of 100"), "{error}");
}

#[test]
fn a_missing_optimiser_state_is_named() {
    let temp = tempfile::tempdir().unwrap();
    let error = engine("qwen3-tied").load_optimizer(temp.path()).unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("{}: cannot be read", temp.path().join("optimizer.safetensors").display())),
        "{error}"
    );
}

#[test]
fn a_checkpoint_that_cannot_be_written_names_the_path() {
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("file");
    fs::write(&file, "").unwrap();
    let error = engine("qwen3-tied").save(&file.join("step-1")).unwrap_err().to_string();
    assert!(error.starts_with(&format!("cannot write {}", file.display())), "{error}");
}
