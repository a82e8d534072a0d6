# Sourced by ./x: the calculator's starting policy, from its noisy demonstrations, by our own engine.

make_policy() {
  need_rust; need_python
  build
  local work=target/make-policy recipe=recipes/calculator
  rm -rf "$work"; mkdir -p "$work"
  python3 $recipe/demonstrations.py --seed 1 --n 48000 >"$work/demonstrations.jsonl"
  target/release/agl sft --data "$work/demonstrations.jsonl" --model $recipe/policy --from-scratch \
    --out "$work/policy" --seed 1 --batch-size 32 --lr 3e-3
  cp "$work/policy/model.safetensors" $recipe/policy/model.safetensors
  say "x: wrote $recipe/policy/model.safetensors"
}
