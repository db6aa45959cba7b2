"""The plain policy gradient, with no ratio and no bound.

    L = -A logp

Source: REINFORCE, R. J. Williams (1992), Machine Learning 8, theorem 1; for language models: arXiv 2402.14740,
section 3.1.
Shapes: any one shape for all inputs and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, trained


@dataclass(frozen=True)
class Reinforce:
    """Takes no options and reports no metrics of its own. It is the gradient of the expected return only while the
    tokens are the policy's own: more than one update per batch is off-policy without a correction."""

    needs: ClassVar[Needs] = Needs(advantages=True)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        assert inputs.advantages is not None
        selected = inputs.mask > 0
        return PolicyLossResult(-trained(inputs.advantages, selected) * trained(inputs.logp, selected), {})
