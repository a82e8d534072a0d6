//! The engine as its callers see it, on the small random models of `tests/fixtures` (made by `scripts/parity`).
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod checkpoint;
mod fixture;
mod learning;
mod parity;
mod prefix_cache;
mod recorded_row;
mod sampling;
mod server;
mod update;
