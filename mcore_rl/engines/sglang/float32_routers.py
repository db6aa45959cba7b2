"""Routers of SGLang 0.5.23 in float32 (model.float32_router; runs in SGLang's environment)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.model_executor.model_runner import ModelRunner

from mcore_rl.engines.router_logits import router_logits


def install() -> None:
    """Replace the routers of models that are loaded from now on, before SGLang captures CUDA graphs of them."""
    upstream = ModelRunner.load_model

    def load_model(runner: ModelRunner) -> None:
        upstream(runner)
        replace_routers(runner.model)

    ModelRunner.load_model = load_model


def replace_routers(model: torch.nn.Module) -> None:
    """Replace the products of all routers of a model.

    Raises: RuntimeError for a model without routers that can be replaced.
    """
    routers = list(_routers(model))
    if not routers:
        raise RuntimeError(f"{type(model).__name__} has no router that model.float32_router can replace")
    for router in routers:
        router.forward = _forward(router)


def _routers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the routers: the modules `gate` of the layers that also choose experts."""
    for layer in model.modules():
        if isinstance(getattr(layer, "topk", None), TopK):
            yield layer.gate


def _forward(router: torch.nn.Module) -> Callable[..., object]:
    """Return the method that replaces the router's `forward`, with the same form of results."""

    def forward(hidden: torch.Tensor, *_: object, **__: object) -> object:
        # Further arguments of DeepSeek's router are memory and a batch, which its own kernels use.
        logits = router_logits(hidden, router.weight)
        return (logits, None) if isinstance(router, ReplicatedLinear) else logits

    return forward
