"""Two updates of an actor with torch and megatron-core only, compared with AdamW on transformers' model in float64:
dense models, and mixtures of experts, whose local layers in Megatron are fixed if TransformerEngine is missing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.two_updates import Joined, join, reference, train
from tests.gpu.ranks import launch_local
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.cuda

KINDS = ("qwen3", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {kind: str(write_tiny_model(root / kind, kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def results(directories: dict[str, str], device: str) -> dict[str, Joined]:
    ranks = launch_local(train, 1, directories, {kind: (kind, {}) for kind in KINDS}, device=device)
    return {kind: join(ranks, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def references(directories: dict[str, str]) -> dict[str, tuple[Any, ...]]:
    return {kind: reference(directory) for kind, directory in directories.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_change_as_adamw_changes_them(
    kind: str, results: dict[str, Joined], references: dict[str, Any]
) -> None:
    weights, expected = results[kind][0], references[kind][0]
    assert weights.keys() == expected.keys()
    errors = {name: float((weights[name] - tensor).abs().max()) for name, tensor in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    # Tolerance of tests/distributed/test_actor_update.py (2e-6) plus a margin for a GPU's order of sums. A wrong step
    # differs by 1e-4.
    assert errors[worst] <= 1e-5, f"{worst}: {errors[worst]:.1e}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_metrics_are_those_of_plain_torch(
    kind: str, results: dict[str, Joined], references: dict[str, Any]
) -> None:
    for ours, theirs in zip(results[kind][1], references[kind][1], strict=True):
        assert {name: ours[name].value for name in theirs} == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pass_behind_a_step_sees_all_of_it(
    kind: str, results: dict[str, Joined], references: dict[str, Any]
) -> None:
    logp, expected = results[kind][2], references[kind][2]
    assert logp.keys() == expected.keys()
    for sample, values in expected.items():
        # The step changes them by 1e-2.
        assert logp[sample] == pytest.approx(values.numpy(), abs=1e-4)
