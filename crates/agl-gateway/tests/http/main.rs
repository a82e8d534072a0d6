//! The gateway as its callers see it: a real one on a real port, spoken to over HTTP, in front of a scripted upstream.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod attempts;
mod delivery;
mod dialects;
mod events;
mod health;
mod keys;
mod limits;
mod models;
mod pause;
mod peers;
mod proxy;
mod restart;
mod rollouts;
mod scene;
mod startup;
mod watch;
mod watchdog;

#[path = "../../../agl-store/tests/support/mod.rs"]
mod support;
