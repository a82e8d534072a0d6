//! The learning rate over a run: warm-up, then constant or falling along a cosine.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::config::OptimConfig;

/// What the learning rate does after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedulerType {
    /// It stays.
    #[default]
    Constant,
    /// It falls along half a cosine, to `min_lr_ratio` at the end of the run.
    Cosine,
}

impl OptimConfig {
    /// Steps of warm-up in a run of `total` steps.
    fn warmup_steps(&self, total: u64) -> u64 {
        // Cut off, as verl does: a run is warm a step early rather than late.
        u64::try_from(self.lr_warmup_steps).unwrap_or((self.lr_warmup_steps_ratio * total as f64) as u64)
    }

    /// Learning rate of the training step numbered `step`, the first being 1, in a run of `total`: a function of the step
    /// alone, so that a resumed run goes on where it was.
    ///
    /// As `get_cosine_schedule_with_warmup` of transformers, whose steps count from 0, but for the warm-up: there the first step
    /// has a learning rate of 0, and whatever was sampled for it is lost.
    #[must_use]
    pub fn lr_at(&self, step: u64, total: u64) -> f64 {
        let (step, warmup) = (step.max(1), self.warmup_steps(total));
        if step <= warmup {
            return self.lr * step as f64 / warmup as f64;
        }
        match self.lr_scheduler_type {
            LrSchedulerType::Constant => self.lr,
            LrSchedulerType::Cosine => {
                let progress = (step - 1 - warmup) as f64 / total.saturating_sub(warmup).max(1) as f64;
                let share = 0.5 * (1.0 + (PI * progress.min(1.0)).cos());
                self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * share)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(config: &OptimConfig, total: u64) -> Vec<f64> {
        (1..=total).map(|step| config.lr_at(step, total)).collect()
    }

    fn assert_close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-7, "{found} instead of {expected}");
        }
    }

    /// What `get_cosine_schedule_with_warmup(optimizer, 2, 10)` gives from its step 2 on.
    const COSINE: [f64; 8] =
        [1.0, 0.961_939_77, 0.853_553_39, 0.691_341_72, 0.5, 0.308_658_28, 0.146_446_61, 0.038_060_23];

    #[test]
    fn a_cosine_falls_as_in_transformers_after_a_warm_up_that_wastes_no_step() {
        let config = OptimConfig {
            lr: 1.0,
            lr_scheduler_type: LrSchedulerType::Cosine,
            lr_warmup_steps: 2,
            ..OptimConfig::default()
        };
        assert_close(&rates(&config, 10), &[&[0.5, 1.0][..], &COSINE].concat());
        // get_cosine_with_min_lr_schedule_with_warmup, and verl.
        let floor = OptimConfig { lr: 2.0, min_lr_ratio: 0.1, ..config };
        let expected: Vec<f64> = COSINE.iter().map(|share| 2.0 * (0.1 + 0.9 * share)).collect();
        assert_close(&rates(&floor, 10)[2..], &expected);
        assert_close(&[floor.lr_at(30, 10)], &[0.2]);
    }

    #[test]
    fn a_constant_rate_stays_after_the_warm_up() {
        let config = OptimConfig { lr: 3.0, lr_warmup_steps: 3, ..OptimConfig::default() };
        assert_close(&rates(&config, 5), &[1.0, 2.0, 3.0, 3.0, 3.0]);
        assert_close(&rates(&OptimConfig { lr: 3.0, ..OptimConfig::default() }, 2), &[3.0, 3.0]);
    }

    #[test]
    fn the_share_of_warm_up_counts_where_no_number_of_steps_is_given() {
        let config = OptimConfig { lr_warmup_steps_ratio: 0.25, ..OptimConfig::default() };
        assert_eq!([config.warmup_steps(10), config.warmup_steps(3)], [2, 0]);
        assert_eq!(OptimConfig { lr_warmup_steps: 0, ..config.clone() }.warmup_steps(10), 0);
        assert_eq!(OptimConfig { lr_warmup_steps: 4, ..config }.warmup_steps(10), 4);
    }

    #[test]
    fn a_warm_up_longer_than_the_run_is_all_of_it() {
        let config = OptimConfig {
            lr: 1.0,
            lr_scheduler_type: LrSchedulerType::Cosine,
            lr_warmup_steps: 8,
            ..OptimConfig::default()
        };
        assert_close(&rates(&config, 4), &[0.125, 0.25, 0.375, 0.5]);
    }
}
