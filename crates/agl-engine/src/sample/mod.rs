//! Sampling: requests join and leave one running batch at token boundaries.
//!
//! * [`request`]: what is asked and answered.
//! * [`pick`]: one row of logits to one token.
//! * [`sequence`]: one answer being sampled.
//! * [`sampler`]: the thread that owns the cache and the batch.

pub(crate) mod pick;
pub(crate) mod request;
pub(crate) mod sampler;
mod sequence;
