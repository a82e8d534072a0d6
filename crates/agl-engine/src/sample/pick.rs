//! One row of logits to one token.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::request::SamplingParams;
use crate::kernels::log_prob::exponentials;

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pick {
    pub id: u32,
    /// log softmax(logits / temperature) of `id`, before any adjustment and truncation.
    pub log_prob: f32,
    /// The likeliest ids, best first.
    pub top: Vec<(u32, f32)>,
}

/// Draws from softmax(z / temperature) cut by min-p, then by top-k, then by top-p; z is `adjusted` where it is given and
/// `logits` where it is not.
pub(crate) fn pick(logits: &[f32], adjusted: Option<&[f32]>, params: &SamplingParams, rng: &mut ChaCha8Rng) -> Pick {
    let greedy = params.temperature == 0.0;
    let inverse_temperature = if greedy { 1.0 } else { 1.0 / params.temperature };
    let mut weights = logits.to_vec();
    let (peak, sum) = exponentials(&mut weights, inverse_temperature);
    let log_sum = sum.ln();
    let log_prob = |id: u32| (logits[id as usize] - peak) * inverse_temperature - log_sum;
    let id = match adjusted {
        _ if greedy => likeliest(adjusted.unwrap_or(logits)),
        None => draw_from(&weights, params, rng),
        Some(adjusted) => {
            let mut weights = adjusted.to_vec();
            exponentials(&mut weights, inverse_temperature);
            draw_from(&weights, params, rng)
        }
    };
    let top = if params.top_logprobs == 0 {
        Vec::new()
    } else {
        let best = descending(&weights, params.top_logprobs);
        best.into_iter().map(|id| (id, log_prob(id))).collect()
    };
    Pick { id, log_prob: log_prob(id), top }
}

/// Draws from probabilities proportional to `weights`, the largest being 1, after leaving out what `params` say.
fn draw_from(weights: &[f32], params: &SamplingParams, rng: &mut ChaCha8Rng) -> u32 {
    let truncated = params.min_p > 0.0 || params.top_p < 1.0 || (1..weights.len()).contains(&params.top_k);
    if truncated {
        let kept = truncate(weights, params);
        draw(kept.iter().map(|id| (*id, weights[*id as usize])), rng)
    } else {
        draw(weights.iter().enumerate().map(|(id, weight)| (id as u32, *weight)), rng)
    }
}

/// The first of the largest.
fn likeliest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as u32
}

/// Ids of the `count` largest weights, largest first, equal ones in order of id.
fn descending(weights: &[f32], count: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..weights.len() as u32).collect();
    let order = |a: &u32, b: &u32| weights[*b as usize].total_cmp(&weights[*a as usize]).then(a.cmp(b));
    if count < ids.len() {
        ids.select_nth_unstable_by(count, order);
        ids.truncate(count);
    }
    ids.sort_unstable_by(order);
    ids
}

fn truncate(weights: &[f32], params: &SamplingParams) -> Vec<u32> {
    let count = if params.top_k == 0 { weights.len() } else { params.top_k };
    let mut ids = descending(weights, count);
    // The likeliest weighs 1, so a weight is the share that min-p speaks of. Small ones stand last: the order of min-p and
    // top-k makes no difference.
    ids.retain(|id| weights[*id as usize] >= params.min_p);
    let total: f64 = ids.iter().map(|id| f64::from(weights[*id as usize])).sum();
    let mut mass = 0.0;
    let needed = ids.iter().position(|id| {
        mass += f64::from(weights[*id as usize]);
        mass >= f64::from(params.top_p) * total
    });
    if let Some(last) = needed {
        ids.truncate(last + 1);
    }
    ids
}

/// Draws an id with probability proportional to its weight.
fn draw(weighted: impl Iterator<Item = (u32, f32)> + Clone, rng: &mut ChaCha8Rng) -> u32 {
    let total: f64 = weighted.clone().map(|(_, weight)| f64::from(weight)).sum();
    let mut remaining = rng.random::<f64>() * total;
    let mut last = 0;
    for (id, weight) in weighted {
        if weight > 0.0 {
            last = id;
            remaining -= f64::from(weight);
            if remaining < 0.0 {
                break;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn frequencies(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut counts = vec![0.0; logits.len()];
        for _ in 0..20_000 {
            counts[pick(logits, None, params, &mut rng).id as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    #[test]
    fn tokens_appear_as_often_as_softmax_at_the_temperature_says() {
        let logits = [1.0f32, 0.0, -1.0, 2.0];
        let params = SamplingParams { temperature: 0.7, ..SamplingParams::default() };
        let weights: Vec<f64> = logits.iter().map(|x| (f64::from(*x) / 0.7).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (found, weight) in frequencies(&logits, &params).iter().zip(&weights) {
            assert!((found - weight / total).abs() < 0.015, "{found} instead of {}", weight / total);
        }
    }

    #[test]
    fn top_k_and_top_p_exclude_the_tail() {
        let logits = [3.0f32, 2.0, 1.0, 0.0];
        let top_k = frequencies(&logits, &SamplingParams { top_k: 2, ..SamplingParams::default() });
        assert!(top_k[0] > 0.0 && top_k[1] > 0.0 && top_k[2] == 0.0 && top_k[3] == 0.0);
        // p = 0.64, 0.24, 0.09, 0.03: the first alone falls short of 0.7, the first two reach it.
        let top_p = frequencies(&logits, &SamplingParams { top_p: 0.7, ..SamplingParams::default() });
        assert!(top_p[1] > 0.0 && top_p[2] == 0.0);
    }

    #[test]
    fn min_p_excludes_what_is_far_less_likely_than_the_best_at_the_temperature() {
        let logits = [3.0f32, 2.0, 1.0, 0.0];
        // Relative to the best: 1, 0.37, 0.14, 0.05.
        let cold = frequencies(&logits, &SamplingParams { min_p: 0.2, ..SamplingParams::default() });
        assert!(cold[1] > 0.0 && cold[2] == 0.0 && cold[3] == 0.0);
        // 1, 0.61, 0.37, 0.22.
        let warm = frequencies(&logits, &SamplingParams { min_p: 0.2, temperature: 2.0, ..SamplingParams::default() });
        assert!(warm[3] > 0.0);
        // p = 0.64, 0.24, 0.09, 0.03. Of all, the first two fall short of 0.9; of the three that min-p leaves, they reach it.
        let both = SamplingParams { min_p: 0.1, top_p: 0.9, ..SamplingParams::default() };
        assert!(frequencies(&logits, &both)[2] == 0.0);
        assert!(frequencies(&logits, &SamplingParams { min_p: 0.0, ..both })[2] > 0.0);
        let one = frequencies(&logits, &SamplingParams { min_p: 1.0, ..SamplingParams::default() });
        assert_eq!(one[1..], [0.0; 3], "the likeliest is always left");
    }

    #[test]
    fn adjusted_logits_decide_what_is_drawn_and_not_what_is_recorded() {
        let (logits, adjusted) = ([3.0f32, 2.0, 1.0], [-100.0f32, 2.0, 9.0]);
        let total: f64 = logits.iter().map(|x| (f64::from(*x) / 2.0).exp()).sum();
        for temperature in [0.0, 2.0] {
            let params = SamplingParams { temperature, top_logprobs: 1, min_p: 0.5, ..SamplingParams::default() };
            let picked = pick(&logits, Some(&adjusted), &params, &mut ChaCha8Rng::seed_from_u64(0));
            assert_eq!((picked.id, picked.top[0].0), (2, 0));
            if temperature == 2.0 {
                assert!((f64::from(picked.log_prob) - (0.5 - total.ln())).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn the_log_prob_is_of_the_whole_distribution_even_when_it_is_cut() {
        let logits = [3.0f32, 2.0, 1.0, 0.0];
        let params = SamplingParams { top_k: 1, temperature: 2.0, top_logprobs: 2, ..SamplingParams::default() };
        let picked = pick(&logits, None, &params, &mut ChaCha8Rng::seed_from_u64(0));
        let total: f64 = logits.iter().map(|x| (f64::from(*x) / 2.0).exp()).sum();
        assert_eq!(picked.id, 0);
        assert!((f64::from(picked.log_prob) - (1.5 - total.ln())).abs() < 1e-6);
        assert_eq!(picked.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn temperature_zero_takes_the_likeliest_and_reports_temperature_one() {
        let logits = [0.0f32, 5.0, 4.0];
        let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let picked = pick(&logits, None, &params, &mut ChaCha8Rng::seed_from_u64(0));
        let total: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
        assert_eq!(picked.id, 1);
        assert!((f64::from(picked.log_prob) - (5.0 - total.ln())).abs() < 1e-6);
    }
}
