//! The gateway as its callers see it: a real one on a real port, spoken to over HTTP, in front of a scripted upstream.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod attempts;
mod delivery;
mod dialects;
mod events;
mod health;
mod keys;
mod llamacpp;
mod models;
mod pause;
mod proxy;
mod restart;
mod rollouts;
mod scene;
mod startup;
mod through;
mod watch;
