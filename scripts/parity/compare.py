"""Compares the engine with transformers on fresh random models.

Logits, log-probs, greedy answers, gradients and two optimiser steps of each policy loss with its other terms, saved checkpoints, chat
templates; and whether the committed fixtures still say what transformers and verl say. Run through `python3 scripts/parity/run.py`.
"""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import models
import published
import reference
from make_fixtures import SEED

TOLERANCE = 1e-4
# A large eps makes the step a smooth function of the gradient, so that rounding near 0 cannot flip its sign.
OPTIM = dict(lr=0.01, betas=[0.9, 0.95], eps=0.01, weight_decay=0.1, grad_clip=0.5)
UPDATES = 2

failures = []


def check(what, difference, tolerance=TOLERANCE):
    ok = difference <= tolerance
    print(f"  {'ok  ' if ok else 'FAIL'} {what}: {difference:.2e} (allowed {tolerance:.0e})", flush=True)
    if not ok:
        failures.append(what)


def same(what, ours, theirs):
    print(f"  {'ok  ' if ours == theirs else 'FAIL'} {what}", flush=True)
    if ours != theirs:
        print(f"    engine:       {ours!r}\n    transformers: {theirs!r}")
        failures.append(what)


def distance(ours, theirs):
    ours = torch.tensor(ours)
    return (ours - theirs).abs().max().item() if ours.shape == theirs.shape else float("inf")


def relative_distance(ours, theirs):
    theirs = torch.tensor(theirs)
    return distance((torch.tensor(ours) / theirs).tolist(), torch.ones_like(theirs))


def gradient_distance(optimizer, gradients):
    """The largest ‖Δ‖/‖g‖ of any parameter; of one whose gradient all but vanishes, relative to a thousandth of the whole."""
    whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    # Betas of 0 make the first moment the gradient itself.
    return max(
        ((optimizer[f"exp_avg.{name}"] - gradient).norm() / gradient.norm().clamp(min=1e-3 * whole)).item()
        for name, gradient in gradients.items()
    )


def torch_updates(model, rows, mode):
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIM["lr"], betas=OPTIM["betas"], eps=OPTIM["eps"], weight_decay=OPTIM["weight_decay"]
    )
    losses, norms = [], []
    for _ in range(UPDATES):
        optimizer.zero_grad()
        loss = reference.policy_loss(model, rows, mode)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM["grad_clip"]).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms


def compare_model(name, mode, seed, folder, probe):
    print(f"{name}, {mode} (seed {seed})")
    rng = random.Random(seed)
    model = models.make_model(name, seed)
    tokenizer = models.make_tokenizer()
    directory = folder / name
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    ids = models.token_ids(seed, 60)
    prompt = models.token_ids(seed + 1, 9)
    rows = reference.with_old_log_probs(model, reference.training_rows(rng), rng)
    request = dict(
        ids=ids, prompt=prompt, new_tokens=reference.GREEDY_TOKENS, rows=rows, loss=dict(reference.LOSS, loss_mode=mode), optim=OPTIM, updates=UPDATES
    )
    (directory / "request.json").write_text(json.dumps(request))
    subprocess.run([probe, "model", directory], check=True)
    answer = json.loads((directory / "answer.json").read_text())

    check("logits", distance(answer["logits"], models.logits(model, ids)))
    # How far each greedily sampled token is from the likeliest; not equality, since two tokens may be as good as tied.
    scores = models.logits(model, prompt + answer["greedy"])[len(prompt) - 1 : -1]
    chosen = scores.gather(1, torch.tensor(answer["greedy"])[:, None])[:, 0]
    check("greedy answer", (scores.max(-1).values - chosen).max().item())
    with torch.no_grad():
        theirs = [reference.token_log_probs(model, row["ids"])[0] for row in rows]
    check("log-probs of tokens", max(distance(a[1:], b) for a, b in zip(answer["log_probs"], theirs, strict=True)))
    _, gradients = reference.loss_and_gradients(model, rows, mode)
    optimizer = load_file(directory / "gradient" / "optimizer.safetensors")
    check("gradient of every parameter", gradient_distance(optimizer, gradients))
    losses, norms = torch_updates(model, rows, mode)
    check("loss of each update", relative_distance(answer["losses"], losses), 1e-4)
    check("gradient norm of each update", relative_distance(answer["grad_norms"], norms), 1e-4)
    check("logits after the updates", distance(answer["logits_after"], models.logits(model, ids)), 5e-4)

    saved = AutoModelForCausalLM.from_pretrained(directory / "saved").eval()
    check("saved checkpoint in transformers", distance(answer["logits_after"], models.logits(saved, ids)))
    difference = max((a - b).abs().max().item() for a, b in zip(saved.parameters(), model.parameters(), strict=True))
    check("saved parameters", difference, 2e-5)
    half = AutoModelForCausalLM.from_pretrained(directory / "saved-bf16", dtype=torch.float32).eval()
    check("saved bf16 checkpoint in transformers", distance(answer["logits_bf16"], models.logits(half, ids)))
    again = AutoTokenizer.from_pretrained(directory / "saved")
    text = 'the "name": <tool_call>\n~'
    same("tokenizer of the saved checkpoint", again(text)["input_ids"], tokenizer(text)["input_ids"])
    same("template of the saved checkpoint", again.chat_template, tokenizer.chat_template)


def compare_templates(folder, probe):
    print("chat templates")
    tokenizer = models.make_tokenizer()
    # The engine writes dates in UTC.
    os.environ["TZ"] = "UTC"
    time.tzset()
    cases = models.render_cases(tokenizer, [*models.CONVERSATIONS, models.DATED])
    for name in models.TEMPLATES:
        directory = folder / f"template-{name}"
        models.make_model("qwen3-tied", 0).save_pretrained(directory)
        tokenizer.chat_template = models.template(name)
        tokenizer.save_pretrained(directory)
        chosen = [case for case in cases if case["template"] == name]
        (directory / "request.json").write_text(json.dumps(chosen))
        subprocess.run([probe, "templates", directory], check=True)
        rendered = json.loads((directory / "answer.json").read_text())
        for number, (ours, case) in enumerate(zip(rendered, chosen, strict=True)):
            if "refused" in case:
                same(f"{name}, conversation {number}, refused", case["refused"] in ours.get("refused", "\0"), True)
            else:
                same(f"{name}, conversation {number}", ours.get("prompt", ours), case["expected"])


def close(a, b):
    """Equal but for the last digits of numbers, which differ between machines."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(close, a, b))
    return a == b


def compare_fixtures(fixtures, credit_fixtures):
    print("committed fixtures")
    for name in models.CONFIGS:
        model = AutoModelForCausalLM.from_pretrained(fixtures / name).eval()
        expected = json.loads((fixtures / name / "expected.json").read_text())
        tensors = load_file(fixtures / name / "expected.safetensors")
        check(f"{name}, logits", distance(tensors["logits"].tolist(), models.logits(model, expected["ids"])), 1e-5)
        loss, gradients = reference.loss_and_gradients(model, expected["rows"], "vanilla")
        check(f"{name}, loss", abs(loss - expected["loss"]), 1e-5)
        recorded = {f"exp_avg.{key}": tensors[f"gradient.{key}"] for key in gradients}
        check(f"{name}, gradients", gradient_distance(recorded, gradients), 1e-5)
    committed = json.loads((fixtures / "chat_templates.json").read_text())
    same("chat_templates.json", committed["cases"], models.render_cases(models.make_tokenizer()))
    # The tests of the crates compare themselves with these files.
    credit, losses = published.cases(SEED)
    same("verl_credit.json", True, close(json.loads((credit_fixtures / "verl_credit.json").read_text()), credit))
    same("verl_losses.json", True, close(json.loads((fixtures / "verl_losses.json").read_text()), losses))


def main(fixtures, credit_fixtures):
    # The whole workspace, for the same features as its tests: nothing is compiled twice.
    build = ["cargo", "build", "--quiet", "--workspace", "--example", "parity_probe", "--message-format=json"]
    output = subprocess.run(build, check=True, stdout=subprocess.PIPE, text=True).stdout
    probe = [json.loads(line).get("executable") for line in output.splitlines()]
    probe = [path for path in probe if path][-1]
    seed = random.SystemRandom().randrange(1, 2**31)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for number, name in enumerate(models.CONFIGS):
            mode = reference.LOSS_MODES[(seed + number) % len(reference.LOSS_MODES)]
            compare_model(name, mode, seed + number, folder, probe)
        compare_templates(folder, probe)
    compare_fixtures(fixtures, credit_fixtures)
    if failures:
        sys.exit(f"{len(failures)} comparison(s) failed: {', '.join(failures)}")
    print("the engine agrees with transformers")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
