# Sourced by ./x: the calculator's starting policy, by our own engine: first how to call the tool and copy an expression, then
# the mixture of good and bad habits that reinforcement learning has to sort out.

make_policy() {
  need_rust; need_python
  build
  local work=target/make-policy recipe=recipes/calculator
  rm -rf "$work"; mkdir -p "$work"
  python3 $recipe/demonstrations.py --seed 1 --good 48000 --mixed 0 >"$work/good.jsonl"
  python3 $recipe/demonstrations.py --seed 2 --good 0 --mixed 12800 >"$work/mixed.jsonl"
  target/release/agl sft --data "$work/good.jsonl" --model $recipe/policy --from-scratch --out "$work/copies" \
    --seed 7 --batch-size 32 --lr 3e-3 --weight-decay 0
  target/release/agl sft --data "$work/mixed.jsonl" --model "$work/copies" --out "$work/policy" \
    --seed 2 --batch-size 32 --lr 1e-3
  cp "$work/policy/model.safetensors" $recipe/policy/model.safetensors
  say "x: wrote $recipe/policy/model.safetensors"
}
