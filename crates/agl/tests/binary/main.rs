//! Tests that speak to the real binary, and the map of the repository.

mod architecture;
mod bad_input;
mod contract;
mod crash;
mod quickstart;
mod support;
