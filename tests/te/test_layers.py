"""Under TransformerEngine's layers, simulated, a model computes what it computes from the local ones, and its
checkpoint has the same keys: hosts with and without GPUs read each other's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.te.processes import NEEDS_TE, json_lines
from tests.te.simulation import CHOICE, PACKAGES, VERSION

pytestmark = [pytest.mark.slow, NEEDS_TE]

FAMILIES = ("llama", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe")


@pytest.fixture(scope="module")
def compared() -> dict[str, dict[str, Any]]:
    """By family, in one process: megatron's import is most of it."""
    return {line["family"]: line for line in json_lines("-m", "tests.te.compare", *FAMILIES)}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_the_local_layers(compared: dict[str, dict[str, Any]], family: str) -> None:
    assert compared[family]["logits"] < 2e-5
    assert compared[family]["gradients"] < 1e-5
    assert compared[family]["parameters"] == []
    assert {"TEDotProductAttention", "TERowParallelLinear"} <= set(compared[family]["layers"])


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_of_a_checkpoint_have_the_same_keys(compared: dict[str, dict[str, Any]], family: str) -> None:
    assert compared[family]["keys"] == []


@pytest.mark.parametrize("version", sorted(set(PACKAGES) - {VERSION}))
def test_layers_of_other_versions_compute_the_same(version: str) -> None:
    for line in json_lines("-m", "tests.te.compare", "qwen3_moe", "deepseek_v3", **{CHOICE: version}):
        assert line["version"] == version
        assert line["logits"] < 2e-5
        assert line["gradients"] < 1e-5
        assert (line["parameters"], line["keys"], line["divided"]) == ([], [], [])


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_undivided_projections_count_once_in_a_gradient_norm(compared: dict[str, dict[str, Any]], family: str) -> None:
    """TransformerEngine marks them as divided, and tp ranks would count each its whole one."""
    assert compared[family]["divided"] == []
