//! Which rollouts go into which optimiser update. All rows of a rollout go into the same one: between two updates the policy
//! has moved, and half a rollout would be trained off-policy.

use rand::Rng;
use rand::seq::SliceRandom;

/// A rollout that may be trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// True if all rewards of its group are equal: its advantage is 0 and it is the first to go.
    pub zero_variance: bool,
}

/// What the engine needs and the configuration allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchRules {
    /// Rollouts per update (`ppo_mini_batch_size`), at least 1.
    pub mini_batch_size: usize,
    /// True where the engine needs every update to be full; otherwise the partial last one is kept.
    pub full_batches_only: bool,
    /// No more updates than this (`max_ppo_update_times`).
    pub max_updates: Option<usize>,
}

/// Rollouts by their index among the candidates. Every candidate stands in exactly one place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchPlan {
    /// One list per optimiser update, in the order of the updates.
    pub updates: Vec<Vec<usize>>,
    /// Left out, from groups whose rewards are all equal.
    pub dropped_zero_variance: Vec<usize>,
    /// Left out although they would have taught something.
    pub dropped_others: Vec<usize>,
}

/// Plans the updates of one step. What has to go goes whole rollouts at a time, zero-variance groups first; the choice among
/// equals and the order are the generator's, so one seed gives one plan.
#[must_use]
pub fn plan(candidates: &[Candidate], rules: BatchRules, rng: &mut impl Rng) -> BatchPlan {
    let size = rules.mini_batch_size.max(1);
    let mut keep = candidates.len();
    if rules.full_batches_only {
        keep -= keep % size;
    }
    if let Some(updates) = rules.max_updates {
        keep = keep.min(updates.saturating_mul(size));
    }
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    order.shuffle(rng);
    // Stable: the shuffled order stays among those with and among those without variance.
    order.sort_by_key(|&index| candidates[index].zero_variance);
    let dropped = order.split_off(keep);
    order.shuffle(rng);
    let (dropped_zero_variance, dropped_others) =
        dropped.into_iter().partition(|&index| candidates[index].zero_variance);
    BatchPlan { updates: order.chunks(size).map(<[usize]>::to_vec).collect(), dropped_zero_variance, dropped_others }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    fn candidates(zero_variance: &[bool]) -> Vec<Candidate> {
        zero_variance.iter().map(|&zero_variance| Candidate { zero_variance }).collect()
    }

    #[test]
    fn of_twelve_rollouts_the_all_equal_group_goes_first() {
        let group_of_four = |flag| [flag; 4];
        let all = candidates(&[group_of_four(false), group_of_four(true), group_of_four(false)].concat());
        let rules = BatchRules { mini_batch_size: 8, full_batches_only: true, max_updates: None };
        let plan = plan(&all, rules, &mut ChaCha8Rng::seed_from_u64(1));
        let mut kept = plan.updates.concat();
        kept.sort_unstable();
        assert_eq!(kept, [0, 1, 2, 3, 8, 9, 10, 11]);
        assert_eq!(plan.dropped_zero_variance.len(), 4);
        assert!(plan.dropped_others.is_empty());
    }

    #[test]
    fn the_partial_last_batch_is_kept_unless_the_engine_needs_full_ones() {
        let rules = BatchRules { mini_batch_size: 4, full_batches_only: false, max_updates: None };
        let plan = plan(&candidates(&[false; 10]), rules, &mut ChaCha8Rng::seed_from_u64(1));
        assert_eq!(plan.updates.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 2]);
    }

    #[test]
    fn one_seed_gives_one_plan_and_another_seed_another() {
        let all = candidates(&[false; 32]);
        let rules = BatchRules { mini_batch_size: 8, full_batches_only: false, max_updates: Some(2) };
        let with = |seed| plan(&all, rules, &mut ChaCha8Rng::seed_from_u64(seed));
        assert_eq!(with(7), with(7));
        assert_ne!(with(7), with(8));
    }

    proptest! {
        #[test]
        fn every_rollout_is_planned_or_dropped_exactly_once(
            flags in prop::collection::vec(any::<bool>(), 0..60),
            mini_batch_size in 1_usize..20,
            full_batches_only in any::<bool>(),
            max_updates in prop::option::of(0_usize..6),
            seed in any::<u64>(),
        ) {
            let rules = BatchRules { mini_batch_size, full_batches_only, max_updates };
            let plan = plan(&candidates(&flags), rules, &mut ChaCha8Rng::seed_from_u64(seed));
            let mut seen = [plan.updates.concat(), plan.dropped_zero_variance.clone(), plan.dropped_others.clone()].concat();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..flags.len()).collect::<Vec<_>>());
            prop_assert!(plan.updates.len() <= max_updates.unwrap_or(usize::MAX));
            prop_assert!(plan.updates.iter().all(|update| update.len() <= mini_batch_size));
            if full_batches_only {
                prop_assert!(plan.updates.iter().all(|update| update.len() == mini_batch_size));
            }
            let keeps_a_flat_one = plan.updates.concat().iter().any(|&index| flags[index]);
            prop_assert!(!keeps_a_flat_one || plan.dropped_others.is_empty(), "zero variance goes first");
        }
    }
}
