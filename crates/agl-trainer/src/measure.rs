//! What an update must know of the sampled tokens beside their rewards: what the policy before the update and the reference
//! policy say of them, and what follows from the difference to what was recorded.

use std::time::Instant;

use agl_core::credit::off_policy::{CorrectedRow, Drift, DriftRow};
use agl_engine::{Engine, EngineError, MaskedRow};

use crate::TrainerError;
use crate::config::{ActorConfig, AlgorithmConfig};
use crate::correction::OldLogProbs;
use crate::update::{SampleRow, Samples};

/// Computed log-probs of a row and what became of its tokens; parallel to the row. What is `None` was not asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// log π before the update.
    pub old_log_probs: Option<Vec<f32>>,
    /// log π_ref.
    pub ref_log_probs: Option<Vec<f32>>,
    /// Importance weights and rejections.
    pub corrected: Option<CorrectedRow>,
}

/// Over all rows of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measurement {
    /// How far the sampling policy is from the one before the update, where that was computed.
    pub drift: Option<Drift>,
    /// Mean divergence from the reference per trained token, where it is taken off the rewards.
    pub reward_kl: Option<f64>,
    /// Wall time.
    pub seconds: f64,
}

/// Measures all rows that may be trained on, and takes the divergence from the reference off the rewards. Must run before the
/// first update of the step: what it computes are the constants of the loss.
///
/// # Errors
/// Where the engine refuses a row, or a key of the configuration cannot be used.
pub async fn measure(
    samples: &mut Samples,
    engine: &Engine,
    algorithm: &AlgorithmConfig,
    actor: &ActorConfig,
    temperature: f64,
) -> Result<Measurement, TrainerError> {
    let started = Instant::now();
    let recompute = algorithm.old_logprobs == OldLogProbs::Recompute;
    let reference = needs_reference(algorithm, actor);
    if !recompute && !reference {
        return Ok(Measurement::default());
    }
    let rewarded = samples.samples.iter().filter(|sample| sample.verdict.reward().is_some());
    let rows: Vec<MaskedRow> = rewarded.flat_map(|sample| sample.rows.iter().map(SampleRow::masked)).collect();
    let engine = engine.clone();
    let (old, reference) = tokio::task::spawn_blocking(move || {
        let old = recompute.then(|| engine.masked_log_probs(&rows, temperature as f32)).transpose()?;
        let reference = reference.then(|| engine.reference_log_probs(&rows, temperature as f32)).transpose()?;
        Ok::<_, EngineError>((old, reference))
    })
    .await??;
    store(samples, old, |row, values| row.measured.old_log_probs = Some(values));
    store(samples, reference, |row, values| row.measured.ref_log_probs = Some(values));
    let drift = if recompute { Some(correct(samples, algorithm)?) } else { None };
    let reward_kl = algorithm.use_kl_in_reward.then(|| penalise(samples, algorithm));
    Ok(Measurement { drift, reward_kl, seconds: started.elapsed().as_secs_f64() })
}

/// True if anything is compared with the reference policy.
#[must_use]
pub fn needs_reference(algorithm: &AlgorithmConfig, actor: &ActorConfig) -> bool {
    actor.use_kl_loss || algorithm.use_kl_in_reward
}

fn measured(samples: &mut Samples) -> impl Iterator<Item = &mut SampleRow> {
    let rewarded = samples.samples.iter_mut().filter(|sample| sample.verdict.reward().is_some());
    rewarded.flat_map(|sample| sample.rows.iter_mut())
}

fn store(samples: &mut Samples, values: Option<Vec<Vec<f32>>>, put: impl Fn(&mut SampleRow, Vec<f32>)) {
    for (row, values) in measured(samples).zip(values.into_iter().flatten()) {
        put(row, values);
    }
}

fn correct(samples: &mut Samples, algorithm: &AlgorithmConfig) -> Result<Drift, TrainerError> {
    let correction = algorithm.rollout_correction.correction()?;
    // Every row of a rollout that counts has recorded log-probs (`Samples::of`), so `both` is parallel to `rows`.
    let rows: Vec<&mut SampleRow> = measured(samples).collect();
    let both: Vec<DriftRow<'_>> = rows
        .iter()
        .filter_map(|row| {
            Some(DriftRow {
                mask: &row.sequence.mask,
                old_log_probs: row.measured.old_log_probs.as_deref()?,
                rollout_log_probs: row.sequence.log_probs.as_deref()?,
            })
        })
        .collect();
    let (corrected, drift) = correction.apply(&both);
    for (row, corrected) in rows.into_iter().zip(corrected) {
        row.measured.corrected = Some(corrected);
    }
    Ok(drift)
}

/// R ← R − β·Σ_{j,t} KL_t over all trained tokens of a rollout, KL_t estimated from log π_old and log π_ref.
fn penalise(samples: &mut Samples, algorithm: &AlgorithmConfig) -> f64 {
    let (mut total, mut tokens) = (0.0, 0_usize);
    for sample in &mut samples.samples {
        let mut kl = 0.0;
        for row in &sample.rows {
            let (Some(old), Some(reference)) = (row.old_log_probs(), row.measured.ref_log_probs.as_ref()) else {
                continue;
            };
            for at in (0..row.sequence.mask.len()).filter(|&at| row.sequence.mask[at] == 1) {
                kl += algorithm.kl_penalty.value_and_slope(f64::from(old[at]), f64::from(reference[at])).0;
                tokens += 1;
            }
        }
        sample.kl_penalty = algorithm.kl_ctrl.kl_coef * kl;
        total += kl;
    }
    total / tokens.max(1) as f64
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use agl_core::trajectory::Sequence;
    use agl_engine::{EngineConfig, LossConfig, LossKind, OptimConfig, TrainRow};

    use super::*;
    use crate::collect::Verdict;
    use crate::update::Sample;

    /// How much less likely each token was when it was sampled.
    const SHIFT: f32 = 0.25;

    fn engine() -> Engine {
        let fixture: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../agl-engine/tests/fixtures/qwen3-tied");
        Engine::load(&fixture, EngineConfig::default()).unwrap()
    }

    /// One rollout of two rows of three trained tokens.
    fn samples(engine: &Engine) -> Samples {
        let ids = [vec![3, 1, 4, 1, 5], vec![9, 2, 6, 5, 3]];
        let log_probs = engine.log_probs(&ids, 1.0).unwrap();
        let rows = ids.into_iter().zip(log_probs).map(|(token_ids, log_probs)| SampleRow {
            sequence: Sequence {
                token_ids,
                mask: vec![0, 0, 1, 1, 1],
                log_probs: Some(log_probs.iter().map(|lp| lp - SHIFT).collect()),
                policy_versions: vec![1; 5],
                prompt_length: 2,
                calls: Vec::new(),
            },
            measured: Measured::default(),
        });
        let sample = Sample {
            rollout_id: "a".into(),
            group: "g".into(),
            verdict: Verdict::Reward(1.0),
            kl_penalty: 0.0,
            rows: rows.collect(),
        };
        Samples { samples: vec![sample], ..Samples::default() }
    }

    fn run(samples: &mut Samples, engine: &Engine, algorithm: &AlgorithmConfig) -> Measurement {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(measure(samples, engine, algorithm, &ActorConfig::default(), 1.0)).unwrap()
    }

    #[test]
    fn by_default_nothing_is_computed_and_the_recorded_log_probs_are_the_old_ones() {
        let engine = engine();
        let mut samples = samples(&engine);
        assert_eq!(run(&mut samples, &engine, &AlgorithmConfig::default()), Measurement::default());
        let row = &samples.samples[0].rows[0];
        assert_eq!(row.measured, Measured::default());
        assert_eq!(row.old_log_probs(), row.sequence.log_probs.as_ref());
    }

    #[test]
    fn recomputed_log_probs_weight_each_token_by_how_much_likelier_it_is_now() {
        let engine = engine();
        let mut samples = samples(&engine);
        let algorithm = AlgorithmConfig { old_logprobs: OldLogProbs::Recompute, ..AlgorithmConfig::default() };
        let drift = run(&mut samples, &engine, &algorithm).drift.unwrap();
        assert_eq!((drift.rows, drift.tokens), (2, 6));
        assert!((drift.kl + f64::from(SHIFT)).abs() < 1e-4, "{drift:?}");
        let weights = &samples.samples[0].rows[1].measured.corrected.as_ref().unwrap().weights;
        assert!(weights[2..].iter().all(|weight| (weight - SHIFT.exp()).abs() < 1e-4), "{weights:?}");
        assert_eq!(weights[..2], [1.0, 1.0]);
    }

    #[test]
    fn a_rollout_pays_for_the_sum_of_its_distance_from_the_reference() {
        let engine = engine();
        engine.keep_reference();
        let mut samples = samples(&engine);
        let mut algorithm = AlgorithmConfig {
            use_kl_in_reward: true,
            old_logprobs: OldLogProbs::Recompute,
            ..AlgorithmConfig::default()
        };
        algorithm.kl_ctrl.kl_coef = 0.5;
        assert!(run(&mut samples, &engine, &algorithm).reward_kl.unwrap().abs() < 1e-5, "the policy is its reference");
        let rows: Vec<TrainRow> = samples.samples[0]
            .rows
            .iter()
            .map(|row| TrainRow::supervised(row.sequence.token_ids.clone(), vec![true; 5], 0.1))
            .collect();
        let loss = LossConfig { kind: LossKind::Sft, ..LossConfig::default() };
        engine.update(&rows, &loss, &OptimConfig { lr: 1e-3, ..OptimConfig::default() }).unwrap();
        let mean = run(&mut samples, &engine, &algorithm).reward_kl.unwrap();
        assert!(mean > 1e-3, "learning them made these tokens likelier: {mean}");
        assert!((samples.samples[0].kl_penalty - 0.5 * 6.0 * mean).abs() < 1e-9);
        assert_eq!(samples.samples[0].verdict.reward(), Some(1.0), "the reward itself stays what the agent got");
    }
}
