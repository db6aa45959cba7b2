"""Loss of a preference objective on the ranks: a weighted sum of log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization (DPO) on pairs of a chosen response w and a rejected response l.

        r   = beta sum_t (log p_t - log p_ref,t)      reward of a response; length_normalized: / number of tokens
        h   = r_w - r_l - target_margin
        DPO = -(1 - e) log sigmoid(h) - e log sigmoid(-h)            e = preference.label_smoothing
        L_t = -A log p_t                               A_w = -A_l = beta ((1 - e) sigmoid(-h) - e sigmoid(h))

    p is the trainer's probability now. A is a constant, computed before the update from the sums of both responses by
    the same policy, so the gradient of the sum of L over the tokens of a pair equals the gradient of DPO. The responses
    of a pair therefore need not be in the same micro-batch or on the same rank. actor/loss reports DPO, not L.
    preference.reference_free drops log p_ref; preference.length_normalized also divides A by the number of tokens.

    Selected by trainer.objective=dpo. Its keys are in section `preference`.

    Source: arXiv 2305.18290, equation 7 and the gradient in section 4; length normalization with a reference arXiv
    2411.15124, equation 6; without one, and target_margin, arXiv 2405.14734 (SimPO), equation 6; label_smoothing E.
    Mitchell, "A note on DPO with noisy preferences" (2023), equation 3.
    Shapes: any one shape for all inputs and the loss.
    """

    needs: ClassVar[Needs] = Needs(pairs=True)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        if inputs.advantages is None:
            raise ValueError("dpo needs advantages: the weights of the pairs")
        selected = inputs.mask > 0
        return PolicyLossResult(-masked(inputs.advantages, selected) * masked(inputs.logp, selected), {})
