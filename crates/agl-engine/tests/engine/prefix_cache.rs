//! Prompts that begin like earlier sequences: the same answers, with fewer tokens processed.

use agl_engine::{Engine, EngineConfig, GenerateOutput, LossConfig, LossKind, OptimConfig, SamplingParams, TrainRow};
use futures_util::future::join_all;

use super::fixture::{dir, engine, generate};

fn without_cache(model: &str) -> Engine {
    let config = EngineConfig { enable_prefix_caching: false, ..EngineConfig::default() };
    Engine::load(&dir(model), config).unwrap()
}

fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams { temperature: 0.0, max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::default() }
}

fn seeded(seed: u64, max_tokens: usize) -> SamplingParams {
    SamplingParams { temperature: 1.0, seed: Some(seed), ..greedy(max_tokens) }
}

fn text(seed: usize, len: usize) -> Vec<u32> {
    (0..len).map(|at| ((at + seed * 31) * 7919 % 127) as u32).collect()
}

/// What was recorded is what the training forward computes for the same tokens.
fn assert_agrees_with_training(engine: &Engine, prompt: &[u32], output: &GenerateOutput) {
    let row = [prompt, &output.token_ids].concat();
    let trained = &engine.log_probs(&[row], 1.0).unwrap()[0][prompt.len()..];
    assert_eq!(output.log_probs.len(), trained.len());
    for (sampled, trained) in output.log_probs.iter().zip(trained) {
        assert!((sampled - trained).abs() < 1e-4, "{sampled} recorded, {trained} in training");
    }
}

/// Any change of the parameters.
fn update(engine: &Engine) {
    let row = TrainRow::supervised(text(9, 12), vec![true; 12], 0.1);
    let loss = LossConfig { kind: LossKind::Sft, ..LossConfig::default() };
    engine.update(&[row], &loss, &OptimConfig { lr: 1e-2, ..OptimConfig::default() }).unwrap();
}

#[tokio::test]
async fn a_conversation_goes_on_as_if_every_turn_were_processed_whole() {
    for model in ["qwen3-tied", "qwen3-untied", "qwen2", "llama", "qwen3-window", "smollm3", "gemma3"] {
        let (cached, plain) = (engine(model), without_cache(model));
        let mut prompt = text(1, 40);
        let mut held = 0;
        // Tool results from a token to most of the context.
        for (turn, result) in [1, 5, 60, 130, 3].into_iter().enumerate() {
            let output = generate(&cached, &prompt, greedy(20)).await;
            let expected = generate(&plain, &prompt, greedy(20)).await;
            assert_eq!(output.token_ids, expected.token_ids, "{model}, turn {turn}");
            assert_eq!((output.cached_tokens, expected.cached_tokens), (held, 0), "{model}, turn {turn}");
            assert_agrees_with_training(&cached, &prompt, &output);
            prompt.extend(&output.token_ids);
            // The newest token was sampled but never processed.
            held = prompt.len() - 1;
            prompt.extend(text(turn + 2, result));
        }
    }
}

#[tokio::test]
async fn a_long_suffix_is_attended_to_in_blocks() {
    for model in ["qwen3-tied", "qwen3-window"] {
        let engine = engine(model);
        let prompt = text(1, 30);
        generate(&engine, &prompt, greedy(1)).await;
        let long = [prompt, text(2, 430)].concat();
        let output = generate(&engine, &long, seeded(1, 10)).await;
        assert_eq!(output.cached_tokens, 30);
        assert_agrees_with_training(&engine, &long, &output);
    }
}

#[tokio::test]
async fn siblings_process_their_common_prompt_once() {
    let (cached, plain) = (engine("qwen3-tied"), without_cache("qwen3-tied"));
    let prompt = text(3, 100);
    let group = |engine: Engine| {
        let prompt = prompt.clone();
        async move { join_all((0..8).map(|seed| generate(&engine, &prompt, seeded(seed, 15)))).await }
    };
    let (answers, expected) = (group(cached.clone()).await, group(plain.clone()).await);
    for (answer, expected) in answers.iter().zip(&expected) {
        assert_eq!(answer.token_ids, expected.token_ids);
        assert_agrees_with_training(&cached, &prompt, answer);
    }
    let totals = cached.sampler_totals();
    assert_eq!((totals.prompt_tokens, totals.cached_prompt_tokens), (100 + 7, 7 * 99));
    assert_eq!(plain.sampler_totals().prompt_tokens, 800);
}

#[tokio::test]
async fn what_was_computed_before_an_update_is_not_used_after_it() {
    let engine = engine("qwen3-tied");
    let prompt = text(4, 50);
    let before = generate(&engine, &prompt, greedy(10)).await;
    assert_eq!(generate(&engine, &prompt, greedy(10)).await.cached_tokens, 49);
    update(&engine);
    let after = generate(&engine, &prompt, greedy(10)).await;
    assert_eq!(after.cached_tokens, 0);
    assert_ne!(after.log_probs, before.log_probs);
    assert_agrees_with_training(&engine, &prompt, &after);
    engine.set_policy_version(5);
    let next = [prompt, after.token_ids, text(5, 5)].concat();
    assert_eq!(generate(&engine, &next, greedy(1)).await.cached_tokens, 0, "an entry belongs to one version");
}

#[tokio::test]
async fn a_sequence_that_an_update_passed_through_is_neither_kept_nor_shared() {
    let engine = engine("qwen3-tied");
    let prompt = text(6, 50);
    let running = {
        let (engine, prompt) = (engine.clone(), prompt.clone());
        tokio::spawn(async move { generate(&engine, &prompt, seeded(1, 400)).await })
    };
    while engine.sampler_totals().sampled_tokens < 3 {
        tokio::time::sleep(std::time::Duration::from_micros(200)).await;
    }
    update(&engine);
    let sibling = generate(&engine, &prompt, seeded(2, 5)).await;
    assert_eq!(sibling.cached_tokens, 0);
    assert_agrees_with_training(&engine, &prompt, &sibling);
    let old = running.await.unwrap();
    let next = [prompt, old.token_ids, text(7, 5)].concat();
    let next_output = generate(&engine, &next, seeded(3, 5)).await;
    // The sibling's own sequence is new and may be of use; of the old one nothing is but the prompt they share.
    assert!(next_output.cached_tokens < 60, "{}", next_output.cached_tokens);
    assert_agrees_with_training(&engine, &next, &next_output);
}

#[tokio::test]
async fn a_rewritten_history_is_used_as_far_as_it_is_unchanged() {
    let engine = engine("qwen3-untied");
    let prompt = text(1, 120);
    generate(&engine, &prompt, greedy(10)).await;
    let mut rewritten = prompt.clone();
    rewritten[70] = 127;
    let output = generate(&engine, &rewritten, seeded(1, 10)).await;
    assert_eq!(output.cached_tokens, 70);
    assert_agrees_with_training(&engine, &rewritten, &output);
    let again = generate(&engine, &prompt, seeded(1, 10)).await;
    assert_eq!(again.cached_tokens, 119, "the first history is still there");
    assert_agrees_with_training(&engine, &prompt, &again);
}

#[tokio::test]
async fn no_more_is_kept_than_was_allowed_and_the_oldest_goes_first() {
    // Two sequences of up to 64 tokens.
    let config = EngineConfig { prefix_cache_tokens: Some(128), ..EngineConfig::default() };
    let engine = Engine::load(&dir("qwen3-tied"), config).unwrap();
    let cached = async |seed: usize| generate(&engine, &text(seed, 20), greedy(4)).await.cached_tokens;
    assert_eq!([cached(1).await, cached(2).await, cached(3).await], [0; 3]);
    assert_eq!([cached(3).await, cached(2).await, cached(1).await], [19, 19, 0]);
    // One that needs more room than is allowed leaves none to others. With it goes the last one, and all memory.
    generate(&engine, &text(4, 200), greedy(4)).await;
    assert_eq!([cached(1).await, cached(1).await], [0, 19]);
}

#[tokio::test]
async fn a_crowd_of_conversations_in_little_room_is_answered_right() {
    let config = EngineConfig {
        max_batch_size: 5,
        max_prefill_tokens: 150,
        prefix_cache_tokens: Some(600),
        ..EngineConfig::default()
    };
    let engine = Engine::load(&dir("llama"), config).unwrap();
    let conversation = async |number: usize| {
        // Three groups of siblings, all with one system prompt.
        let mut prompt = [text(0, 24), text(1 + number % 3, 30)].concat();
        for turn in 0..4 {
            let output = generate(&engine, &prompt, seeded((number * 10 + turn) as u64, 3 + number % 7)).await;
            assert_agrees_with_training(&engine, &prompt, &output);
            if number.is_multiple_of(4) {
                prompt.truncate(30);
            }
            prompt.extend(&output.token_ids);
            prompt.extend(text(number + turn, 2 + (number * 5 + turn) % 11));
        }
    };
    join_all((0..24).map(conversation)).await;
    assert!(engine.sampler_totals().cached_prompt_tokens > 0);
}

#[tokio::test]
async fn ten_turns_process_an_eighth_of_the_prompt_tokens() {
    let processed = async |engine: Engine| {
        let mut prompt = text(1, 60);
        for turn in 0..10 {
            let output = generate(&engine, &prompt, greedy(16)).await;
            prompt.extend(&output.token_ids);
            prompt.extend(text(turn, 24));
        }
        engine.sampler_totals().prompt_tokens
    };
    // 60, 100, …, 420 against 60 and then 24 with the one token of the answer that was not processed.
    assert_eq!(processed(without_cache("qwen3-tied")).await, (0..10).map(|turn| 60 + 40 * turn).sum::<u64>());
    assert_eq!(processed(engine("qwen3-tied")).await, 60 + 9 * 25);
}
