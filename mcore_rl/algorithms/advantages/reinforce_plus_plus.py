"""REINFORCE++: discounted returns, whitened over all trained tokens of the batch.

    G_t = sum_{s >= t} gamma^{s-t} r_s,    A_t = (G_t - mean(G)) / std(G)        returns = G

t counts trained tokens only; a reward on another token is added to the preceding trained token, as in gae.

Source: REINFORCE++, arXiv 2501.03262, the advantage and its global normalisation.
Shapes: token_rewards, mask [B, T] -> [B, T].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_rl.algorithms.interface import AdvantageInputs, AdvantageResult, Needs, check_fraction


@dataclass(frozen=True)
class ReinforcePlusPlus:
    """Whitened discounted returns. Raises: ConfigError for gamma out of range."""

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
