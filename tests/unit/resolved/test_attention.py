"""Unsupported attention for a model's packed rows is rejected before the first row, by key. The selected backend is the
one that TransformerEngine selects (compared in tests/te/test_simulation.py)."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rl.config.roles import KeyNames
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.attention import HeadDims, check_torch_flash, pick
from mcore_rl.resolved.installed import Installed

HOPPER = Installed(True, (9, 0), "2.11.0")
AMPERE = Installed(True, (8, 0), "2.11.0", flash_attention="2.8.3")


@pytest.mark.parametrize(
    ("installed", "heads", "name"),
    [
        (HOPPER, HeadDims(128, 128), "FusedAttention"),
        (HOPPER, HeadDims(192, 128), "FusedAttention"),
        (Installed(True, (10, 0), "2.11.0"), HeadDims(192, 128), "FusedAttention"),
        (Installed(True, None, "2.11.0"), HeadDims(128, 128), "FusedAttention"),
        (AMPERE, HeadDims(128, 128), "FlashAttention 2"),
        (Installed(True, (9, 0), "2.11.0", "2.8.3", cudnn="9.5.1"), HeadDims(128, 128), "FlashAttention 2"),
        (Installed(True, (9, 0), "2.11.0", flash_attention_3="3.0.0b1"), HeadDims(100, 100), "FlashAttention 3"),
        (Installed(True, (12, 0), "2.11.0", "2.7.4"), HeadDims(64, 64), "FlashAttention 2"),
    ],
)
def test_pick_selects_the_first_supported_backend(installed: Installed, heads: HeadDims, name: str) -> None:
    assert pick(installed, "bfloat16", heads).name == pick(installed, "float16", heads).name == name


@pytest.mark.parametrize(
    ("installed", "heads", "reason"),
    [
        (Installed(True, (8, 0), "2.11.0"), HeadDims(128, 128), "flash-attn is not installed .versions 2.1.1 to 2.8.3"),
        (Installed(True, (8, 0), "2.11.0", "2.8.3.post2"), HeadDims(128, 128), "flash-attn 2.8.3.post2 is not in"),
        (Installed(True, (12, 0), "2.11.0", "2.7.2"), HeadDims(128, 128), "flash-attn 2.7.2 is not in 2.7.3 to"),
        (AMPERE, HeadDims(192, 128), "values of the same size as the keys"),
        (AMPERE, HeadDims(100, 100), "head size 100 .*multiples of 8"),
        (HOPPER, HeadDims(100, 100), "head sizes that are multiples of 8"),
        (HOPPER, HeadDims(576, 512), r"head size 576 \(keys\) and 512 \(values\)"),
        (Installed(True, (8, 6), "2.11.0", "2.8.3"), HeadDims(256, 256), "up to 192 on compute capability 8.6"),
        (Installed(True, (7, 0), "2.11.0", "2.8.3"), HeadDims(64, 64), "compute capability 8.0, and this GPU has 7.0"),
    ],
)
def test_pick_unsupported_rows_list_all_reasons(installed: Installed, heads: HeadDims, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.hf_path: no attention .*{reason}"):
        pick(installed, "bfloat16", heads)


def test_pick_float32_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.dtype=float32: .*bfloat16 or float16 only; set model\.dtype=bfloat16"
    ):
        pick(HOPPER, "float32", HeadDims(128, 128))
    with pytest.raises(ConfigError, match=r"critic\.hf_path: no atte"):
        pick(HOPPER, "bfloat16", HeadDims(4, 4), KeyNames("critic", "critic.hf_path"))


def test_float32_teacher_is_rejected_with_its_key() -> None:
    teacher, remedy = (
        KeyNames("teacher", "teacher.hf_path"),
        r"^teacher\.dtype=float32: .*; set teacher\.dtype=bfloat16$",
    )
    with pytest.raises(ConfigError, match=remedy):
        pick(HOPPER, "float32", HeadDims(128, 128), teacher)
    with pytest.raises(ConfigError, match=remedy):
        check_torch_flash(HOPPER, "float32", HeadDims(128, 128), "windows", teacher)


def test_release_local_build_sorts_after_release() -> None:
    """Versions of Python packages are compared this way; TransformerEngine rejects such a build, too."""
    settings: dict[str, Any] = {"cuda": True, "capability": (8, 0), "transformer_engine": "2.11.0"}
    assert pick(Installed(**settings, flash_attention="2.7.4+cu13"), "bfloat16", HeadDims(64, 64)).name
    with pytest.raises(ConfigError, match=r"2\.8\.3\+cu13 is not in"):
        pick(Installed(**settings, flash_attention="2.8.3+cu13"), "bfloat16", HeadDims(64, 64))
