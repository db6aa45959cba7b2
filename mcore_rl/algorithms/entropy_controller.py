"""Controller of the coefficient of the entropy bonus, which keeps the entropy of the policy near a target.

    after a step with mean entropy e:   c <- c + step if e < target, else c - step;   then clipped to minimum .. maximum
    bonus of the next step:             c if e <= target, else 0

The bonus of the first step is algorithm.entropy_coefficient, since no entropy is known yet.

Source: Skywork-OR1, arXiv 2505.22312 (adaptive entropy control). In the paper, a step's bonus depends on the entropy of
the same step; here it depends on the step before, as in the authors' code, so that no additional pass is needed. The
authors' code has the bounds, too. The authors' scripts have target 0.2, step 0.0001, initial value 0 and maximum 0.005.
Their code estimates the entropy by the mean of -log p over the sampled tokens; here it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.errors import NonFiniteError
from mcore_rl.types.json import JsonObject


@dataclass
class EntropyController:
    """Current entropy coefficient. target: nats per trained token. is_active: the next step has the entropy bonus."""

    coefficient: float
    target: float
    step: float
    minimum: float
    maximum: float
    is_active: bool = True

    @classmethod
    def from_config(cls, algorithm: AlgorithmConfig) -> EntropyController | None:
        """Build the controller; None if the coefficient is fixed."""
        control = algorithm.entropy_control
        if control.target is None:
            return None
        return cls(algorithm.entropy_coefficient, control.target, control.step, control.minimum, control.maximum)

    @property
    def bonus(self) -> float:
        """Coefficient of the next step's entropy bonus."""
        return self.coefficient if self.is_active else 0.0

    def update(self, entropy: float) -> None:
        """Adapt the coefficient after a step with mean entropy `entropy` (nats per token).

        Raises: NonFiniteError if `entropy` is NaN.
        """
        if entropy != entropy:
            raise NonFiniteError("the mean entropy of the step is NaN: the entropy coefficient cannot be updated")
        change = self.step if entropy < self.target else -self.step
        self.coefficient = min(max(self.coefficient + change, self.minimum), self.maximum)
        self.is_active = entropy <= self.target

    def state_dict(self) -> JsonObject:
        return {"coefficient": self.coefficient, "is_active": self.is_active}

    def load_state_dict(self, state: JsonObject) -> None:
        coefficient, is_active = state["coefficient"], state["is_active"]
        assert isinstance(coefficient, int | float)
        self.coefficient, self.is_active = float(coefficient), bool(is_active)
