# Sourced by ./x: everything that must be green before a commit.

# The agent on the `openai` package, and the oracle of the wire tests, need packages; the tests find them here.
OPENAI_PACKAGES="openai==2.8.1"

run_tests() {
  need_rust; need_python; need_nextest
  export AGL_TEST_OPENAI_PYTHON
  AGL_TEST_OPENAI_PYTHON="$PWD/$(python_environment openai $OPENAI_PACKAGES)"
  if [ $# -gt 0 ]; then
    cargo nextest run --workspace "$@"
    return
  fi
  cargo fmt --all --check
  cargo clippy --workspace --all-targets --quiet -- -D warnings
  cargo nextest run --workspace
  (cd recipes/calculator && python3 -m unittest -q)
}
