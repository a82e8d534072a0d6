"""The policy losses with their other terms, their gradients and greedy decoding, as written down in PyTorch."""

import torch

import models

LOSS = dict(
    clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, entropy_coeff=0.01, temperature=0.8,
    kl_loss_coef=0.05, kl_loss_type="low_var_kl",
)
LOSS_MODES = ["vanilla", "gspo", "cispo"]
GREEDY_TOKENS = 200


def training_rows(rng):
    """Rows of uneven length with masks, both signs of advantage, and old log-probs far enough off to reach every clip."""
    rows = []
    for length in [17, 5, 40, 23, 11]:
        mask = [i > 0 and rng.random() < 0.6 for i in range(length)]
        mask[-1] = True
        advantage = round(rng.choice([-1.0, 1.0]) * rng.uniform(0.5, 1.5), 4)
        rows.append(
            dict(
                ids=[rng.randrange(128) for _ in range(length)],
                mask=mask,
                weights=[round(rng.uniform(0.05, 0.15), 4) if m else 0.0 for m in mask],
                advantages=[advantage] * length,
                old_log_probs=[0.0] * length,
                importance_weights=[1.0] * length,
                ref_log_probs=[0.0] * length,
            )
        )
    return rows


def with_old_log_probs(model, rows, rng):
    for row in rows:
        log_probs = token_log_probs(model, row["ids"])[0].tolist()
        row["old_log_probs"] = [0.0] + [round(lp + rng.uniform(-0.6, 0.6), 4) for lp in log_probs]
        row["ref_log_probs"] = [0.0] + [round(lp + rng.uniform(-0.6, 0.6), 4) for lp in log_probs]
        row["importance_weights"] = [round(rng.uniform(0.4, 2.0), 4) for _ in row["ids"]]
    return rows


def token_log_probs(model, ids):
    """log-probs of ids[1:] and the entropy at each of their positions, at the loss's temperature."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float() / LOSS["temperature"]
    every = logits.log_softmax(-1)
    return every.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], -(every.exp() * every).sum(-1)


def token_losses(log_probs, old, advantage, mode):
    """Of the trained tokens of one row, without weights."""
    low, high = 1 - LOSS["clip_ratio_low"], 1 + LOSS["clip_ratio_high"]
    ratio = (log_probs - old).clamp(-20, 20).exp()
    if mode == "cispo":
        return -ratio.clamp(low, high).detach() * advantage * log_probs
    if mode == "gspo":
        ratio = ((log_probs - old).mean().detach() + log_probs - log_probs.detach()).exp()
    plain = -advantage * ratio
    clipped = torch.max(plain, -advantage * ratio.clamp(low, high))
    if mode == "gspo":
        return clipped
    return torch.where(advantage < 0, torch.min(clipped, -advantage * LOSS["clip_ratio_c"]), clipped)


def policy_loss(model, rows, mode):
    total = 0.0
    for row in rows:
        pick = torch.tensor(row["mask"][1:])
        tensor = lambda key: torch.tensor(row[key][1:])[pick]
        log_probs, entropy = token_log_probs(model, row["ids"])
        log_probs = log_probs[pick]
        loss = token_losses(log_probs, tensor("old_log_probs"), tensor("advantages"), mode)
        distance = tensor("ref_log_probs") - log_probs
        kl = (distance.exp() - 1 - distance).clamp(max=10)
        loss = loss * tensor("importance_weights") + LOSS["kl_loss_coef"] * kl
        total = total + (tensor("weights") * (loss - LOSS["entropy_coeff"] * entropy[pick])).sum()
    return total


def loss_and_gradients(model, rows, mode):
    """The loss, and the gradient of every parameter under its name in a checkpoint."""
    model.zero_grad()
    loss = policy_loss(model, rows, mode)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.item(), gradients


def greedy(model, prompt):
    """The likeliest next token again and again, without a cache, and how far ahead of the second each one was."""
    ids, gaps = list(prompt), []
    for _ in range(GREEDY_TOKENS):
        best = models.logits(model, ids)[-1].topk(2)
        gaps.append((best.values[0] - best.values[1]).item())
        ids.append(best.indices[0].item())
    return ids[len(prompt) :], gaps
