"""Training and decoding speed of the engine beside PyTorch, with the calculator's starting policy.

Run through `python3 scripts/parity/run.py bench`. Both sides run one after the other on the same machine with the same
weights and shapes, several rounds by turns; medians are printed, since a shared machine makes single rounds useless.

A training step: forward, log-probs of all tokens, clipped policy-gradient loss, backward, gradient clipping, AdamW, on 16
rows of 256 tokens. Decoding: 32 sequences of 64 prompt and 128 sampled tokens at once, with a cache, in f32.
"""

import json
import statistics
import subprocess
import time
from pathlib import Path

import torch
import transformers

POLICY = Path(__file__).resolve().parents[2] / "recipes" / "calculator" / "policy"
ROWS, ROW_LEN = 16, 256
BATCH, PROMPT, NEW = 32, 64, 128
ROUNDS, STEPS = 5, 4


def train_torch(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(3, model.config.vocab_size, (ROWS, ROW_LEN))
    old = torch.full((ROWS, ROW_LEN - 1), -6.9)
    started = None
    for step in range(STEPS + 1):
        if step == 1:
            started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        logits = model(ids, use_cache=False).logits[:, :-1]
        log_probs = torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None])[..., 0]
        ratio = (log_probs - old).clamp(-20, 20).exp()
        loss = torch.max(-ratio, -ratio.clamp(0.8, 1.2)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return STEPS * ROWS * ROW_LEN / (time.perf_counter() - started)


def decode_torch(model):
    ids = torch.randint(3, model.config.vocab_size, (BATCH, PROMPT))
    started = time.perf_counter()
    with torch.inference_mode():
        cache = transformers.DynamicCache(config=model.config)
        logits = model(ids, past_key_values=cache, use_cache=True).logits[:, -1]
        for _ in range(NEW):
            token = torch.multinomial(logits.softmax(-1), 1)
            logits = model(token, past_key_values=cache, use_cache=True).logits[:, -1]
    return BATCH * NEW / (time.perf_counter() - started)


def main():
    root = Path(__file__).resolve().parents[2]
    build = ["cargo", "build", "--release", "--quiet", "--workspace", "--example", "engine_speed", "--message-format=json"]
    output = subprocess.run(build, check=True, stdout=subprocess.PIPE, text=True, cwd=root).stdout
    executable = [e for e in (json.loads(line).get("executable") for line in output.splitlines()) if e][-1]
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM.from_pretrained(POLICY).float()
    figures = {key: [] for key in ["torch train", "engine train", "torch decode", "engine decode"]}
    for _ in range(ROUNDS):
        figures["torch train"].append(train_torch(model.train()))
        figures["torch decode"].append(decode_torch(model.eval()))
        sizes = [str(n) for n in (ROWS, ROW_LEN, STEPS, BATCH, PROMPT, NEW)]
        result = subprocess.run([executable, str(POLICY), *sizes], check=True, stdout=subprocess.PIPE, text=True)
        ours = json.loads(result.stdout)
        figures["engine train"].append(ours["train_tokens_per_second"])
        figures["engine decode"].append(ours["decode_tokens_per_second"])
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters, {torch.get_num_threads()} threads, torch {torch.__version__}, tokens/s:")
    print(f"{'':14}{'median':>10}{'lowest':>10}{'highest':>10}")
    for key, values in figures.items():
        print(f"{key:14}{statistics.median(values):10.0f}{min(values):10.0f}{max(values):10.0f}")


if __name__ == "__main__":
    main()
