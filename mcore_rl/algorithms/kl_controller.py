"""The coefficient of the KL in the reward over the steps of a run: fixed, or steered towards a target.

    error          = clip(kl / target - 1, -0.2, 0.2)
    coefficient   <- coefficient (1 + error n / horizon)        kl: mean of the step, n: its responses

Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv 1909.08593, section 2.2, where kl is
of whole responses and n / horizon is K = 0.1. Here kl is of a token: response lengths change in the course of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcore_rl.config.algorithm import KLConfig
from mcore_rl.errors import NonFiniteError

MAX_ERROR = 0.2


@dataclass
class KLController:
    """`target` (nats per token) None: the coefficient stays."""

    coefficient: float
    target: float | None = None
    horizon: int = 1

    @classmethod
    def from_config(cls, kl: KLConfig) -> KLController | None:
        """None without KL in the reward."""
        if not kl.in_reward:
            return None
        if kl.controller == "fixed":
            return cls(kl.in_reward)
        assert kl.horizon is not None
        return cls(kl.in_reward, kl.target, kl.horizon)

    def update(self, kl: float, responses: int) -> None:
        """After a step whose mean KL was `kl`.

        Raises: NonFiniteError.
        """
        if self.target is None:
            return
        if kl != kl:
            raise NonFiniteError("the KL of a step is not a number: its coefficient cannot follow it")
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        self.coefficient *= 1 + error * responses / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coefficient = float(state["coefficient"])
