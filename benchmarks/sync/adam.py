"""A real Adam on random weights, as a stand-in for training: few bfloat16 weights change in an update."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.sizes import size

STD = 0.02
CONSTANT = 0.3
"""Ratio of the gradient's constant part to its noise."""
WARM_UP = size(30, 2)
"""Updates before the first sync, after which Adam's moments no longer depend on the start."""


class Adam:
    """Float32 masters of tensors, with gradients of a constant part and noise."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], lr: float) -> None:
        self._tensors = tensors
        self._generator = torch.Generator().manual_seed(1)
        self._masters = {name: torch.nn.Parameter(tensor.float() * STD) for name, tensor in tensors.items()}
        self._constant = {name: CONSTANT * self._noise(tensor) for name, tensor in tensors.items()}
        self._optimizer = torch.optim.Adam(self._masters.values(), lr=lr, betas=(0.9, 0.98))
        self.update(WARM_UP)

    def update(self, num_updates: int) -> None:
        """Update the masters, and copy them to the tensors."""
        for _ in range(num_updates):
            for name, master in self._masters.items():
                master.grad = self._constant[name] + self._noise(master)
            self._optimizer.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                self._tensors[name].copy_(master)

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self._generator)
