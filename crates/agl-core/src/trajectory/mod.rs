//! From recorded model calls to training sequences.
//!
//! A harness shows the training side nothing but calls `C(ρ) = ((p₁,a₁), …, (p_T,a_T))`, with no prefix relation promised
//! between consecutive prompts. Per attempt a [`TokenTree`] keeps each call's tokens once: a call adds its inserted tokens and
//! its sampled tokens to the longest path it shares a prefix with. [`TokenTree::sequences`] then reads the training
//! sequences off the tree: one row per chain of calls in which every `(p_i, a_i) ⪯ p_{i+1}` holds at the token level.
//!
//! * [`row`] — what is stored of a call, and what a tree can be rebuilt from.
//! * [`tree`] — the tree itself.
//! * [`sequence`] — the rows, at `trajectory` or `transition` level, and the length limits.
//! * [`breaks`] — why a call did not extend the path before it.

pub mod breaks;
pub mod row;
pub mod sequence;
pub mod tree;

pub use breaks::{BreakClass, TokenDecoder};
pub use row::{CallOutcome, CallRow, Delivery, VersionRun};
pub use sequence::{Assembly, CallSpan, Level, PathBreak, Sequence, TreeCounts};
pub use tree::{Continuation, NewCall, TokenTree, TreeError};
