//! The native engine: a policy model that samples and learns in one process.
//!
//! * [`Engine`] (`engine.rs`): the handle everything goes through.
//! * `model/`: the decoder; `kernels/` and `ops/`: its element-wise work as fused operations with derivatives.
//! * `train/`: loss, gradient, optimiser. `sample/`: the thread that samples, with continuous batching.
//! * `chat/`: tokenizer, chat template, tool calls. `checkpoint/`: model directories.
//! * [`server`]: the OpenAI-compatible HTTP interface.
//!
//! Sampler and trainer share the parameters. The log-probability recorded at sampling equals the one the training forward
//! computes for the same parameters to within 1e-4: the two add up the same numbers in different orders.

mod chat;
mod checkpoint;
mod config;
mod engine;
mod error;
mod kernels;
mod model;
mod ops;
mod sample;
pub mod server;
mod train;

pub use chat::tokenizer::ChatTokenizer;
pub use checkpoint::tensors::SaveDtype;
pub use config::{EngineConfig, LossConfig, LossKind, LossMode, OptimConfig};
pub use engine::{Engine, SamplerTotals, UpdateStats};
pub use error::EngineError;
pub use sample::request::{FinishReason, GenerateOutput, GenerateRequest, SamplingParams, StopReason};
pub use train::rows::{MaskedRow, TrainRow};
pub use train::schedule::LrSchedulerType;
