//! Tests that speak to the real binary, and the map of the repository.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]
#![expect(clippy::print_stdout, reason = "tests say what they skip, and long ones what they measured")]

mod architecture;
mod bad_input;
mod contract;
mod controlling;
mod crash;
mod doctor;
mod https;
mod keep;
mod kills;
mod kubernetes;
mod logs;
mod quickstart;
mod support;
mod traces;
