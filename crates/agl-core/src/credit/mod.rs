//! Credit, counted over rollouts and never over rows: how many rows a rollout yields is an accident of tokenisation and
//! sub-agents, and must change neither the baseline of its group nor its share of the gradient.
//!
//! * [`advantage`] — one scalar per rollout, from the rewards of its group.
//! * [`loss_weight`] — the weight of each trained token (Eq. 14–16 of arXiv 2608.17528).
//! * [`kl`] — estimators of the divergence from another policy.
//! * [`off_policy`] — importance weights and rejection where the sampling policy is not the one that is improved.

pub mod advantage;
pub mod kl;
pub mod loss_weight;
pub mod off_policy;

pub use advantage::{AdvantageLevel, Advantages, Estimator, Scored, advantages};
pub use kl::KlEstimator;
pub use loss_weight::{LossAggregation, RowTokens, token_weights};
