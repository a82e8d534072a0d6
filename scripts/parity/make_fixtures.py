"""Writes the fixtures of crates/agl-engine/tests: small random models, what transformers computes with them, rendered conversations,
and what verl's losses say; and those of crates/agl-core/tests: what verl's advantages and corrections say.

Run through `python3 scripts/parity/run.py fixtures`, which provides torch, transformers and verl.
"""

import random
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import models
import published
import reference

SEED = 20
LENGTH = 24


def write_expected(directory, model):
    ids = models.token_ids(SEED, LENGTH)
    prompt = models.token_ids(SEED + 1, 9)
    rng = random.Random(SEED)
    rows = reference.with_old_log_probs(model, reference.training_rows(rng), rng)
    loss, gradients = reference.loss_and_gradients(model, rows, "vanilla")
    with torch.no_grad():
        log_probs = [reference.token_log_probs(model, row["ids"])[0].tolist() for row in rows]
    tokens, gaps = reference.greedy(model, prompt)
    tensors = {f"gradient.{name}": gradient for name, gradient in gradients.items()}
    save_file({"logits": models.logits(model, ids), **tensors}, directory / "expected.safetensors")
    models.write_json(directory / "expected.json", dict(
        ids=ids,
        rows=rows,
        loss_config=reference.LOSS,
        loss=loss,
        log_probs=[[round(value, 6) for value in row] for row in log_probs],
        greedy=dict(prompt=prompt, ids=tokens, gaps=[round(gap, 6) for gap in gaps]),
    ))


def main(out, credit_out):
    tokenizer = models.make_tokenizer()
    for name in models.CONFIGS:
        model = models.make_model(name, SEED)
        directory = out / name
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        write_expected(directory, model)
    models.write_json(out / "chat_templates.json", dict(
        templates={name: models.template(name) for name in models.TEMPLATES},
        cases=models.render_cases(tokenizer),
    ))
    credit, losses = published.cases(SEED)
    models.write_json(credit_out / "verl_credit.json", credit)
    models.write_json(out / "verl_losses.json", losses)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
