"""Workarounds for SGLang 0.5.23 on CPU, with the CPU build of torch (runs in SGLang's environment).

SGLang's wheel imports two packages that are built for CUDA: sgl_kernel, of which it needs a few names, and torchvision,
whose operators it only references. Call `prepare` before importing sglang, and `patch` after.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, MutableSequence
from types import ModuleType
from typing import Any

import torch

ExpertForward = Callable[[Any, torch.Tensor, Any, object], torch.Tensor]
"""Experts of a layer. Arguments: the layer, tokens [N, H], the chosen experts, and their configuration."""
_declared: list[torch.library.Library] = []
"""Keeps the libraries alive: a declaration is removed with its library."""


def prepare() -> None:
    """Provide stand-ins for sgl_kernel and the operators of torchvision, unless they are installed."""
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = _Kernels("sgl_kernel")
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)


def patch() -> None:
    """Replace functions of SGLang that need CUDA or are wrong on CPU."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.models import minimax_m2
    from sglang.srt.models.deepseek_common import attention_backend_handler

    common._cuda_host_register = lambda *_, **__: None  # no CUDA: the cache of experts stays pageable
    fused_moe_native.moe_forward_native = _with_own_experts(fused_moe_native.moe_forward_native)
    minimax_m2.MiniMaxM2QKRMSNorm._forward_naive = _norms_over_heads  # its kernels need CUDA
    # torch_native cannot compute a prefill from keys and values that are expanded from latents.
    absorbed = attention_backend_handler.AttnForwardMethod.MLA
    attention_backend_handler.AttentionBackendRegistry.register("torch_native", lambda *_: absorbed)
    # Attention data parallelism pads batches with requests of this length. One: attention over no token is NaN.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    # The default needs NCCL; this is SGLang's own variant with an all-reduce.
    GroupCoordinator.reduce_scatterv = GroupCoordinator._deterministic_reduce_scatterv


def _with_own_experts(forward: ExpertForward) -> ExpertForward:
    """Return `forward` for ranks that have a part of the experts. SGLang uses -1, its number for an expert of another
    rank, as an index."""

    def forward_own(layer: Any, x: torch.Tensor, topk_output: Any, config: object) -> torch.Tensor:
        if layer.moe_ep_size == 1:
            return forward(layer, x, topk_output, config)
        weights, ids = topk_output.topk_weights, topk_output.topk_ids
        rows, choices = (ids >= 0).nonzero(as_tuple=True)
        output = torch.zeros_like(x)
        if len(rows):  # one row for each token and expert of this rank
            own = topk_output._replace(topk_weights=weights[rows, choices, None], topk_ids=ids[rows, choices, None])
            output.index_add_(0, rows, forward(layer, x[rows], own, config))
        return output

    return forward_own


def _norms_over_heads(norms: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute MiniMax-M2's norms of queries and keys, whose means of squares run over the heads of all ranks.

    Shapes: q [N, heads of this rank * head size], k likewise. Collective: the ranks that divide attention.
    """
    from sglang.srt.models.minimax_m2 import attn_tp_all_reduce

    means = torch.stack([each.float().square().mean(-1, keepdim=True) for each in (q, k)])
    if norms._world_size > 1:
        means = attn_tp_all_reduce(means) / norms._world_size
    scaled_q, scaled_k = (
        (each.float() * (mean + norms._eps).rsqrt() * norm.weight).to(each.dtype)
        for each, mean, norm in zip((q, k), means, (norms._q_norm, norms._k_norm), strict=True)
    )
    return scaled_q, scaled_k


class _Kernels(ModuleType):
    """Stand-in for sgl_kernel. It lacks convert_weight_packed, so SGLang does not use AMX kernels."""

    __version__ = "0"
    __path__: MutableSequence[str] = []  # noqa: RUF012  (an attribute of every package)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.endswith("_cpu"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> None:
            raise NotImplementedError(f"SGLang's kernel {name} is not available on this CPU")

        return missing

    @staticmethod
    def assign_req_to_token_pool_cpu(
        rows: torch.Tensor,
        table: torch.Tensor,
        starts: torch.Tensor,
        ends: torch.Tensor,
        slots: torch.Tensor,
        *_: object,
    ) -> None:
        """Write table[rows[i], starts[i]:ends[i]] for every request i; `slots` has their values concatenated."""
        lengths = (ends - starts).tolist()
        places = zip(rows.tolist(), starts.tolist(), slots.split([*lengths, len(slots) - sum(lengths)]), strict=False)
        for row, start, of_row in places:
            table[row, start : start + len(of_row)] = of_row.to(table.dtype)
