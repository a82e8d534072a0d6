"""Writes the fixtures of crates/agl-engine/tests: small random models, their logits, rendered conversations, and what verl's
losses say; and those of crates/agl-core/tests: what verl's advantages and corrections say.

Run through `python3 scripts/parity/run.py fixtures`, which provides torch, transformers and verl.
"""

import sys
from pathlib import Path

import models
import published

SEED = 20
LENGTH = 24


def main(out, credit_out):
    tokenizer = models.make_tokenizer()
    for name in models.CONFIGS:
        model = models.make_model(name, SEED)
        directory = out / name
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        ids = models.token_ids(SEED, LENGTH)
        rows = [[round(value, 6) for value in row] for row in models.logits(model, ids).tolist()]
        models.write_json(directory / "expected_logits.json", dict(ids=ids, logits=rows))
    models.write_json(out / "chat_templates.json", dict(
        templates={name: models.template(name) for name in models.TEMPLATES},
        cases=models.render_cases(tokenizer),
    ))
    credit, losses = published.cases(SEED)
    models.write_json(credit_out / "verl_credit.json", credit)
    models.write_json(out / "verl_losses.json", losses)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
