"""Losses without a probability ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked


@dataclass(frozen=True)
class Reinforce:
    """REINFORCE: the plain policy gradient, without ratio or bound.

        L = -A logp

    No options, no metrics. The gradient is correct only for tokens sampled by the current policy: further updates on
    the same batch are off-policy and not corrected.

    Source: REINFORCE, R. J. Williams (1992), Machine Learning 8, theorem 1; for language models: arXiv 2402.14740,
    section 3.1.
    Shapes: any one shape for all inputs and the loss.
    """

    needs: ClassVar[Needs] = Needs(advantages=True)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        assert inputs.advantages is not None
        selected = inputs.mask > 0
        return PolicyLossResult(-masked(inputs.advantages, selected) * masked(inputs.logp, selected), {})


@dataclass(frozen=True)
class SFT:
    """Supervised fine-tuning on target tokens (warm start).

        L = -logp

    No options, needs only logp. The mean over tokens is the cross-entropy in nats.

    With trainer.objective=rl it is a warm start from one prompt and one target per row. trainer.objective=sft, which
    sets this loss, trains on conversations and has a validation loss (docs/supervised.md).

    Shapes: any one shape for logp, mask and the loss.
    """

    needs: ClassVar[Needs] = Needs()

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        return PolicyLossResult(-masked(inputs.logp, inputs.mask > 0), {})
