# Sourced by ./x: checks that take long. Their figures go to benches/README.md.

run_check() {
  local name="${1:-}"; shift || true
  case "$name" in
    learning|controls|processes) need_rust; need_python; build; "check_$name" "$@" ;;
    schemathesis)
      need_rust; need_python
      [ -n "${AGL_PROFILE:-}" ] || cargo build --release --workspace --bin agl --bin agl-mock-llm
      "$(python_environment schemathesis schemathesis==4.32.5)" scripts/schemathesis/run.py "$@" ;;
    fuzz) need_rust; check_fuzz "$@" ;;
    soak) need_rust; need_python; source scripts/bench.sh; build_gateway_bench
      python3 benches/gateway/run.py soak "$@" --bench "$GATEWAY_BENCH" ;;
    harnesses) need_rust; need_python; cargo build --release --workspace --bin agl --bin agl-mock-llm; python3 scripts/harnesses/run.py "$@" ;;
    kills) need_rust; check_kills "$@" ;;
    fleet) need_rust; source scripts/kubernetes.sh; need_kubernetes; check_fleet "$@" ;;
    llamacpp) need_rust; need_python; build; check_llamacpp "$@" ;;
    *) cat >&2 <<'HELP'
./x check learning [SEED…]   quickstart on seeds 1, 2 and 3: ≤ 0.45 before, ≥ 0.90 after, ≥ 0.88 on fresh questions, < 300 s
./x check controls           learning rate 0: nothing moves; permuted rewards: nothing is learned
./x check processes          the recipe as three processes, seed 1: ≥ 0.90
./x check llamacpp           llama.cpp's own server behind the gateway: prompt ids, sampled ids, log-probs, merged turns
./x check soak               1.5 million calls through the gateway: memory, descriptors and tasks do not grow
./x check harnesses [NAME…]  Claude Code, Codex, OpenCode, Qwen Code, Hermes, OpenHands (Python 3.12), mini-SWE-agent: captured, with ids, merged
./x check schemathesis [N]   the whole HTTP interface as /openapi.json describes it, N made-up requests per operation (default 100)
./x check fuzz [SECONDS [TARGET…]]  every fuzzer for so long (default 600); what was found is kept for the next time
./x check fleet [NAME]       the controller on processes and on Kubernetes: fifty kills each, Jobs deleted, API server and gateway restarted; 5,000 and 500 rollouts at 6,000 a minute
./x check kills [postgres | pair]  kill -9 of the gateway, or of either of two, a hundred times under 64 agents: nothing acknowledged is lost, nothing corrupt
HELP
      [ -z "$name" ] && return 0; exit 2 ;;
  esac
}

# A figure of a summary.json.
figure() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$1" "$2"; }

# holds EXPRESSION WHAT: a comparison in Python's arithmetic.
holds() {
  if python3 -c "import sys; sys.exit(not ($1))"; then say "  ok    $2: $1"; else say "  FAILS $2: $1"; return 1; fi
}

fresh_questions() { python3 recipes/calculator/make_data.py --split fresh --seed "$1" --n 500; }

# Coverage alone: our own code has nothing unsafe that a sanitizer would find.
check_fuzz() {
  local seconds="${1:-600}" failed=0 target corpus; shift || true
  have c++ || install_packages g++ || die "a C++ compiler is missing (for libFuzzer): install g++ or clang"
  cargo fuzz --version >/dev/null 2>&1 || { say "x: installing cargo-fuzz"; cargo install --locked cargo-fuzz; }
  export CARGO_TARGET_DIR="$PWD/target/fuzz"
  cargo fuzz build --sanitizer none
  for target in ${@:-$(cargo fuzz list)}; do
    corpus="target/fuzz-corpus/$target"; mkdir -p "$corpus"
    say "fuzzing $target for $seconds s"
    # A minute at least is the time that a slow request may take on a busy machine.
    cargo fuzz run --sanitizer none "$target" "$corpus" "fuzz/seeds/$target" -- -max_total_time="$seconds" -timeout=60 \
      -max_len=16384 -rss_limit_mb=4096 -print_final_stats=1 -verbosity=0 -artifact_prefix="$PWD/target/fuzz-corpus/found-$target-" \
      || { say "  FAILS $target: the input is in target/fuzz-corpus/found-$target-*"; failed=1; }
  done
  return $failed
}

check_learning() {
  local failed=0 seed out fresh
  for seed in "${@:-1 2 3}"; do for seed in $seed; do
    out="out/check/learning-$seed"; rm -rf "$out"
    target/release/agl quickstart --seed "$seed" --out "$out"
    fresh_questions "$seed" >"$out/fresh.jsonl"
    target/release/agl eval "$out/checkpoints/$(ls "$out/checkpoints" | tail -1)" --data "$out/fresh.jsonl" --json >"$out/eval.json"
    say "seed $seed:"
    holds "$(figure "$out/summary.json" initial_val_reward) <= 0.45" "before" || failed=1
    holds "$(figure "$out/summary.json" final_val_reward) >= 0.90" "after" || failed=1
    holds "$(figure "$out/eval.json" reward) >= 0.88" "on fresh questions" || failed=1
    holds "$(figure "$out/summary.json" calls_per_solved) >= 2" "calls per solved rollout" || failed=1
    holds "$(figure "$out/summary.json" wall_seconds) < 300" "seconds" || failed=1
  done; done
  return $failed
}

check_controls() {
  local failed=0 out
  out=out/check/frozen; rm -rf "$out"
  target/release/agl quickstart --seed 1 --out "$out" --set actor.optim.lr=0
  say "learning rate 0:"
  # The policy is the same before and after: the two differ by sampling alone, two standard errors of the difference.
  holds "abs($(figure "$out/summary.json" final_val_reward) - $(figure "$out/summary.json" initial_val_reward)) <= 2 * 2**0.5 * $(figure "$out/summary.json" final_val_standard_error)" "within noise" || failed=1

  out=out/check/permuted; rm -rf "$out"; mkdir -p "$out"
  target/release/agl quickstart --seed 1 --out "$out" \
    --set "rollout.evaluator.argv=['python3', '-S', '-E', '$PWD/recipes/calculator/controls/permuted_evaluator.py', '$PWD/$out/pool', '{{ is_train }}']"
  say "permuted rewards:"
  holds "$(figure "$out/summary.json" final_val_reward) - $(figure "$out/summary.json" initial_val_reward) <= 0.10" "no rise" || failed=1
  return $failed
}

check_processes() {
  local out=out/check/processes port=18080 failed=0
  rm -rf "$out"; mkdir -p "$out"
  # The quickstart's folder without its run: the recipe and its questions.
  target/release/agl quickstart --seed 1 --out "$out" --unpack-only
  local file="$out/run.toml" address="gateway.listen=127.0.0.1:$port"
  target/release/agl serve "$file" --set "$address" 2>"$out/serve.log" & local gateway=$!
  target/release/agl control "$file" --set "$address" 2>"$out/control.log" & local controller=$!
  trap 'kill $gateway $controller 2>/dev/null || true' EXIT
  target/release/agl train "$file" --set "$address"
  kill $controller $gateway; wait $controller $gateway || true; trap - EXIT
  say "three processes:"
  holds "$(figure "$out/summary.json" final_val_reward) >= 0.90" "after" || failed=1
  return $failed
}

# The test builds as ./x test does. postgres: on the database that AGL_TEST_POSTGRES names.
check_kills() {
  local store="" gateways=1
  case "${1:-sqlite}" in
    sqlite) ;;
    postgres) need_postgres; store="$AGL_TEST_POSTGRES" ;;
    pair) need_postgres; store="$AGL_TEST_POSTGRES"; gateways=2 ;;
    *) die "check kills knows sqlite, postgres and pair, not $1" ;;
  esac
  AGL_TEST_KILLS_STORE="$store" AGL_TEST_KILLS_GATEWAYS="$gateways" cargo test --workspace --test binary -- --ignored --nocapture --exact \
    kills::a_hundred_kills_of_the_gateway_lose_nothing_that_was_acknowledged
}

check_fleet() {
  # Without it the clocks stay, which the check says.
  compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null || install_packages faketime || say "x: no faketime here"
  cargo test --workspace --test controller -- --ignored --nocapture --test-threads 1 "${1:-rate::}"
  cargo test --workspace --test binary -- --ignored --nocapture --test-threads 1 "${1:-kubernetes::}"
}

# The package brings llama.cpp's HTTP server; the model is made here, and tiny.
check_llamacpp() {
  local python
  python=$(python_environment llamacpp xllamacpp==2026.10.11549 gguf==0.19.0)
  "$python" scripts/llamacpp/run.py "$@"
}
