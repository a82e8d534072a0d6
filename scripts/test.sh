# Sourced by ./x: everything that must be green before a commit.

# The agents on the `openai` package are tested with it; the tests find it here.
OPENAI_PACKAGES="openai==3.57.0"
# The SDKs whose users the gateway must not surprise.
SDK_PACKAGES="openai==3.57.0 anthropic==2.14.0 google-genai==3.6.1 litellm==1.110.2 langchain-openai==1.7.4 openai-agents==0.24.0"
SDK_NODE_PACKAGES="openai@6.49.0 @anthropic-ai/sdk@1.14.0"

# Helm's own library: the chart is rendered and installed without the helm program.
HELM_PACKAGES="helm-python-sdk==0.2.2 pyyaml==6.0.4"

run_tests() {
  need_rust; need_python; need_nextest; need_postgres; need_kubernetes
  export AGL_TEST_OPENAI_PYTHON
  AGL_TEST_OPENAI_PYTHON="$PWD/$(python_environment openai $OPENAI_PACKAGES)"
  export AGL_TEST_SDK_PYTHON AGL_TEST_SDK_NODE
  AGL_TEST_SDK_PYTHON="$PWD/$(python_environment sdk $SDK_PACKAGES)"
  AGL_TEST_SDK_NODE="$PWD/$(node_packages sdk $SDK_NODE_PACKAGES)"
  if [ $# -gt 0 ]; then
    cargo nextest run --workspace "$@"
    return
  fi
  cargo fmt --all --check
  cargo clippy --workspace --all-targets --quiet -- -D warnings
  cargo nextest run --workspace
  "$(python_environment helm $HELM_PACKAGES)" scripts/manifests/test_manifests.py -q "${CARGO_TARGET_DIR:-target}/debug/agl"
  (cd recipes/calculator && "$AGL_TEST_OPENAI_PYTHON" -m unittest -q)
}
