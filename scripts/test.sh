# Sourced by ./x: everything that must be green before a commit.

# The agents on the `openai` package are tested with it; the tests find it here.
OPENAI_PACKAGES="openai==3.57.0"

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
  (cd recipes/calculator && "$AGL_TEST_OPENAI_PYTHON" -m unittest -q)
}
