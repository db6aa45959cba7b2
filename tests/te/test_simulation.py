"""With simulated TransformerEngine layers, a model computes the same as with local layers, and its checkpoint has the
same keys: hosts with and without GPUs can read each other's. Megatron's fused paths, the kernel tests of the doctor and
resolved/attention.py agree with TransformerEngine's own Python code.

One process per version computes everything, because the imports take most of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from packaging.version import Version

from mcore_rl.resolved.attention import BACKENDS, HeadDims
from mcore_rl.resolved.installed import Installed
from tests.selection import on_demand_unless
from tests.te.backends import Asked, cases
from tests.te.processes import NEEDS_TE, json_lines
from tests.te.simulation import CHOICE, PACKAGES, VERSION

pytestmark = [pytest.mark.slow, NEEDS_TE]

FAMILIES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "qwen3_5_text",
    "gpt_oss",
)
OF_OTHER_VERSIONS = ("qwen3_moe", "deepseek_v3")
OLDEST = min(PACKAGES, key=Version)
VERSIONS = [pytest.param(each, marks=on_demand_unless(each in (OLDEST, VERSION))) for each in PACKAGES]
"""The oldest and the newest version; those between on demand."""
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def lines_of() -> Callable[[str], Lines]:
    """Return a function that computes the results of a version, once."""

    @cache
    def results(version: str) -> Lines:
        # `paths` and `backends` change the functions that they test, so the families come first.
        parts = (*FAMILIES, "paths", "kernels", "backends") if version == VERSION else (*OF_OTHER_VERSIONS, "paths")
        return json_lines("-m", "tests.te", *parts, **{CHOICE: version})

    return results


@pytest.mark.parametrize("version", VERSIONS)
def test_simulated_layers_compute_like_local_layers(lines_of: Callable[[str], Lines], version: str) -> None:
    found = [line for line in lines_of(version) if "family" in line]
    assert [line["family"] for line in found] == list(FAMILIES if version == VERSION else OF_OTHER_VERSIONS)
    for line in found:
        assert line["version"] == version
        assert line["logits"] < 2e-5, line["family"]
        assert line["gradients"] < 1e-5, line["family"]
        assert line["parameters"] == line["keys"] == [], line["family"]
        # TransformerEngine marks undivided projections as divided: tp ranks would count each several times in a norm.
        assert line["divided"] == [], line["family"]
        assert "TERowParallelLinear" in line["layers"], line["family"]
        # Its attention does not support sinks in packed rows.
        assert ("TEDotProductAttention" in line["layers"]) == (line["family"] != "gpt_oss"), line["family"]


@pytest.mark.parametrize("version", VERSIONS)
def test_fused_permutations_and_router_product_equal_megatron(lines_of: Callable[[str], Lines], version: str) -> None:
    found = [line for line in lines_of(version) if "case" in line]
    sizes = [(line["case"], len(line["errors"])) for line in found]
    assert sizes == [("there_and_back", 5), ("chunks", 4), ("router", 3)]
    assert found[-1]["found"] == (version == "2.9.0")
    assert max(error for line in found for error in line["errors"]) < 1e-5


def test_doctor_kernels_are_called_with_valid_arguments(lines_of: Callable[[str], Lines]) -> None:
    found = [line for line in lines_of(VERSION) if "kernel" in line]
    assert [line["error"] for line in found] == [""] * 4


@pytest.fixture
def answers(lines_of: Callable[[str], Lines]) -> list[tuple[Asked, dict[str, bool]]]:
    return list(zip(cases(), [line for line in lines_of(VERSION) if "flash" in line], strict=True))


def _takes(asked: Asked) -> dict[str, bool]:
    """Return the backends that resolved/attention.py allows."""
    installed = Installed(True, asked.capability, "2.11.0", asked.flash, asked.flash_3)
    bfloat16 = asked.dtype == "bfloat16"
    return {each.name: bfloat16 and not each.lacks(installed, HeadDims(*asked.heads)) for each in BACKENDS}


def test_attention_table_selects_flash_attention_like_engine(answers: list[tuple[Asked, dict[str, bool]]]) -> None:
    wrong = []
    for asked, found in answers:
        ours = _takes(asked)
        if found["flash"] != (ours["FlashAttention 2"] or ours["FlashAttention 3"]):
            wrong.append((asked, found))
    assert wrong == []
    assert 50 < sum(found["flash"] for _, found in answers) < len(answers) / 2


def test_attention_table_selects_cudnn_only_if_engine_does(answers: list[tuple[Asked, dict[str, bool]]]) -> None:
    assert [asked for asked, found in answers if _takes(asked)["FusedAttention"] and not found["fused"]] == []
    assert any(_takes(asked)["FusedAttention"] for asked, _ in answers)
