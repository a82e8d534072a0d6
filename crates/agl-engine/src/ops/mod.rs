//! The kernels as operations of the tensor library, with their derivatives.
//!
//! * [`training`]: what the forward pass is made of; differentiable.
//! * [`inference`]: key/value cache and token log-probabilities; never inside a recorded graph.
//!
//! Both are implemented for the CPU backend. Another backend joins by implementing the two traits.

mod autodiff;
mod flex;
pub(crate) mod inference;
pub(crate) mod training;
