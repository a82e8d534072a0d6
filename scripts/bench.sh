# Sourced by ./x: figures, each beside a peer or a limit in the same run.

run_bench() {
  local name="${1:-}"; shift || true
  need_rust
  case "$name" in
    assembly) cargo bench --package agl-core --bench assembly ;;
    engine) need_python; python3 scripts/parity/run.py bench ;;
    spawn) cargo run --release --package agl-controller --example spawn_latency -- "$@" ;;
    *) cat >&2 <<'HELP'
./x bench assembly   tokens per second from recorded calls to training rows
./x bench engine     training and decoding of the starting policy, next to PyTorch on the same shapes
./x bench spawn      from a rollout's creation to its process
HELP
      [ -z "$name" ] && return 0; exit 2 ;;
  esac
}
