"""Estimators that compute an advantage per token, on the ranks, from discounted sums over the trained tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_rl.algorithms.interface import AdvantageInputs, AdvantageResult, Needs, check_fraction


@dataclass(frozen=True)
class GAE:
    """Generalized advantage estimation (GAE).

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}            both 0 after the last trained token of a response
        returns = A + V                                  the TD(lambda) target of the critic

    t counts trained tokens only. Other tokens (tool output) are not actions: their values are not read, they add no
    discount, and a reward on them is added to the preceding trained token. Rewards before the first trained token
    change no advantage. With whiten, advantages (not returns) get mean 0 and standard deviation 1 over the batch.

    Computed in float64 on the host for inputs of any device: a sequential recurrence of T steps is slow on a GPU.

    Source: arXiv 1506.02438, equation 16 (A) and the corresponding TD(lambda) return; whitening.py.
    Shapes: token_rewards, mask, values [B, T] -> [B, T].
    Raises: ConfigError for gamma or lam out of range.
    """

    needs: ClassVar[Needs] = Needs(values=True)
    per_response: ClassVar[bool] = False

    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True

    def __post_init__(self) -> None:
        check_fraction("algorithm.gamma", self.gamma)
        check_fraction("algorithm.lam", self.lam)

    @property
    def whitened(self) -> bool:
        return self.whiten

    @torch.no_grad()
    def raw(self, inputs: AdvantageInputs) -> AdvantageResult:
        # Inside the function: numba is slow to import.
        from mcore_rl.algorithms.kernels import discounted_errors

        assert inputs.values is not None
        decay = self.gamma * self.lam
        advantages, returns = discounted_errors(inputs.token_rewards, inputs.values, inputs.mask, self.gamma, decay)
        return AdvantageResult(advantages, returns)


@dataclass(frozen=True)
class ReinforcePlusPlus:
    """REINFORCE++: discounted returns, whitened over all trained tokens of the batch.

        G_t = sum_{s >= t} gamma^{s-t} r_s,    A_t = (G_t - mean(G)) / std(G)        returns = G

    t counts trained tokens only; a reward on another token is added to the preceding trained token, as in gae.

    Source: REINFORCE++, arXiv 2501.03262, the advantage and its global normalisation.
    Shapes: token_rewards, mask [B, T] -> [B, T].
    Raises: ConfigError for gamma out of range.
    """

    needs: ClassVar[Needs] = Needs()
    per_response: ClassVar[bool] = False
    whitened: ClassVar[bool] = True

    gamma: float = 1.0

    def __post_init__(self) -> None:
        check_fraction("algorithm.gamma", self.gamma)

    @torch.no_grad()
    def raw(self, inputs: AdvantageInputs) -> AdvantageResult:
        # Inside the function: numba is slow to import.
        from mcore_rl.algorithms.kernels import discounted_sums

        returns = discounted_sums(inputs.token_rewards, inputs.mask, self.gamma)
        return AdvantageResult(returns, returns)
