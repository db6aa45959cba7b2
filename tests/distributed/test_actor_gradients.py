"""Gradient of every parameter after one update, in every layout and division into micro-batches, compared with plain
torch on transformers' model.

One launch per number of ranks runs all its cases. Gradients are compared whole and by HF name, never by their norm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.tiny_models import GROUPS, VOCABULARY, YARN, write_tiny_model

# Relative to the tensor's largest entry. Gradients are float32 sums of some hundred terms, in an order that depends on
# the layout;
# 2e-6 was the largest difference measured, against float64. A factor of the DP size, a lost or doubled token or a
# missing reduction is off by 1e-2 or more.
TOLERANCE = 1e-5
# TIGHT is the longest sequence; SMALL a little above it, and a multiple of 2 * cp.
ONE_MICROBATCH, SMALL, TIGHT = 10_000, 24, 16
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    # Fewer key-value heads than tensor-parallel ranks, and a vocabulary that they do not divide.
    "odd": ("qwen3", {"num_key_value_heads": 1, "vocab_size": VOCABULARY + 1}),
    "v3": ("deepseek_v3", {"rope_parameters": YARN, **GROUPS}),
    "glm": ("glm4_moe", {}),
}
CASES: dict[int, dict[str, tuple[Any, ...]]] = {
    1: {
        "dense": ("qwen3", {}, ONE_MICROBATCH),
        "dense split": ("qwen3", {}, SMALL),
        "dense tight": ("qwen3", {}, TIGHT),
        "moe": ("qwen3_moe", {}, ONE_MICROBATCH),
        "moe split": ("qwen3_moe", {}, SMALL),
        "moe allgather": ("qwen3_moe", {}, SMALL, {"dispatcher": "allgather"}),
        "mixtral split": ("mixtral", {}, SMALL),
        "v3 split": ("v3", {}, SMALL),
    },
    2: {
        "dense dp2": ("qwen3", {}, SMALL),
        "dense tp2": ("qwen3", {"tp": 2}, SMALL),
        "dense pp2": ("qwen3", {"pp": 2}, SMALL),
        "dense pp2 vpp2": ("qwen3", {"pp": 2, "vpp": 2}, SMALL),
        "dense pp2 layout": ("qwen3", {"pp": 2, "pipeline_layout": "Ettt|tL"}, SMALL),
        "dense pp2 vpp2 layout": ("qwen3", {"pp": 2, "pipeline_layout": "E|tt|t|tL"}, SMALL),
        "dense tp2 without sp": ("qwen3", {"tp": 2, "sequence_parallel": False}, SMALL),
        "odd tp2": ("odd", {"tp": 2}, SMALL),
        "odd tp2 without sp": ("odd", {"tp": 2, "sequence_parallel": False}, SMALL),
        "moe dp2": ("qwen3_moe", {}, SMALL),
        "moe ep2": ("qwen3_moe", {"ep": 2}, SMALL),
        "moe ep2 one microbatch": ("qwen3_moe", {"ep": 2}, ONE_MICROBATCH),
        "moe tp2": ("qwen3_moe", {"tp": 2}, SMALL),
        "moe tp2 allgather": ("qwen3_moe", {"tp": 2}, SMALL, {"dispatcher": "allgather"}),
        "moe pp2": ("qwen3_moe", {"pp": 2}, SMALL),
        "moe pp2 vpp3 layout": ("qwen3_moe", {"pp": 2, "pipeline_layout": "E|t|t|t|t|L"}, SMALL),
        "mixtral tp2": ("mixtral", {"tp": 2}, SMALL),
        "mixtral pp2": ("mixtral", {"pp": 2}, SMALL),
        "mixtral ep2": ("mixtral", {"ep": 2}, SMALL),
        "v3 tp2": ("v3", {"tp": 2}, SMALL),
        "v3 ep2": ("v3", {"ep": 2}, SMALL),
        "glm tp2": ("glm", {"tp": 2}, SMALL),
        "dense cp2": ("qwen3", {"cp": 2}, SMALL),
        "dense cp2 one microbatch": ("qwen3", {"cp": 2}, ONE_MICROBATCH),
        "moe cp2": ("qwen3_moe", {"cp": 2}, SMALL),
        "moe cp2 ep2": ("qwen3_moe", {"cp": 2, "ep": 2}, SMALL),
        "v3 cp2": ("v3", {"cp": 2}, SMALL),
    },
    4: {
        "dense tp2 pp2": ("qwen3", {"tp": 2, "pp": 2}, SMALL),
        "moe tp2 ep4": ("qwen3_moe", {"tp": 2, "ep": 4}, SMALL),
        "moe pp2 ep2": ("qwen3_moe", {"pp": 2, "ep": 2}, SMALL),
        "v3 tp2 pp2": ("v3", {"tp": 2, "pp": 2}, SMALL),
        "dense cp4": ("qwen3", {"cp": 4}, SMALL),  # some sequences are shorter than 2 * cp tokens
        "dense tp2 cp2": ("qwen3", {"tp": 2, "cp": 2}, SMALL),
        "dense pp2 cp2": ("qwen3", {"pp": 2, "cp": 2}, SMALL),
        "moe dp2 cp2 ep4": ("qwen3_moe", {"cp": 2, "ep": 4}, SMALL),
        "v3 tp2 cp2": ("v3", {"tp": 2, "cp": 2}, SMALL),
    },
}
ALL_CASES = [pytest.param(size, name, id=name) for size, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(write_tiny_model(root / name, kind, **changes)) for name, (kind, changes) in MODELS.items()}


@pytest.fixture(scope="module")
def references(directories: dict[str, str]) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    samples = policy_batch.UPDATES[0]
    return {kind: policy_batch.reference_gradients(directory, samples) for kind, directory in directories.items()}


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    """By case: the loss, and the gradients assembled from the slices of all ranks."""
    joined = {}
    for size, cases in CASES.items():
        ranks = launch(_worker, size, directories, cases, timeout_seconds=300)
        for name in cases:
            parts = [rank[name] for rank in ranks]
            joined[name] = (sum(loss for loss, _ in parts), policy_batch.assemble([pieces for _, pieces in parts]))
    return joined


@pytest.mark.parametrize(("size", "case"), ALL_CASES)
def test_actor_gradients_in_every_layout_equal_transformers(
    size: int, case: str, results: Any, references: Any
) -> None:
    expected_loss, expected = references[CASES[size][case][0]]
    loss, gradients = results[case]
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradients.keys() == expected.keys()
    errors = {
        name: float((gradients[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in expected.items()
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= TOLERANCE, f"{worst}: {errors[worst]:.1e}"


def test_policy_batch_covers_every_branch_of_the_loss() -> None:
    """Check the test data: tokens clipped above and below, dual clip, and unclipped tokens all occur."""
    samples = policy_batch.UPDATES[0]
    sides = set()
    for sample in samples:
        ratio = np.exp(-policy_batch.drift(sample))
        a = policy_batch.advantages()[sample]
        sides |= {"above"} if a > 0 and (ratio > 1 + policy_batch.CLIP_HIGH).any() else set()
        sides |= {"below"} if a < 0 and (ratio < 1 - policy_batch.CLIP_LOW).any() else set()
        sides |= {"dual"} if a < 0 and (ratio > policy_batch.DUAL_CLIP).any() else set()
    assert sides == {"above", "below", "dual"}


def _worker(rank: int, directories: dict[str, str], cases: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    from mcore_rl.megatron.roles.actor import MegatronActor

    results = {}
    samples = policy_batch.UPDATES[0]
    for name, (kind, parallel, tokens, *moe) in cases.items():
        config = policy_batch.config(directories[kind], parallel, tokens)
        for key, value in dict(*moe).items():
            setattr(config.actor.moe, key, value)
        actor = MegatronActor(config, rank, dist.get_world_size(), None)
        chunks = policy_batch.chunks()
        share = policy_batch.share(samples, actor.layout.coordinates(rank).dp, actor.layout.dp)
        first = policy_batch.share(policy_batch.UPDATES[1], actor.layout.coordinates(rank).dp, actor.layout.dp)
        batch, _ = actor.recompute_logp([first, share], chunks)  # like a second update, with old log-probabilities
        for sample, logp in batch.old_logp.items():
            logp += torch.from_numpy(policy_batch.drift(sample)[policy_batch.held(sample, actor.layout, rank)])
        _, reports = actor.accumulate_gradients(batch, 1, on_every_replica=True)
        with torch.no_grad():
            for chunk in actor.chunks:
                for parameter in chunk.parameters():
                    parameter.copy_(parameter.main_grad)
        counted = actor.layout.coordinates(rank).tp == 0
        results[name] = (sum(report.loss for report in reports) * counted, policy_batch.hf_pieces(actor))
    return results
