"""A checkpoint saved by ranks with local layers can be loaded by ranks with simulated TransformerEngine layers in
another layout, and vice versa. Weights, main parameters and Adam moments are restored bitwise, and the next update
equals the saving ranks' next update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed import test_resharding as resharding
from tests.distributed.launch import launch
from tests.distributed.test_resharding import Case
from tests.selection import on_demand_unless
from tests.te.processes import NEEDS_TE
from tests.te.ranks import launch_simulated
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, NEEDS_TE]

CASES = [
    Case("dense", 1, {}, ((2, {"tp": 2}),)),
    Case("moe", 2, {"tp": 2, "ep": 2}, ((2, {"pp": 2}),)),
    Case("v3", 2, {"tp": 2, "ep": 2}, ((1, {}),)),
    Case("glm", 1, {}, ((2, {"tp": 2, "ep": 2}),)),
]
MODELS = [case.model for case in CASES]
Launch = Callable[..., list[Any]]
WAYS: dict[str, tuple[Launch, Launch]] = {
    "local to TransformerEngine": (launch, launch_simulated),
    "TransformerEngine to local": (launch_simulated, launch),
}


USUAL = "TransformerEngine to local"
"""Example: a GPU checkpoint that the converter reads on a CPU."""


@pytest.fixture(scope="module", params=[pytest.param(way, marks=on_demand_unless(way == USUAL)) for way in WAYS])
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return by model: state when saved, state one update later, and both states of the ranks that loaded it."""
    save, load = WAYS[request.param]
    root = tmp_path_factory.mktemp("checkpoints")
    for name in MODELS:
        write_tiny_model(root / name, resharding.MODELS[name][0], num_hidden_layers=4)
    found = {}
    for ranks in (1, 2):
        saved = [case for case in CASES if case.ranks == ranks]
        parts = save(resharding._save, ranks, str(root), saved)
        found |= {case.model: _joined([part[case.name] for part in parts]) for case in saved}
    for ranks in (1, 2):
        loaded = [(case, layout) for case in CASES for size, layout in case.into if size == ranks]
        parts = load(resharding._load, ranks, str(root), loaded)
        for index, (case, _) in enumerate(loaded):
            found[case.model] += _joined([part[index] for part in parts])
    return found


def _joined(parts: list[Any]) -> tuple[dict[str, Any], ...]:
    return tuple(resharding._joined(parts, index) for index in (0, 1))


@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_comes_back_under_the_other_layers(resumed: dict[str, Any], model: str) -> None:
    before, _, loaded, _ = resumed[model]
    assert before.keys() == loaded.keys() == {"weight", "param", "exp_avg", "exp_avg_sq"}
    for kind, tensors in before.items():
        assert tensors.keys() == loaded[kind].keys()
        different = [name for name, tensor in tensors.items() if not torch.equal(loaded[kind][name], tensor)]
        assert different == [], kind


@pytest.mark.parametrize("model", MODELS)
def test_the_next_update_is_the_one_that_the_other_layers_make(resumed: dict[str, Any], model: str) -> None:
    start, expected, _, after = resumed[model]
    for kind, tensors in expected.items():
        errors = {
            name: float((after[kind][name] - tensor).abs().max() / (tensor.abs().max() + 1e-12))
            for name, tensor in tensors.items()
        }
        assert max(errors.values()) < 1e-5, f"{kind}: {max(errors, key=lambda name: errors[name])}"
    moved = [not torch.equal(start["weight"][name], tensor) for name, tensor in expected["weight"].items()]
    assert sum(moved) > len(moved) // 2
