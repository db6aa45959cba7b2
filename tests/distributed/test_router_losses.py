"""Auxiliary losses of routers compared with their formulas in float64 on transformers' model, in every layout; and the
update of the expert bias compared with counts by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import (
    ONE_MICROBATCH,
    SMALL,
    TOLERANCE,
    accumulate,
    check_gradients,
    launch_cases,
)
from tests.distributed.launch import launch
from tests.tiny_models import GROUPS, checkpoint_tensors, write_tiny_model

BALANCE, Z, RATE = 0.7, 0.05, 0.01
SAMPLES = policy_batch.UPDATES[0]
LAYERS = 2
MODELS = {"moe": ("qwen3_moe", {}), "v3": ("deepseek_v3", GROUPS)}
# Samples of each group whose load is balanced.
BY_SEQUENCE, TOGETHER = [[sample] for sample in SAMPLES], [SAMPLES]
BY_RANK = [[int(s) for s in policy_batch.share(SAMPLES, rank, 2).samples] for rank in range(2)]
# By number of ranks: model, load_balancing, groups, layout, tokens of a micro-batch, recomputation.
CASES: dict[int, dict[str, tuple[str, str, list[list[int]], dict[str, Any], int, str]]] = {
    1: {
        "sequence": ("moe", "seq_aux_loss", BY_SEQUENCE, {}, ONE_MICROBATCH, "none"),
        "sequence recomputed": ("moe", "seq_aux_loss", BY_SEQUENCE, {}, SMALL, "full"),
        "batch": ("moe", "aux_loss", TOGETHER, {}, ONE_MICROBATCH, "none"),
        "v3": ("v3", "seq_aux_loss", BY_SEQUENCE, {}, SMALL, "none"),
    },
    2: {
        "sequence ep2": ("moe", "seq_aux_loss", BY_SEQUENCE, {"ep": 2}, SMALL, "full"),
        "sequence pp2": ("moe", "seq_aux_loss", BY_SEQUENCE, {"pp": 2}, SMALL, "full"),
        "sequence tp2": ("moe", "seq_aux_loss", BY_SEQUENCE, {"tp": 2}, SMALL, "none"),
        "sequence cp2": ("moe", "seq_aux_loss", BY_SEQUENCE, {"cp": 2}, SMALL, "full"),
        "batch cp2": ("moe", "aux_loss", TOGETHER, {"cp": 2}, ONE_MICROBATCH, "none"),
        "batch tp2": ("moe", "aux_loss", TOGETHER, {"tp": 2}, ONE_MICROBATCH, "full"),
        "batch dp2": ("moe", "aux_loss", BY_RANK, {}, ONE_MICROBATCH, "none"),
        "global dp2": ("moe", "global_aux_loss", TOGETHER, {}, ONE_MICROBATCH, "none"),
        "v3 tp2": ("v3", "seq_aux_loss", BY_SEQUENCE, {"tp": 2}, SMALL, "none"),
        "v3 dp2": ("v3", "seq_aux_loss", BY_SEQUENCE, {}, SMALL, "full"),
        "v3 pp2": ("v3", "seq_aux_loss", BY_SEQUENCE, {"pp": 2}, SMALL, "none"),
        # transformers' checkpointing computes each layer twice with gradients.
        "v3 fsdp2": ("v3", "seq_aux_loss", BY_SEQUENCE, {"strategy": "fsdp2"}, SMALL, "full"),
        "global fsdp2": ("moe", "global_aux_loss", TOGETHER, {"strategy": "fsdp2"}, ONE_MICROBATCH, "full"),
    },
}
NAMES = [name for cases in CASES.values() for name in cases]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: str(write_tiny_model(root / name, kind, num_hidden_layers=LAYERS, **changes))
        for name, (kind, changes) in MODELS.items()
    }


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    return launch_cases(_worker, CASES, directories)


def _worker(rank: int, directories: dict[str, str], cases: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for name, (kind, balancing, _, parallel, tokens, recompute) in cases.items():
        config = policy_batch.config(directories[kind], parallel, tokens)
        moe = config.actor.moe
        moe.load_balancing, moe.aux_loss_coefficient, moe.z_loss_coefficient = balancing, BALANCE, Z
        moe.bias_update_rate = RATE if kind == "v3" else 0.0
        config.actor.recompute = recompute
        actor = policy_batch.build_actor(config)
        accumulate(actor)
        results[name] = {
            "before": _bias(actor),
            "gradients": policy_batch.gradient_pieces(actor),
            "metrics": actor.routers.finish_update(),
            "after": _bias(actor),
        }
    return results


def _bias(actor: Any) -> dict[str, np.ndarray]:
    names = ("expert_bias", "e_score_correction_bias")
    return {name: t.numpy().copy() for name, t in actor.tensors().items() if name.endswith(names)}


class Oracle:
    """Inputs and choices of the routers of transformers' model, by layer and sample."""

    def __init__(self, directory: str) -> None:
        self.model: Any = policy_batch.reference_model(directory)
        self.gates = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]

    def update(self) -> tuple[torch.Tensor, list[dict[int, torch.Tensor]], list[dict[int, torch.Tensor]]]:
        """Policy loss; by layer and sample the logits and the chosen experts, up to the last predictor."""
        with torch.no_grad():
            old = {
                s: policy_batch.reference_logp(self.model, s)[0] + torch.from_numpy(policy_batch.drift(s)).double()
                for s in SAMPLES
            }
        seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.gates]
        hooks = [
            gate.register_forward_hook(lambda _, inputs, out, found=found: found.append((inputs[0], out[2])))
            for gate, found in zip(self.gates, seen, strict=True)
        ]
        loss, _ = policy_batch.reference_loss(self.model, SAMPLES, old)
        for hook in hooks:
            hook.remove()
        logits: list[dict[int, torch.Tensor]] = []
        chosen: list[dict[int, torch.Tensor]] = []
        for gate, found in zip(self.gates, seen, strict=True):
            cut = {s: len_computed(s) for s in SAMPLES}
            logits.append(
                {s: (x.flatten(0, -2)[: cut[s]] @ gate.weight.t()) for s, (x, _) in zip(SAMPLES, found, strict=True)}
            )
            chosen.append({s: experts[: cut[s]] for s, (_, experts) in zip(SAMPLES, found, strict=True)})
        return loss, logits, chosen


def len_computed(sample: int) -> int:
    """Number of tokens of a sequence in a row: up to the last predictor."""
    return policy_batch.PROMPTS[sample] + int(np.flatnonzero(policy_batch.trained(sample))[-1])


def _reference(directory: str, groups: list[list[int]]) -> dict[str, Any]:
    oracle = Oracle(directory)
    loss, logits, chosen = oracle.update()
    total = sum(len_computed(sample) for sample in SAMPLES)
    top_k, sigmoid = oracle.gates[0].top_k, "v3" in directory
    balance, z = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for layer in logits:
        for group in groups:
            rows = torch.cat([layer[sample] for sample in group])
            scores = rows.sigmoid() / rows.sigmoid().sum(-1, keepdim=True) if sigmoid else rows.softmax(-1)
            picked = torch.zeros_like(scores).scatter(1, scores.topk(top_k, -1).indices, 1.0)
            fraction, mean_score = picked.mean(0) / top_k, scores.mean(0)
            balance = balance + len(rows) / total * scores.shape[1] * (fraction * mean_score).sum()
        z = z + torch.logsumexp(torch.cat(list(layer.values())), -1).square().mean()
    (loss + BALANCE * balance + Z * z).backward()
    named = {name: parameter.grad for name, parameter in oracle.model.named_parameters()}
    fixed = {name: bias for name, bias in oracle.model.named_buffers() if name.endswith("correction_bias")}
    experts = logits[0][SAMPLES[0]].shape[1]
    load = [torch.cat(list(layer.values())).flatten().bincount(minlength=experts) for layer in chosen]
    return {
        "gradients": checkpoint_tensors(oracle.model, named | fixed),
        "aux": float(balance.detach()) / len(logits),
        "z": float(z.detach()) / len(logits),
        "load": torch.stack(load).double().numpy(),
    }


@pytest.fixture(scope="module")
def references(directories: dict[str, str]) -> dict[str, dict[str, Any]]:
    """References by case; cases with the same model and groups share one."""
    found: dict[str, dict[str, Any]] = {}
    by_key: dict[str, dict[str, Any]] = {}
    for name, (kind, _, groups, *_rest) in ((n, c) for cases in CASES.values() for n, c in cases.items()):
        key = f"{kind} {groups}"
        if key not in by_key:
            by_key[key] = _reference(directories[kind], groups)
        found[name] = by_key[key]
    return found


@pytest.mark.parametrize("case", NAMES)
def test_router_loss_gradients_equal_formula(case: str, results: Any, references: Any) -> None:
    check_gradients([rank["gradients"] for rank in results[case]], references[case]["gradients"])


@pytest.mark.parametrize("case", NAMES)
def test_router_loss_metrics_are_means_over_layers(case: str, results: Any, references: Any) -> None:
    from mcore_rl.types import merge_metrics

    metrics, expected = merge_metrics([rank["metrics"] for rank in results[case]]), references[case]
    assert metrics["actor/moe_aux_loss"].value == pytest.approx(expected["aux"], rel=1e-5)
    assert metrics["actor/moe_z_loss"].value == pytest.approx(expected["z"], rel=1e-5)
    load = expected["load"]
    assert metrics["actor/moe_max_load"].value == pytest.approx((load.max(1) / load.mean(1)).max())


def test_router_losses_depend_on_groups(references: Any) -> None:
    """Check the test data: groups make a difference larger than the tolerance."""
    name = "model.layers.1.mlp.gate.weight"
    one, other = (references[case]["gradients"][name] for case in ("sequence", "batch"))
    assert (one - other).abs().max() > 100 * TOLERANCE * one.abs().max()


@pytest.mark.parametrize("case", ["v3", "v3 tp2", "v3 dp2", "v3 pp2", "v3 fsdp2"])
def test_expert_bias_moves_by_rate_towards_equal_load(case: str, results: Any, references: Any) -> None:
    load = references[case]["load"]
    direction = np.sign(load.mean(1, keepdims=True) - load)
    assert (direction > 0).any()
    assert (direction < 0).any()
    holders = [rank for rank in results[case] if rank["before"]]
    assert holders
    for rank in holders:
        ((name, before),) = rank["before"].items()  # the first layer has no experts
        expected = before + np.float32(RATE) * direction[0].astype(np.float32)
        np.testing.assert_array_equal(rank["after"][name], expected)


def _biased_run(rank: int, directory: str) -> list[np.ndarray]:
    """The bias as loaded, after a pass without gradient, after a rejected update, and after a successful one."""
    from mcore_rl.errors import NonFiniteError

    config = policy_batch.config(directory, {}, SMALL)
    config.actor.moe.bias_update_rate = RATE
    actor = policy_batch.build_actor(config)
    seen = [next(iter(_bias(actor).values()))]
    batch, _ = actor.recompute_logp(policy_batch.shares(actor), policy_batch.chunks())
    seen.append(next(iter(_bias(actor).values())))
    weight = actor.tensors()["decoder.final_layernorm.weight"]
    kept = weight.clone()
    weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError):
        actor.update(batch, 0)
    seen.append(next(iter(_bias(actor).values())))
    weight.copy_(kept)
    actor.update(batch, 0)
    return [*seen, next(iter(_bias(actor).values()))]


def test_expert_bias_changes_in_successful_updates_only(directories: Any, references: Any) -> None:
    (seen,) = launch(_biased_run, 1, directories["v3"])
    loaded, recomputed, refused, updated = seen
    np.testing.assert_array_equal(recomputed, loaded)
    np.testing.assert_array_equal(refused, loaded)
    load = references["v3"]["load"]
    direction = np.sign(load.mean(1, keepdims=True) - load)[0].astype(np.float32)
    np.testing.assert_array_equal(updated, loaded + np.float32(RATE) * direction)
