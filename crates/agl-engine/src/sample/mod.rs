//! Sampling: requests join and leave one running batch at token boundaries.
//!
//! * [`request`]: what is asked and answered.
//! * [`adjust`]: biases and penalties; [`pick`]: one row of logits to one token.
//! * [`sequence`]: one answer being sampled. [`prefixes`]: finished ones that later prompts may begin with.
//! * [`sampler`]: the thread that owns the cache and the batch.

mod adjust;
pub(crate) mod pick;
mod prefixes;
pub(crate) mod request;
pub(crate) mod sampler;
mod sequence;
