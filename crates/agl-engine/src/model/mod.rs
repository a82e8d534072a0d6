//! The decoder-only transformer of the Qwen3, Qwen2 and Llama families.
//!
//! * [`config`]: sizes, read from `config.json`.
//! * [`weights`]: the parameters, one flat list in a fixed order.
//! * [`forward`]: the one pass that training, prompt processing and decoding share; they differ only in how a position
//!   attends to the others.
//! * [`cache`]: keys and values of the sequences being decoded.

pub(crate) mod cache;
pub(crate) mod config;
pub(crate) mod extend;
pub(crate) mod forward;
mod keys;
mod layers;
pub(crate) mod rope;
pub(crate) mod weights;
