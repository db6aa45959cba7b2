"""Controller of the coefficient of the KL term in the reward: fixed, or adapted towards a target KL.

    error          = clip(kl / target - 1, -0.2, 0.2)
    coefficient   <- coefficient (1 + error n / horizon)        kl: mean of the step, n: its responses

Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv 1909.08593, section 2.2. The paper
uses the KL per response and n / horizon = K = 0.1; here kl is per token, because response lengths change during a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.algorithm import KLConfig
from mcore_rl.errors import NonFiniteError
from mcore_rl.types.json import JsonObject

MAX_ERROR = 0.2


@dataclass
class KLController:
    """Current KL coefficient. target: nats per token; None keeps the coefficient fixed."""

    coefficient: float
    target: float | None = None
    horizon: int = 1

    @classmethod
    def from_config(cls, kl: KLConfig) -> KLController | None:
        """Build the controller; None if the reward has no KL term."""
        if not kl.in_reward:
            return None
        if kl.controller == "fixed":
            return cls(kl.in_reward)
        assert kl.horizon is not None
        return cls(kl.in_reward, kl.target, kl.horizon)

    def update(self, kl: float, responses: int) -> None:
        """Adapt the coefficient after a step with mean KL `kl` (nats per token).

        Raises: NonFiniteError if `kl` is NaN.
        """
        if self.target is None:
            return
        # Infinity is clipped below, but NaN would stay in the coefficient for the rest of the run.
        if kl != kl:
            raise NonFiniteError("the mean KL of the step is NaN: the KL coefficient cannot be updated")
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        self.coefficient *= 1 + error * responses / self.horizon

    def state_dict(self) -> JsonObject:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: JsonObject) -> None:
        coefficient = state["coefficient"]
        assert isinstance(coefficient, int | float)
        self.coefficient = float(coefficient)
