"""Proxy of torch for megatron.core modules: torch with a few names replaced.

Only modules of megatron.core use it. Replacing the names in torch itself would affect torch._dynamo, Ray and
transformers, and `torch.manual_seed`, which calls `torch.cuda.manual_seed_all`, would recurse.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed


class NamespaceProxy(ModuleType):
    """Module whose own attributes take precedence over the attributes of the real module."""

    cuda: ModuleType
    distributed: ModuleType

    def __init__(self, real: ModuleType) -> None:
        super().__init__(real.__name__)
        self.__dict__["real"] = real

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["real"], name)


TORCH = NamespaceProxy(torch)
CUDA = NamespaceProxy(torch.cuda)
DISTRIBUTED = NamespaceProxy(torch.distributed)
TORCH.cuda = CUDA
TORCH.distributed = DISTRIBUTED

_PROXIES = {id(proxy.__dict__["real"]): proxy for proxy in (TORCH, CUDA, DISTRIBUTED)}


def rebind(module: ModuleType) -> None:
    """Replace globals of `module` that are torch, torch.cuda or torch.distributed by their proxies."""
    for name, value in list(vars(module).items()):
        proxy = _PROXIES.get(id(value))
        if proxy is not None:
            setattr(module, name, proxy)
