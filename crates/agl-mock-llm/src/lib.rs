//! A scripted stand-in for a vLLM server, with faults on demand: for tests, benches, and for trying a harness without a
//! model.
//!
//! It answers `/v1/chat/completions`, `/v1/completions` and `/v1/models` in vLLM's shape, token ids and log-probs
//! included. Its tokens are the bytes of a simple chat rendering, so that a harness that sends its history back
//! unchanged really extends the token path of the turn before.
//!
//! * [`script`] — what it answers, and when it fails.
//! * [`tokenizer`] — text to tokens.
//! * [`answer`] — a scripted answer as a response body.
//! * [`probe`] — an answer made for whatever tools are offered.
//! * [`connection`] — sockets that can be reset.
//! * [`server`] — the running server and the handle on it.
//! * [`fault_flag`] — faults as the command line writes them.

pub mod answer;
pub mod connection;
pub mod fault_flag;
pub mod probe;
pub mod script;
pub mod server;
pub mod tokenizer;

pub use script::{Answer, Fault, FaultRule, Script, Select, ToolCall, WhenDone};
pub use server::{MockLlm, Received};
