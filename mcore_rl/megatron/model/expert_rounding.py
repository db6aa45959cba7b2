"""Quantisation-aware training of experts (actor.quantization_aware): forward passes use INT4 values of the weights.

    forward     y = q(W) x       q: round to INT4 codes and scales and back (weights/int4.py), as engines hold W
    backward    dL/dW = dL/dq(W)  straight through: rounding has gradient 1

Parameters, optimizer state and checkpoints keep unrounded weights under unchanged names. The rounded copies of a
layer's experts exist from its forward to its backward pass, in the dtype of the layers.

Source: Bengio et al., Estimating or propagating gradients through stochastic neurons (arXiv 1308.3432), section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.function import FunctionCtx

from mcore_rl.weights.int4 import rounded


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, weight: torch.Tensor, group: int) -> torch.Tensor:
        if weight.dim() == 2:
            return rounded(weight, group)
        values = torch.empty_like(weight)
        # Matrix by matrix, which bounds the memory of the float32 copies.
        for value, matrix in zip(values, weight, strict=True):
            value.copy_(rounded(matrix, group))
        return values

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def round_experts(layers: Iterable[torch.nn.Module], group: int) -> None:
    """Let the routed experts of a model's layers use INT4 values with one scale per `group` elements of a row.

    Experts are one module per expert, or one module for all with several weights or with stacked ones (transformers).
    Shared experts, and the experts of multi-token-prediction layers, which engines do not get in INT4, are unchanged.
    """
    for layer in layers:
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None:
            experts.rounding_group = group
            experts.__class__ = _rounding(type(experts))


def _rounding(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a subclass of a class of experts whose forward pass uses rounded weights."""

    def forward(self: torch.nn.Module, *args: torch.Tensor) -> object:
        _wait_for_weights(self)
        with _rounded_weights(self, self.rounding_group):
            return kind.forward(self, *args)

    return type(f"Rounding{kind.__name__}", (kind,), {"forward": forward})


def _wait_for_weights(experts: torch.nn.Module) -> None:
    """Wait until the weights of the last update are gathered (actor.overlap_param_gather).

    Megatron waits in hooks of the modules that have the weights, which run after the rounding, and then find no weight
    of their own.
    """
    for module in experts.modules():
        # The hooks of `experts` have run.
        for wait in module._forward_pre_hooks.values() if module is not experts else ():
            wait(module, ())


@contextmanager
def _rounded_weights(experts: torch.nn.Module, group: int) -> Iterator[None]:
    """Return a context in which rounded tensors take the places of the experts' weights."""
    places = [(module._parameters, name, parameter) for module in experts.modules()
              for name, parameter in module.named_parameters(recurse=False) if parameter.dim() >= 2]  # fmt: skip
    try:
        for parameters, name, parameter in places:
            parameters[name] = _StraightThrough.apply(parameter, group)
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter
