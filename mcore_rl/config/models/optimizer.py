"""Optimizer of a trained model, and its loss scale."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.fields import setting

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126
"""Range of the loss scale. Float32 holds these powers of two and their reciprocals without loss of bits."""


@dataclass
class LossScaleConfig:
    """Loss scaling with model.dtype=float16: the loss is multiplied by a power of two, by which gradients are divided
    before the optimizer's step. An update whose gradients overflow is skipped."""

    initial: float = setting(2.0**32, minimum=SMALLEST_SCALE, maximum=LARGEST_SCALE)
    """Scale of the first update; 2^-126 to 2^126."""
    minimum: float = setting(1.0, minimum=SMALLEST_SCALE, maximum=LARGEST_SCALE)
    """Smallest scale. The run ends when an overflow would lower the scale further."""
    window: int = setting(1000, minimum=1, unit="updates")
    """Updates in a row without an overflow after which the scale doubles, up to 2^126."""
    hysteresis: int = setting(2, minimum=1, unit="updates")
    """Number of overflows from which on each one halves the scale; counted anew when the scale doubles."""


@dataclass
class OptimizerSettings:
    lr: float = setting(1e-6, minimum=0)
    """Learning rate of Adam after the warm-up."""
    min_lr: float = setting(0.0, minimum=0)
    """Final learning rate of the linear and cosine schedules."""
    weight_decay: float = setting(0.1, minimum=0)
    """Decoupled weight decay (AdamW)."""
    beta1: float = setting(0.9, minimum=0, below=1)
    """Decay rate of Adam's first moment."""
    beta2: float = setting(0.999, minimum=0, below=1)
    """Decay rate of Adam's second moment."""
    eps: float = setting(1e-8, above=0)
    """Constant that Adam adds to the root of the second moment."""
    clip_grad: float = setting(1.0, above=0)
    """Maximum gradient norm; larger gradients are scaled down to it."""
    warmup_steps: int = setting(0, minimum=0, unit="updates")
    """Optimizer updates of linear warm-up from 0."""
    schedule: str = setting("constant", choices=("constant", "linear", "cosine"))
    """Learning rate after the warm-up; linear and cosine decay to min_lr over decay_steps."""
    decay_steps: int | None = setting(None, minimum=1, unit="updates")
    """Optimizer updates of the decay; null: all updates of the run."""
    cpu_offload: bool = False
    """Keep Adam's moments and float32 weights in host memory and move them to the GPU in pieces. Each update moves 24
    bytes per parameter over the bus; the GPU holds 6 bytes per bfloat16 parameter. Needs actor.distributed_optimizer.
    """
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
