"""Dynamic loss scaling of float16 training, with Megatron's scaler.

The loss of every micro-batch is multiplied by a scale, so that small gradients of activations are not rounded to 0 in
float16. Megatron's optimizer divides the float32 gradients by the scale and looks for infinities and NaN on all ranks.
With one, it skips the step, and the scale may be halved. The scale is a power of two, so scaling rounds nothing.

megatron-core 0.16.1 gives every optimizer of a chain (dense and expert parameters) its own scaler, which sees the
gradients of that optimizer only, but scales the loss with the first one. After an overflow in the experts alone, their
gradients would be divided by another scale than they were multiplied by. Here all optimizers share one scaler, which
changes after all of them have looked at their gradients.

Source: megatron.core.optimizer.grad_scaler (0.16.1); Micikevicius et al., Mixed Precision Training (arXiv 1710.03740);
float16 for reinforcement learning: arXiv 2510.26788.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from mcore_rl.config.models import LARGEST_SCALE, LossScaleConfig
from mcore_rl.config.rules.precision import overflow_advice

GROWTH, BACKOFF = 2.0, 0.5


class LossScaleState(TypedDict):
    """State of a scaler in a checkpoint. growth_tracker: updates since the last overflow or growth. hysteresis_tracker:
    overflows until the scale is halved."""

    scale: float
    growth_tracker: int
    hysteresis_tracker: int


class LossScaler(DynamicGradScaler):
    """Megatron's scaler, shared by all optimizers of a rank; equal on all ranks, because Megatron reduces overflows
    over them. `key` is the configuration key of its settings, for messages."""

    def __init__(self, settings: LossScaleConfig, key: str) -> None:
        super().__init__(
            initial_scale=settings.initial,
            min_scale=settings.minimum,
            growth_factor=GROWTH,
            backoff_factor=BACKOFF,
            growth_interval=settings.window,
            hysteresis=settings.hysteresis,
        )
        self.settings, self.key = settings, key
        self._overflowed = False

    def update(self, found_inf: bool) -> None:
        """Note an overflow in the gradients of one optimizer. Every optimizer calls it before the step."""
        self._overflowed |= found_inf

    def finish_update(self) -> None:
        """Change the scale after the step of all optimizers."""
        super().update(self._overflowed)
        # Gradients that are exactly 0 never overflow, and an infinite scale would never be lowered again.
        self._scale.clamp_(max=LARGEST_SCALE)
        self._overflowed = False

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale; Megatron's schedules call it as config.grad_scale_func."""
        return loss * self.scale.to(loss.device)

    @property
    def value(self) -> float:
        """The current scale."""
        return float(self.scale)

    @property
    def is_exhausted(self) -> bool:
        """True if the next overflow would lower the scale below its minimum."""
        return self.value <= self.settings.minimum and self._hysteresis_tracker <= 1

    @property
    def gradient_remedy(self) -> str:
        """Advice for the error that ends a float16 run because gradients overflow although the scale is exhausted."""
        return f"{overflow_advice('model.dtype')}, or lower {self.key}.minimum={self.settings.minimum:g}"

    def state(self) -> LossScaleState:
        """Return the state for a checkpoint."""
        return {
            "scale": self.value,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load(self, state: LossScaleState) -> None:
        """Restore a saved state, within the limits of the present settings, which may differ from the saved run's."""
        self._scale.fill_(state["scale"]).clamp_(min=self.settings.minimum, max=LARGEST_SCALE)
        # Megatron compares the tracker with the interval by ==: a larger number would never let the scale grow.
        self._growth_tracker = min(state["growth_tracker"], self.growth_interval - 1)
        self._hysteresis_tracker = min(state["hysteresis_tracker"], self.hysteresis)


def share_scaler(optimizer: MegatronOptimizer, scaler: LossScaler) -> None:
    """Give `scaler` to all optimizers of a chain, including optimizers without parameters on this rank, which take part
    in the reduction of overflows."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.grad_scaler = scaler
