"""Losses of objectives on pairs, on the ranks: weighted sums of log-probabilities or of scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization (DPO) on pairs of a chosen response w and a rejected response l.

        r   = beta sum_t (log p_t - log p_ref,t)      reward of a response; length_normalized: / number of tokens
        h   = r_w - r_l - target_margin
        f(h) = -(1 - e) log sigmoid(h) - e log sigmoid(-h)                  loss sigmoid;  e = label_smoothing
               (-(1 - e) log sigmoid(h) + e log sigmoid(-h)) / (1 - 2 e)    robust
               (h / beta - 1 / (2 beta))^2                                  ipo
               max(0, 1 - h)                                                hinge
        DPO = f(h) - sft_weight mean_t log p_w,t
        L_t = -A log p_t                 A = minus the derivative of DPO with respect to the sum of log p of a response

    p is the trainer's probability now. A is a constant, computed before the update from the sums of both responses by
    the same policy, so the gradient of the sum of L over the tokens of a pair equals the gradient of DPO. The responses
    of a pair therefore need not be in the same micro-batch or on the same rank. actor/loss reports DPO, not L.
    preference.reference_free drops log p_ref; preference.length_normalized also divides A by the number of tokens.

    Selected by trainer.objective=dpo. Its keys are in section `preference`.

    Source: arXiv 2305.18290, equation 7 and the gradient in section 4; length normalization with a reference arXiv
    2411.15124, equation 6; without one, and target_margin, arXiv 2405.14734 (SimPO), equation 6; label_smoothing E.
    Mitchell, "A note on DPO with noisy preferences" (2023), equation 3; robust arXiv 2403.00409; ipo arXiv 2310.12036,
    equation 17, whose length-normalized form is TRL's; hinge arXiv 2305.10425 (SLiC-HF), on DPO's rewards as in arXiv
    2309.06657 (RSO); sft_weight arXiv 2404.19733, equation 1, which has the weight at the other term.
    Shapes: any one shape for all inputs and the loss.
    """

    needs: ClassVar[Needs] = Needs(pairs=True)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        return _weighted(inputs, "dpo")


@dataclass(frozen=True)
class BradleyTerry:
    """Training of a reward model on pairs of a chosen response w and a rejected response l.

        BT = -log sigmoid(s_w - s_l - m) + c (s_w + s_l)^2        c = preference.center_rewards_coefficient
        L  = -A s          A = minus the derivative of BT with respect to the score of a response

    s is the score of a response: the output of the value head at its last token. m is the row's margin, 0 without the
    column `margin`. A is a constant, computed before the update from the scores of both responses by the same model, so
    the gradient of L over both responses equals the gradient of BT, as for dpo. actor/loss reports BT, not L.

    Selected by trainer.objective=reward_model.

    Source: arXiv 2203.02155 (InstructGPT), equation 1, with pairs instead of rankings; margin arXiv 2307.09288 (Llama
    2), equation 2; c arXiv 2312.09244, equation 2.
    Shapes: any one shape for all inputs and the loss; logp has the scores.
    """

    needs: ClassVar[Needs] = Needs(pairs=True, scores=True)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        return _weighted(inputs, "reward_model")


def _weighted(inputs: PolicyLossInputs, name: str) -> PolicyLossResult:
    if inputs.advantages is None:
        raise ValueError(f"{name} needs advantages: the weights of the pairs")
    selected = inputs.mask > 0
    return PolicyLossResult(-masked(inputs.advantages, selected) * masked(inputs.logp, selected), {})
