"""Supervised training on given targets (warm start).

    L = -logp

Shapes: any one shape for logp, mask and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, trained


@dataclass(frozen=True)
class SFT:
    """Takes no options and needs nothing but logp; its mean over tokens is the cross-entropy in nats."""

    needs: ClassVar[Needs] = Needs()

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        return PolicyLossResult(-trained(inputs.logp, inputs.mask > 0), {})
