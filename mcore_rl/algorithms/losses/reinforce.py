"""REINFORCE: the plain policy gradient, without ratio or bound.

    L = -A logp

Source: REINFORCE, R. J. Williams (1992), Machine Learning 8, theorem 1; for language models: arXiv 2402.14740,
section 3.1.
Shapes: any one shape for all inputs and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked


@dataclass(frozen=True)
class Reinforce:
    """REINFORCE loss; no options, no metrics. Its gradient is correct only for tokens sampled by the current policy:
    further updates on the same batch are off-policy and not corrected."""

    needs: ClassVar[Needs] = Needs(advantages=True)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        assert inputs.advantages is not None
        selected = inputs.mask > 0
        return PolicyLossResult(-masked(inputs.advantages, selected) * masked(inputs.logp, selected), {})
