"""Arguments of SGLang for an engine's layout. tests/contract/test_sglang_shard_maps.py compares the weights."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rl.engines.sglang.layout_arguments import layout_arguments
from mcore_rl.weights.slices.engine_layout import EngineLayout

TRITON = {"moe_runner_backend": "triton"}


@pytest.mark.parametrize(
    ("layout", "num_hosts", "expected"),
    [
        (EngineLayout(), 1, {"tp_size": 1, **TRITON}),
        (EngineLayout(8), 1, {"tp_size": 8, **TRITON}),
        (EngineLayout(8, expert_parallel=True), 1, {"tp_size": 8, "ep_size": 8, **TRITON}),
        (EngineLayout(32, expert_parallel=True), 4, {"tp_size": 32, "ep_size": 32, "nnodes": 4, **TRITON}),
        (
            EngineLayout(dp=16, expert_parallel=True),
            2,
            {
                "tp_size": 16, "attn_dp_size": 16, "ep_size": 16, "nnodes": 2, "moe_dense_tp_size": 1,
                "enable_dp_lm_head": True, "moe_a2a_backend": "deepep", "moe_runner_backend": "deep_gemm",
            },
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, EngineLayout) else "",
)  # fmt: skip
def test_layout_arguments_on_gpus_describe_the_layout(
    layout: EngineLayout, num_hosts: int, expected: dict[str, Any]
) -> None:
    assert layout_arguments(layout, num_hosts, cuda=True) == expected


def test_layout_arguments_on_cpu_keep_defaults_of_sglang() -> None:
    assert layout_arguments(EngineLayout(2), 2, cuda=False) == {"tp_size": 2}
    assert layout_arguments(EngineLayout(2, expert_parallel=True), cuda=False) == {"tp_size": 2, "ep_size": 2}


def test_layout_arguments_attention_dp_on_cpu_uses_no_deepep() -> None:
    arguments = layout_arguments(EngineLayout(dp=2, expert_parallel=True), cuda=False)
    assert arguments == {
        "tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "moe_dense_tp_size": 1, "enable_dp_lm_head": True
    }  # fmt: skip
