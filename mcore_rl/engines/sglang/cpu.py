"""Workarounds for SGLang 0.5.23 on CPU, with the CPU build of torch (runs in SGLang's environment).

SGLang's wheel imports two packages that are built for CUDA: sgl_kernel, of which it needs a few names, and torchvision,
whose operators it only references. Call `prepare` before importing sglang, and `patch` after.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, MutableSequence
from types import ModuleType

import torch

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
    """Disable SGLang's pinning of host memory, which needs CUDA."""
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *_, **__: None  # no CUDA: the cache of experts stays pageable


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
