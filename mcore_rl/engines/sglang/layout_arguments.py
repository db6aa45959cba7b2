"""ServerArgs of SGLang 0.5.23 that place weights on an engine's ranks as its EngineLayout plans.

tests/contract/test_sglang_shard_maps.py compares the plan with the slices that SGLang's loaders keep.
"""

from __future__ import annotations

from mcore_rl.weights.slices.engine_layout import EngineLayout


def layout_arguments(layout: EngineLayout, num_hosts: int = 1, *, cuda: bool) -> dict[str, object]:
    """Return the arguments that all ranks share. SGLang numbers the ranks like EngineLayout, and its tp_size includes
    the ranks of attention data parallelism.

    layout: without pipeline stages; attention data parallelism requires expert_parallel.
    """
    assert layout.pp == 1
    assert layout.dp == 1 or layout.expert_parallel
    arguments: dict[str, object] = {"tp_size": layout.num_ranks}
    if layout.expert_parallel and layout.num_ranks > 1:
        arguments["ep_size"] = layout.num_ranks
    if layout.dp > 1:
        # The LM head and the MLPs of layers without experts are whole on every rank, like attention.
        arguments |= {"attn_dp_size": layout.dp, "moe_dense_tp_size": 1, "enable_dp_lm_head": True}
    if cuda and layout.dp > 1:
        # DeepEP requires deep_gemm with bfloat16. Without DeepEP, as on CPU, every rank gets the tokens of all ranks.
        arguments |= {"moe_a2a_backend": "deepep", "moe_runner_backend": "deep_gemm"}
    elif cuda:
        # With `auto`, kernels for Blackwell keep experts in blocks, which weights.verify_every cannot read.
        arguments["moe_runner_backend"] = "triton"
    if cuda and num_hosts > 1:
        # Otherwise SGLang selects all-reduces and all-gathers that work within a host only.
        arguments["nnodes"] = num_hosts
    return arguments
