"""verl's published functions for advantages, losses and rollout correction, on random batches.

Their modules are taken from the package as they are. What they import beside torch (Ray, OmegaConf, tensordict, verl's own
configuration) serves types and trainers, and is stood in for, so that the package is needed without its dependencies.
"""

import importlib.util
import random
import sys
import types

import numpy as np
import torch


class Config(dict):
    """A configuration whose keys are attributes too, as verl's functions want it."""

    __getattr__ = dict.__getitem__


class DataProto:
    @staticmethod
    def from_dict(tensors):
        return tensors


def load():
    """(core_algos, rollout_corr_helper) of the installed package."""
    folder = importlib.util.find_spec("verl").submodule_search_locations[0]
    names = dict(
        omegaconf=dict(DictConfig=Config),
        tensordict=dict(TensorDict=dict),
        transformers=dict(PreTrainedTokenizer=object),
    )
    ours = {
        "verl": {},
        "verl.utils": {},
        "verl.utils.device": dict(get_device_name=lambda: "cpu", get_torch_device=lambda: torch.cpu),
        "verl.utils.import_utils": dict(deprecated=lambda replacement: lambda function: function),
        "verl.trainer": {},
        "verl.trainer.ppo": {},
        "verl.trainer.config": dict(AlgoConfig=type("AlgoConfig", (), {})),
        "verl.trainer.config.algorithm": dict(RolloutCorrectionConfig=Config),
        "verl.workers": {},
        "verl.workers.config": dict(ActorConfig=Config),
        "verl.workers.config.actor": dict(PolicyLossConfig=Config),
        "verl.protocol": dict(DataProto=DataProto),
    }
    for name, content in {**names, **ours}.items():
        if name in names and importlib.util.find_spec(name) is not None:
            continue
        module = types.ModuleType(name)
        module.__dict__.update(content)
        module.__path__ = []
        sys.modules[name] = module

    def real(name):
        path = f"{folder}/{name.removeprefix('verl.').replace('.', '/')}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
        return module

    real("verl.utils.torch_functional")
    groupwise = real("verl.utils.groupwise")
    sys.modules["verl.utils"].as_torch_index = groupwise.as_torch_index
    sys.modules["verl.utils"].group_mean_std = groupwise.group_mean_std
    return real("verl.trainer.ppo.core_algos"), real("verl.trainer.ppo.rollout_corr_helper")


AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSS_SCALE_FACTOR = 37.0
KL_COEF = 0.3
CLIPS = dict(
    vanilla=dict(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0),
    gspo=dict(clip_ratio_low=0.03, clip_ratio_high=0.04, clip_ratio_c=3.0),
    cispo=dict(clip_ratio_low=1.0, clip_ratio_high=0.5, clip_ratio_c=3.0),
)
KL_TYPES = [None, "kl", "mse", "low_var_kl"]
CORRECTIONS = [
    ("token", "2.0", None, None),
    ("token", "0.5_5.0", None, None),
    ("sequence", "4.0", None, None),
    ("token", "2.0", "token_k1", "0.7_1.5"),
    ("token", "2.0", "seq_mean_k1,seq_max_k3", "0.9_1.2,0.5"),
    ("token", "2.0", "seq_sum_k1", "2.0"),
    ("token", "2.0", "token_k2,token_k3,seq_max_k2", "0.3"),
    ("token", "2.0", "seq_sum_k2,seq_mean_k3", "1.5,0.2"),
    ("token", "2.0", "seq_mean_k2,seq_sum_k3", "0.2,1.5"),
]


def single(values):
    """The numbers as float32 holds them: what both sides are given."""
    return [float(np.float32(value)) for value in values]


def tensor(rows):
    """Rows of uneven length, padded with 0."""
    length = max(map(len, rows))
    return torch.tensor([row + [0.0] * (length - len(row)) for row in rows], dtype=torch.float64)


def loss_cases(core, rng):
    """Per batch: rows with what the losses are given, and for each loss its value and its slope at every token."""
    for _ in range(3):
        lengths = [rng.randrange(1, 9) for _ in range(4)]
        each = lambda low, high: [single(rng.uniform(low, high) for _ in range(length)) for length in lengths]
        old = each(-3.0, -0.2)
        # Whole rows near their old log-probs and far from them, so that the ratios of rows are clipped and are not.
        spread = [0.01, 0.05, 0.6, 1.6]
        moved = [[lp + rng.uniform(-s, s) for lp in row] for row, s in zip(old, spread)]
        now, ref, weights = [single(row) for row in moved], each(-3.0, -0.2), each(0.3, 2.0)
        advantages = [[value] * length for value, length in zip(single(rng.uniform(-2, 2) for _ in lengths), lengths)]
        mask = tensor([[1.0] * length for length in lengths])
        results = []
        for mode, clips in CLIPS.items():
            for aggregation in AGGREGATIONS:
                for kl in KL_TYPES:
                    log_prob = tensor(now).requires_grad_()
                    batch = dict(loss_scale_factor=LOSS_SCALE_FACTOR)
                    config = Config(clip_ratio=0.2, global_batch_info=batch, **clips)
                    loss, _ = core.get_policy_loss_fn(mode)(
                        old_log_prob=tensor(old),
                        log_prob=log_prob,
                        advantages=tensor(advantages),
                        response_mask=mask,
                        loss_agg_mode=aggregation,
                        config=config,
                        rollout_is_weights=tensor(weights),
                    )
                    if kl is not None:
                        kld = core.kl_penalty(log_prob, tensor(ref), kl)
                        loss = loss + KL_COEF * core.agg_loss(kld, mask, aggregation, **batch)
                    loss.backward()
                    slopes = [row[:length].tolist() for row, length in zip(log_prob.grad, lengths)]
                    results.append(dict(
                        loss_mode=mode, loss_agg_mode=aggregation, kl_loss_type=kl, **clips, loss=loss.item(), slopes=slopes,
                    ))
        yield dict(
            rows=[
                dict(zip(["log_probs", "old_log_probs", "ref_log_probs", "importance_weights", "advantages"], row))
                for row in zip(now, old, ref, weights, advantages)
            ],
            results=results,
        )


def advantage_cases(core, rng):
    """Groups of rollouts of one row each, and their advantages by each estimator."""
    estimators = dict(
        grpo=lambda **given: core.compute_grpo_outcome_advantage(**given, norm_adv_by_std_in_grpo=True),
        grpo_no_std=lambda **given: core.compute_grpo_outcome_advantage(**given, norm_adv_by_std_in_grpo=False),
        rloo=core.compute_rloo_outcome_advantage,
        reinforce_plus_plus=lambda index, **given: core.compute_reinforce_plus_plus_outcome_advantage(
            **given, config=Config(gamma=1.0)
        ),
        reinforce_plus_plus_baseline=core.compute_reinforce_plus_plus_baseline_outcome_advantage,
    )
    for _ in range(5):
        groups = [name for name in "abc" for _ in range(rng.randrange(2, 6))]
        rollouts = [
            dict(group=group, reward=rng.choice([0.0, 1.0, rng.uniform(-1, 2)]), tokens=rng.randrange(1, 9)) for group in groups
        ]
        scores = tensor([[0.0] * (rollout["tokens"] - 1) + [rollout["reward"]] for rollout in rollouts])
        mask = tensor([[1.0] * rollout["tokens"] for rollout in rollouts])
        expected = {}
        for name, estimator in estimators.items():
            index = np.array(groups, dtype=object)
            found, _ = estimator(token_level_rewards=scores.clone(), response_mask=mask, index=index)
            expected[name] = found[:, 0].tolist()
        yield dict(rollouts=rollouts, expected=expected)


def correction_cases(helper, rng):
    """Rows as their two policies see them, with the weights, rejections and metrics of each correction."""
    for weighting, threshold, criteria, bounds in CORRECTIONS:
        lengths = [rng.randrange(1, 9) for _ in range(6)]
        old = [single(rng.uniform(-3.0, -0.2) for _ in range(length)) for length in lengths]
        spread = [0.02, 0.1, 0.3, 0.6, 1.0, 1.5]
        rollout = [single(lp + rng.uniform(-s, s) for lp in row) for row, s in zip(old, spread)]
        mask = tensor([[1.0] * length for length in lengths])
        weights, kept, metrics = helper.compute_rollout_correction_and_rejection_mask(
            old_log_prob=tensor(old),
            rollout_log_prob=tensor(rollout),
            response_mask=mask,
            rollout_is=weighting,
            rollout_is_threshold=threshold,
            rollout_rs=criteria,
            rollout_rs_threshold=bounds,
        )
        weights = weights["rollout_is_weights"]
        metric = lambda name: metrics[f"rollout_corr/{name}"]
        yield dict(
            rollout_is=weighting,
            rollout_is_threshold=threshold,
            rollout_rs=criteria,
            rollout_rs_threshold=bounds,
            rows=[
                dict(old_log_probs=o, rollout_log_probs=r, weights=w[:n].tolist(), kept=[bool(x) for x in k[:n]])
                for o, r, w, k, n in zip(old, rollout, weights, kept, lengths)
            ],
            weight_mean=metric("rollout_is_mean"),
            effective_sample_size=metric("rollout_is_eff_sample_size"),
            kl=metric("kl"),
            k3_kl=metric("k3_kl"),
        )


def cases(seed):
    """(for crates/agl-core, for crates/agl-engine)"""
    core, helper = load()
    rng = random.Random(seed)
    losses = dict(loss_scale_factor=LOSS_SCALE_FACTOR, kl_loss_coef=KL_COEF, batches=list(loss_cases(core, rng)))
    credit = dict(advantages=list(advantage_cases(core, rng)), corrections=list(correction_cases(helper, rng)))
    return credit, losses
