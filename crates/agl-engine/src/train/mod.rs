//! One optimiser step over rows of tokens.
//!
//! * [`rows`]: what is trained, and how rows are grouped into micro-batches.
//! * [`loss`]: loss and derivative per token, pure arithmetic.
//! * [`head`]: the output layer in chunks, forward and backward at once.
//! * [`gradient`]: micro-batches to one gradient.
//! * [`adamw`]: gradient to new parameters. [`schedule`]: the learning rate over a run.

pub(crate) mod adamw;
pub(crate) mod gradient;
mod head;
pub(crate) mod loss;
pub(crate) mod rows;
pub(crate) mod schedule;

#[cfg(test)]
mod equivalence;
#[cfg(test)]
mod gradient_check;
