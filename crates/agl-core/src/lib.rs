//! The domain of agl, pure: no IO, no async, no clock, and no randomness that is not passed in.
//!
//! * [`rollout`] — one execution of an agent, and the transitions that are legal.
//! * [`attempt`] — one try at a rollout, and whose failure it was.
//! * [`event`] — what is appended to a rollout while it runs: model requests, rewards, anything else.
//! * [`trajectory`] — from recorded model calls to training sequences.
//! * [`credit`] — advantages and loss weights, counted over rollouts.
//! * [`batch`] — which rollouts go into which optimiser update.
//! * [`digits`] — lists of token ids in JSON, read fast.

pub mod attempt;
pub mod batch;
pub mod credit;
pub mod digits;
pub mod event;
pub mod rollout;
pub mod trajectory;
