//! Values that cannot work are refused by the name of their key.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use agl_core::credit::{Estimator, LossAggregation};
use agl_core::rollout::ProcessConfig;
use agl_trainer::config::check;
use agl_trainer::correction::{OldLogProbs, Thresholds};
use agl_trainer::{ActorConfig, AlgorithmConfig, DataConfig, RolloutSection, TrainerConfig, TrainerError};

fn checked(n: usize, algorithm: &AlgorithmConfig, actor: &ActorConfig) -> Result<(), TrainerError> {
    let rollout = RolloutSection { n, process: Some(ProcessConfig::default()), ..RolloutSection::default() };
    check(&DataConfig::default(), &rollout, algorithm, actor, &TrainerConfig::default())
}

fn refused(algorithm: &AlgorithmConfig, actor: &ActorConfig) -> String {
    checked(8, algorithm, actor).unwrap_err().to_string()
}

#[test]
fn the_loss_of_dr_grpo_needs_its_constant() {
    let actor = ActorConfig { loss_agg_mode: LossAggregation::SeqMeanTokenSumNorm, ..ActorConfig::default() };
    let algorithm = AlgorithmConfig::default();
    assert!(refused(&algorithm, &actor).starts_with("`actor.loss_scale_factor` is missing"));
    let zero = ActorConfig { loss_scale_factor: Some(0.0), ..actor.clone() };
    assert!(refused(&algorithm, &zero).starts_with("`actor.loss_scale_factor` must be greater than 0"));
    checked(8, &algorithm, &ActorConfig { loss_scale_factor: Some(1024.0), ..actor }).unwrap();
}

#[test]
fn a_weight_of_the_divergence_below_zero_is_refused_where_it_is_used() {
    let mut algorithm = AlgorithmConfig::default();
    let actor = ActorConfig { use_kl_loss: true, kl_loss_coef: -0.1, ..ActorConfig::default() };
    assert!(refused(&algorithm, &actor).contains("`kl_loss_coef` is -0.1"));
    algorithm.kl_ctrl.kl_coef = f64::NAN;
    assert!(refused(&algorithm, &ActorConfig::default()).starts_with("`algorithm.kl_ctrl.kl_coef`"));
}

#[test]
fn rejection_needs_recomputed_log_probs() {
    let mut algorithm = AlgorithmConfig::default();
    algorithm.rollout_correction.rollout_rs = Some("seq_mean_k1".into());
    algorithm.rollout_correction.rollout_rs_threshold = Some(Thresholds::Text("0.999_1.001".into()));
    assert!(refused(&algorithm, &ActorConfig::default()).contains("algorithm.old_logprobs = \"recompute\""));
    algorithm.old_logprobs = OldLogProbs::Recompute;
    checked(8, &algorithm, &ActorConfig::default()).unwrap();
}

#[test]
fn a_group_of_one_is_enough_only_where_siblings_are_not_compared() {
    let with = |adv_estimator| AlgorithmConfig { adv_estimator, ..AlgorithmConfig::default() };
    for estimator in [Estimator::Grpo, Estimator::Rloo, Estimator::ReinforcePlusPlusBaseline] {
        let error = checked(1, &with(estimator), &ActorConfig::default()).unwrap_err().to_string();
        assert!(error.starts_with("`rollout.n` is below 2"), "{error}");
    }
    checked(1, &with(Estimator::ReinforcePlusPlus), &ActorConfig::default()).unwrap();
    let error = checked(0, &with(Estimator::ReinforcePlusPlus), &ActorConfig::default()).unwrap_err().to_string();
    assert!(error.starts_with("`rollout.n` is 0"), "{error}");
}
