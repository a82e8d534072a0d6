//! What is sampled, and what is recorded of it.

use std::time::Duration;

use agl_engine::{EngineError, FinishReason, GenerateRequest, SamplingParams, StopReason};

use super::fixture::{engine, generate, memorise};

fn seeded(seed: u64) -> SamplingParams {
    SamplingParams { seed: Some(seed), max_tokens: Some(40), ignore_eos: true, ..SamplingParams::default() }
}

#[tokio::test]
async fn recorded_log_probs_equal_those_of_the_training_forward() {
    for (model, temperature, top_p) in [("qwen3-tied", 1.0, 1.0), ("qwen3-untied", 0.7, 0.9), ("llama", 1.3, 1.0)] {
        let engine = engine(model);
        let prompt = [5, 77, 31, 9, 120];
        let output = generate(&engine, &prompt, SamplingParams { temperature, top_p, ..seeded(3) }).await;
        let row = [&prompt[..], &output.token_ids].concat();
        let trained = &engine.log_probs(&[row], temperature).unwrap()[0][prompt.len()..];
        assert_eq!(output.log_probs.len(), 40);
        for (sampled, trained) in output.log_probs.iter().zip(trained) {
            assert!((sampled - trained).abs() < 1e-4, "{model}: {sampled} recorded, {trained} in training");
        }
    }
}

#[tokio::test]
async fn biases_penalties_and_min_p_change_what_is_drawn_and_not_what_is_recorded() {
    let engine = engine("qwen3-tied");
    let prompt = [5, 77, 31, 9, 120];
    let plain = SamplingParams { temperature: 0.8, top_logprobs: 3, ..seeded(3) };
    let mut answers = Vec::new();
    for sampling in [
        plain.clone(),
        SamplingParams { min_p: 0.9, ..plain.clone() },
        SamplingParams { presence_penalty: 2.0, ..plain.clone() },
        SamplingParams { frequency_penalty: 2.0, ..plain.clone() },
        SamplingParams { repetition_penalty: 1.5, ..plain.clone() },
        SamplingParams { logit_bias: vec![(64, 2.0), (9, -100.0)], ..plain },
    ] {
        let output = generate(&engine, &prompt, sampling).await;
        let row = [&prompt[..], &output.token_ids].concat();
        let trained = &engine.log_probs(std::slice::from_ref(&row), 0.8).unwrap()[0][prompt.len()..];
        let logits = engine.logits(&row).unwrap();
        for (at, (sampled, trained)) in output.log_probs.iter().zip(trained).enumerate() {
            assert!((sampled - trained).abs() < 1e-4, "{sampled} recorded, {trained} in training");
            let logits = &logits[prompt.len() + at - 1];
            let best = logits.iter().fold(f32::NEG_INFINITY, |best, logit| best.max(*logit));
            let (id, log_prob) = output.top_log_probs[at][0];
            assert!(best - logits[id as usize] < 1e-4, "the likeliest of the policy itself is reported");
            let distance = (best - logits[row[prompt.len() + at] as usize]) / 0.8;
            assert!((log_prob - sampled - distance).abs() < 1e-4);
        }
        answers.push(output.token_ids);
    }
    for changed in &answers[1..] {
        assert_ne!(*changed, answers[0]);
    }
}

#[tokio::test]
async fn a_heavy_repetition_penalty_lets_nothing_be_said_twice() {
    let engine = engine("qwen3-tied");
    let prompt: Vec<u32> = (0..20).collect();
    let greedy = SamplingParams { temperature: 0.0, repetition_penalty: 1e6, ..seeded(0) };
    let output = generate(&engine, &prompt, greedy).await;
    let mut said = [prompt, output.token_ids].concat();
    said.sort_unstable();
    said.dedup();
    assert_eq!(said.len(), 60, "20 of the prompt and 40 of the answer, all different");
}

#[tokio::test]
async fn a_seeded_answer_does_not_depend_on_what_else_is_in_the_batch() {
    let engine = engine("qwen3-tied");
    let prompt = [5, 77, 31];
    let alone = generate(&engine, &prompt, seeded(11)).await;
    // Neighbours of other lengths, which join before it and leave while it runs.
    let neighbours = (0..24u32).map(|i| {
        let prompt: Vec<u32> = (0..=i).map(|j| (i * 7 + j) % 128).collect();
        let engine = engine.clone();
        let sampling = SamplingParams { max_tokens: Some(1 + 3 * i as usize), ..seeded(u64::from(i)) };
        tokio::spawn(async move { generate(&engine, &prompt, sampling).await })
    });
    let neighbours: Vec<_> = neighbours.collect();
    let crowded = generate(&engine, &prompt, seeded(11)).await;
    for neighbour in neighbours {
        neighbour.await.unwrap();
    }
    assert_eq!(alone.token_ids, crowded.token_ids);
    for (a, b) in alone.log_probs.iter().zip(&crowded.log_probs) {
        assert!((a - b).abs() < 1e-4, "{a} alone, {b} in company");
    }
}

#[tokio::test]
async fn another_seed_gives_another_answer_and_no_seed_a_new_one_each_time() {
    let engine = engine("qwen3-tied");
    let first = generate(&engine, &[1, 2], seeded(1)).await;
    assert_ne!(first.token_ids, generate(&engine, &[1, 2], seeded(2)).await.token_ids);
    let unseeded = SamplingParams { seed: None, ..seeded(0) };
    let a = generate(&engine, &[1, 2], unseeded.clone()).await;
    assert_ne!(a.token_ids, generate(&engine, &[1, 2], unseeded).await.token_ids);
}

#[tokio::test]
async fn a_stop_text_ends_the_answer_and_is_cut_off_but_its_tokens_are_reported() {
    let engine = engine("qwen3-tied");
    let prompt = engine.tokenizer().encode("say:").unwrap();
    let answer = engine.tokenizer().encode("one two three<|im_end|>").unwrap();
    memorise(&engine, &prompt, &answer);
    let greedy = SamplingParams { temperature: 0.0, stop: vec!["o th".to_owned()], ..SamplingParams::default() };
    let output = generate(&engine, &prompt, greedy).await;
    assert_eq!(output.text, "one tw");
    assert_eq!(output.finish_reason, FinishReason::Stop);
    assert_eq!(output.stop_reason, Some(StopReason::Text("o th".to_owned())));
    assert!(engine.tokenizer().decode(&output.token_ids, true).unwrap().starts_with("one two th"));
}

#[tokio::test]
async fn an_end_token_is_reported_but_not_part_of_the_text() {
    let engine = engine("qwen3-tied");
    let end = engine.tokenizer().token_id("<|im_end|>").unwrap();
    assert_eq!(engine.tokenizer().eos_token_ids(), [end]);
    let prompt = engine.tokenizer().encode("say:").unwrap();
    let answer = engine.tokenizer().encode("yes<|im_end|>").unwrap();
    memorise(&engine, &prompt, &answer);
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let output = generate(&engine, &prompt, greedy.clone()).await;
    assert_eq!((output.text.as_str(), output.token_ids.as_slice()), ("yes", answer.as_slice()));
    assert_eq!((output.finish_reason, output.stop_reason), (FinishReason::Stop, None));
    let by_id = SamplingParams { stop_token_ids: vec![answer[0]], ..greedy };
    let output = generate(&engine, &prompt, by_id).await;
    assert_eq!((output.token_ids.as_slice(), output.text.as_str()), (&answer[..1], ""));
    assert_eq!(output.stop_reason, Some(StopReason::Token(answer[0])));
}

#[tokio::test]
async fn an_answer_ends_at_max_tokens_and_at_the_models_maximum_length() {
    let engine = engine("qwen3-tied");
    let output = generate(&engine, &[1; 10], SamplingParams { max_tokens: Some(7), ..seeded(0) }).await;
    assert_eq!((output.token_ids.len(), output.finish_reason), (7, FinishReason::Length));
    let output = generate(&engine, &[1; 250], SamplingParams { max_tokens: None, ..seeded(0) }).await;
    assert_eq!(output.token_ids.len(), engine.max_model_len() - 250);
}

#[tokio::test]
async fn a_prompt_that_leaves_no_room_is_refused_with_the_numbers() {
    let engine = engine("qwen3-tied");
    let request = GenerateRequest { prompt: vec![1; 512], sampling: SamplingParams::default() };
    let error = engine.generate(request).await.unwrap_err();
    assert!(matches!(error, EngineError::PromptTooLong { prompt: 512, max_model_len: 512 }));
    assert!(error.to_string().contains("512 tokens"), "{error}");
}

#[tokio::test]
async fn every_token_carries_the_version_that_sampled_it() {
    let engine = engine("qwen3-tied");
    let running = {
        let engine = engine.clone();
        tokio::spawn(async move {
            generate(&engine, &[1, 2, 3], SamplingParams { max_tokens: Some(240), ..seeded(5) }).await
        })
    };
    while engine.sampler_totals().sampled_tokens < 5 {
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
    engine.set_policy_version(9);
    let output = running.await.unwrap();
    let first_new = output.policy_versions.iter().position(|version| *version == 9);
    // On a busy machine the answer may have ended before the version changed; then all of it is old.
    let first_new = first_new.unwrap_or(output.policy_versions.len());
    assert!(first_new >= 4);
    assert!(output.policy_versions[..first_new].iter().all(|version| *version == 0));
    assert!(output.policy_versions[first_new..].iter().all(|version| *version == 9));
    assert_eq!(generate(&engine, &[1], seeded(0)).await.policy_versions, vec![9; 40]);
}

#[tokio::test]
async fn a_request_whose_caller_has_gone_leaves_the_batch() {
    let engine = agl_engine::Engine::load(
        &super::fixture::dir("qwen3-tied"),
        agl_engine::EngineConfig { max_batch_size: 1, ..Default::default() },
    )
    .unwrap();
    let long = SamplingParams { max_tokens: Some(250), ..seeded(0) };
    for _ in 0..20 {
        let abandoned = engine.generate(GenerateRequest { prompt: vec![1], sampling: long.clone() });
        drop(tokio::time::timeout(Duration::from_micros(500), abandoned).await);
    }
    let before = engine.sampler_totals().sampled_tokens;
    generate(&engine, &[1], SamplingParams { max_tokens: Some(5), ..seeded(0) }).await;
    let sampled = engine.sampler_totals().sampled_tokens - before;
    assert!(sampled < 250, "the one place in the batch was free at once, not after {sampled} tokens");
}

#[tokio::test]
async fn settings_out_of_range_name_the_field() {
    let engine = engine("qwen3-tied");
    for (sampling, field) in [
        (SamplingParams { temperature: -1.0, ..SamplingParams::default() }, "temperature"),
        (SamplingParams { top_p: 0.0, ..SamplingParams::default() }, "top_p"),
        (SamplingParams { max_tokens: Some(0), ..SamplingParams::default() }, "max_tokens"),
        (SamplingParams { stop: vec![String::new()], ..SamplingParams::default() }, "stop"),
        (SamplingParams { top_logprobs: 21, ..SamplingParams::default() }, "top_logprobs"),
        (SamplingParams { min_p: 1.1, ..SamplingParams::default() }, "min_p"),
        (SamplingParams { min_p: f32::NAN, ..SamplingParams::default() }, "min_p"),
        (SamplingParams { presence_penalty: -2.1, ..SamplingParams::default() }, "presence_penalty"),
        (SamplingParams { frequency_penalty: 2.1, ..SamplingParams::default() }, "frequency_penalty"),
        (SamplingParams { repetition_penalty: 0.0, ..SamplingParams::default() }, "repetition_penalty"),
        (SamplingParams { logit_bias: vec![(1, 101.0)], ..SamplingParams::default() }, "logit_bias"),
        (SamplingParams { logit_bias: vec![(128, 1.0)], ..SamplingParams::default() }, "logit_bias"),
    ] {
        let error = engine.generate(GenerateRequest { prompt: vec![1], sampling }).await.unwrap_err();
        assert!(error.to_string().starts_with(&format!("`{field}` must be")), "{error}");
    }
}
