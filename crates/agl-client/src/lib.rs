//! The gateway's HTTP interface, typed: what the controller, the trainer and the command line share.
//!
//! [`GatewayClient`] is a cheap handle; clone it freely. Every call that may be repeated without harm is repeated, with
//! jittered backoff, while the gateway is away: it may be killed and started again in the middle of a run.
//!
//! * [`wire`] — what the gateway says and hears beyond the types of `agl-core`.
//! * [`transport`] — one request: sent, repeated, judged.
//! * [`rollouts`], [`attempts`], [`models`] — the endpoints.
//! * [`watch`] — the stream of changes, which resumes by itself.
//! * [`error`] — what can go wrong.

pub mod attempts;
pub mod error;
pub mod models;
pub mod rollouts;
pub mod transport;
pub mod watch;
pub mod wire;

pub use error::ClientError;
pub use transport::GatewayClient;
pub use wire::{
    AttemptDetail, AttemptGrant, Change, ChangeKind, LastCall, Model, ProxyState, RolloutDetail, SequencesResponse,
    TerminalItem, TerminalPage,
};
