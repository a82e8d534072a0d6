# Sourced by ./x: figures, each beside a peer or a limit in the same run.

run_bench() {
  local name="${1:-}"; shift || true
  need_rust
  case "$name" in
    assembly) cargo bench --package agl-core --bench assembly ;;
    gateway) need_python; bench_gateway "$@" ;;
    storage) need_python; build_gateway_bench; python3 benches/gateway/run.py storage "$@" --bench "$GATEWAY_BENCH" ;;
    engine) need_python; python3 scripts/parity/run.py bench ;;
    controller) need_python; bench_controller "$@" ;;
    *) cat >&2 <<'HELP'
./x bench assembly   tokens per second from recorded calls to training rows
./x bench gateway    calls per second and what a call waits, next to nginx and the Python server of Agent Lightning v1.0.2
./x bench storage    bytes on disk and in memory for each token of rollouts that grow to 128k tokens
./x bench engine     training and decoding of the starting policy, next to PyTorch on the same shapes
./x bench controller from a rollout's creation to its agent's first call, and a cold start next to one from a zygote
HELP
      [ -z "$name" ] && return 0; exit 2 ;;
  esac
}

# The gateway in a program of its own, which does not need the engine; in a folder of its own, since it resolves other features.
GATEWAY_BENCH=target/bench/release/gateway-bench
build_gateway_bench() { cargo build --release --package gateway-bench --target-dir target/bench; }

bench_gateway() {
  local python
  python="$(original_python)"
  have nginx || install_packages nginx || die "nginx is missing"
  build_gateway_bench
  python3 benches/gateway/run.py gateway "$@" --bench "$GATEWAY_BENCH" --python "$python"
}

bench_controller() {
  local python
  source scripts/test.sh
  python="$(python_environment openai $OPENAI_PACKAGES)"
  cargo build --release --package controller-bench --target-dir target/bench
  target/bench/release/controller-bench run --python "$python" "$@"
}

# Agent Lightning wants Python 3.12. AGL_PYTHON312 names one where python3 is older.
original_python() {
  local python="${AGL_PYTHON312:-python3}"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || die "the peer needs Python 3.12: name one in AGL_PYTHON312"
  PYTHON_FOR_ENVIRONMENT="$python" python_environment agentlightning agentlightning==1.0.2
}
