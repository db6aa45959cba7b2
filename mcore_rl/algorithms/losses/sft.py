"""Supervised fine-tuning on target tokens (warm start).

    L = -logp

Shapes: any one shape for logp, mask and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked


@dataclass(frozen=True)
class SFT:
    """Supervised loss; no options, needs only logp. Its mean over tokens is the cross-entropy in nats."""

    needs: ClassVar[Needs] = Needs()

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        return PolicyLossResult(-masked(inputs.logp, inputs.mask > 0), {})
