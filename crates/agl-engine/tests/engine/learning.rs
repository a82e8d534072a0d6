//! Sampling and training together.

use agl_engine::{GenerateRequest, LossConfig, OptimConfig, SamplingParams, TrainRow};

use super::fixture::engine;

/// Reward: the share of an answer's tokens that are `WANTED`.
const WANTED: u32 = 42;

#[tokio::test]
async fn a_reward_for_one_token_rises() {
    let engine = engine("qwen3-tied");
    let prompt = vec![3u32, 1, 4];
    let sampling = SamplingParams { max_tokens: Some(8), ignore_eos: true, ..SamplingParams::default() };
    let optim = OptimConfig { lr: 0.01, ..OptimConfig::default() };
    let mut rewards = Vec::new();
    for step in 0..40u64 {
        let answers = (0..64).map(|i| {
            let sampling = SamplingParams { seed: Some(step * 1000 + i), ..sampling.clone() };
            engine.generate(GenerateRequest { prompt: prompt.clone(), sampling })
        });
        let answers = futures_util::future::try_join_all(answers).await.unwrap();
        let reward = |ids: &[u32]| ids.iter().filter(|id| **id == WANTED).count() as f32 / ids.len() as f32;
        let mean = answers.iter().map(|answer| reward(&answer.token_ids)).sum::<f32>() / 64.0;
        let rows: Vec<TrainRow> = answers
            .iter()
            .map(|answer| {
                let ids = [prompt.as_slice(), &answer.token_ids].concat();
                let mask = (0..ids.len()).map(|at| at >= prompt.len()).collect();
                let mut row = TrainRow::supervised(ids, mask, 1.0 / (64.0 * 8.0));
                row.advantages = vec![reward(&answer.token_ids) - mean; row.ids.len()];
                row.old_log_probs = [vec![0.0; prompt.len()], answer.log_probs.clone()].concat();
                row
            })
            .collect();
        let stats = engine.update(&rows, &LossConfig::default(), &optim).unwrap();
        assert!((stats.ratio_mean - 1.0).abs() < 1e-4, "sampled by the very policy that is trained: {stats:?}");
        rewards.push(mean);
    }
    assert!(rewards[0] < 0.1 && rewards[39] > 0.8, "{rewards:?}");
}
