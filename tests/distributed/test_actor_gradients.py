"""Gradient of every parameter after one update, in every layout and division into micro-batches, compared with plain
torch on transformers' model.

One launch per number of ranks runs all its cases.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import (
    ONE_MICROBATCH,
    SMALL,
    accumulate,
    case_parameters,
    check_gradients,
    launch_cases,
)
from tests.selection import usual_cases
from tests.tiny_models import GROUPS, VOCABULARY, YARN, write_tiny_model

TIGHT = 16
"""Tokens of a micro-batch: the longest sequence."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    # Fewer key-value heads than tensor-parallel ranks, and a vocabulary that they do not divide.
    "odd": ("qwen3", {"num_key_value_heads": 1, "vocab_size": VOCABULARY + 1}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen2 moe": ("qwen2_moe", {"mlp_only_layers": [1], "head_dim": 8}),
    "v3": ("deepseek_v3", {"rope_parameters": YARN, **GROUPS}),
}
EVERY_CASE: dict[int, dict[str, tuple[Any, ...]]] = {
    1: {
        "dense": ("qwen3", {}, ONE_MICROBATCH),
        "dense tight": ("qwen3", {}, TIGHT),
        "moe": ("qwen3_moe", {}, ONE_MICROBATCH),
        "moe split": ("qwen3_moe", {}, SMALL),
        "v3 split": ("v3", {}, SMALL),
    },
    2: {
        "dense dp2": ("qwen3", {}, SMALL),
        "dense tp2": ("qwen3", {"tp": 2}, SMALL),
        "dense pp2": ("qwen3", {"pp": 2}, SMALL),
        "dense pp2 vpp2": ("qwen3", {"pp": 2, "vpp": 2}, SMALL),
        "dense pp2 layout": ("qwen3", {"pp": 2, "pipeline_layout": "Ettt|tL"}, SMALL),
        "dense tp2 without sp": ("qwen3", {"tp": 2, "sequence_parallel": False}, SMALL),
        "odd tp2": ("odd", {"tp": 2}, SMALL),
        "moe dp2": ("qwen3_moe", {}, SMALL),
        "moe ep2": ("qwen3_moe", {"ep": 2}, SMALL),
        "qwen2 moe tp2": ("qwen2 moe", {"tp": 2}, SMALL),
        "moe tp2": ("qwen3_moe", {"tp": 2}, SMALL),
        "moe tp2 allgather": ("qwen3_moe", {"tp": 2}, SMALL, {"dispatcher": "allgather"}),
        "moe pp2": ("qwen3_moe", {"pp": 2}, SMALL),
        "moe pp2 vpp3 layout": ("qwen3_moe", {"pp": 2, "pipeline_layout": "E|t|t|t|t|L"}, SMALL),
        "v3 tp2": ("v3", {"tp": 2}, SMALL),
        "v3 ep2": ("v3", {"ep": 2}, SMALL),
        "dense cp2": ("qwen3", {"cp": 2}, SMALL),
        "yarn cp2": ("yarn", {"cp": 2}, SMALL),
        "moe cp2 ep2": ("qwen3_moe", {"cp": 2, "ep": 2}, SMALL),
        "v3 cp2": ("v3", {"cp": 2}, SMALL),
    },
    4: {
        "moe tp2 ep4": ("qwen3_moe", {"tp": 2, "ep": 4}, SMALL),
        "dense cp4": ("qwen3", {"cp": 4}, SMALL),  # some sequences are shorter than 2 * cp tokens
        "moe dp2 cp2 ep4": ("qwen3_moe", {"cp": 2, "ep": 4}, SMALL),
    },
}
USUAL = {
    "dense tight",
    "v3 split",
    "dense tp2 without sp",
    "dense pp2 vpp2",
    "odd tp2",
    "moe ep2",
    "qwen2 moe tp2",
    "moe tp2 allgather",
    "moe pp2 vpp3 layout",
    "yarn cp2",
    "moe cp2 ep2",
    "v3 tp2",
    "moe dp2 cp2 ep4",
}
"""Cases that are always tested: each axis, and each special part of a model, once."""
CASES = usual_cases(EVERY_CASE, USUAL)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(write_tiny_model(root / name, kind, **changes)) for name, (kind, changes) in MODELS.items()}


@pytest.fixture(scope="module")
def references(directories: dict[str, str]) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    samples = policy_batch.UPDATES[0]
    return {kind: policy_batch.reference_gradients(directory, samples) for kind, directory in directories.items()}


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, list[tuple[float, list[Any]]]]:
    """Loss and slices of gradients of all ranks, by case."""
    return launch_cases(_worker, CASES, directories)


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_actor_gradients_in_every_layout_equal_transformers(
    size: int, case: str, results: Any, references: Any
) -> None:
    expected_loss, expected = references[CASES[size][case][0]]
    assert sum(loss for loss, _ in results[case]) == pytest.approx(expected_loss, rel=1e-5)
    check_gradients([pieces for _, pieces in results[case]], expected)


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
    results = {}
    for name, (kind, parallel, tokens, *moe) in cases.items():
        config = policy_batch.config(directories[kind], parallel, tokens)
        vars(config.actor.moe).update(*moe)
        actor = policy_batch.build_actor(config)
        loss, _ = accumulate(actor)
        results[name] = loss, policy_batch.gradient_pieces(actor)
    return results
