"""The view of torch that megatron.core modules get: torch itself, with a few names replaced.

Only modules under megatron.core see it. Replacing the names in torch itself would reach torch._dynamo, Ray and
transformers, and `torch.manual_seed` calls `torch.cuda.manual_seed_all`, which would recurse.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed


class NamespaceProxy(ModuleType):
    """Answers with its own attributes first and with those of the real module otherwise."""

    cuda: ModuleType
    distributed: ModuleType

    def __init__(self, real: ModuleType) -> None:
        super().__init__(real.__name__)
        self.__dict__["real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)


TORCH = NamespaceProxy(torch)
CUDA = NamespaceProxy(torch.cuda)
DISTRIBUTED = NamespaceProxy(torch.distributed)
TORCH.cuda = CUDA
TORCH.distributed = DISTRIBUTED

_PROXIES = {id(proxy.__dict__["real"]): proxy for proxy in (TORCH, CUDA, DISTRIBUTED)}


def rebind(module: ModuleType) -> None:
    """Points every global of `module` that is torch, torch.cuda or torch.distributed to its proxy."""
    for name, value in list(vars(module).items()):
        proxy = _PROXIES.get(id(value))
        if proxy is not None:
            setattr(module, name, proxy)
