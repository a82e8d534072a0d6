//! The client against a scripted gateway.

#![expect(clippy::unwrap_used, reason = "the lint exempts test functions, but not the functions that they share")]

mod away;
mod scripted;
mod watching;
