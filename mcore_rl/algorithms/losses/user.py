"""A user's own loss: `algorithm.policy_loss.name=module_or_file.py:function`, called as

    f(logp=, old_logp=, advantages=, mask=, rollout_logp=, **options) -> loss, or (loss, {name: mean over tokens})

with the options that algorithm.policy_loss sets. `f.needs = Needs(...)` says what it must be given; without it that is
advantages and old_logp, and tokens in any shape. Only logp carries gradient; what lies outside the mask is 0.
Shapes: all tensors and the loss as logp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, trained
from mcore_rl.algorithms.losses.surrogate import SECTION
from mcore_rl.algorithms.user_functions import check_call, load_function
from mcore_rl.errors import ConfigError
from mcore_rl.types import Mean, Metric

TENSORS = ("logp", "old_logp", "advantages", "mask", "rollout_logp")
KEY = f"{SECTION}.name"


@dataclass(frozen=True)
class UserLoss:
    """Raises: ConfigError for a function that does not take the tensors and options, or that needs what it cannot be
    given."""

    spec: str
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, spec: str, options: Mapping[str, Any]) -> UserLoss:
        return cls(spec, load_function(spec, KEY), options)

    def __post_init__(self) -> None:
        check_call(self.function, self.spec, KEY, {**dict.fromkeys(TENSORS), **self.options})
        if not isinstance(self.needs, Needs):
            raise ConfigError(f"{KEY}={self.spec}: its needs must be a Needs, not {type(self.needs).__name__}")
        possible = {"whole_sequence", *TENSORS}
        lacking = [name for name, needed in vars(self.needs).items() if needed and name not in possible]
        if lacking:
            raise ConfigError(f"{KEY}={self.spec}: a function is not given {', '.join(lacking)}")

    @property
    def needs(self) -> Needs:
        needs: Needs = getattr(self.function, "needs", Needs(advantages=True, old_logp=True))
        return needs

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected = inputs.mask > 0
        given = {name: getattr(inputs, name) for name in TENSORS}
        given = {name: None if tensor is None else trained(tensor, selected) for name, tensor in given.items()}
        result = self.function(**given, **self.options)
        loss, means = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(loss, Tensor) or loss.shape != inputs.logp.shape:
            got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"{self.spec} must return a loss of the shape of logp, {list(inputs.logp.shape)}, not {got}"
            )
        return PolicyLossResult(trained(loss, selected), self._metrics(means, selected))

    def _metrics(self, means: Any, selected: Tensor) -> dict[str, Metric]:
        if not isinstance(means, Mapping):
            raise ValueError(f"{self.spec} must return its metrics as a dict of floats, not {type(means).__name__}")
        if not means:
            return {}
        values = [
            torch.as_tensor(value, dtype=torch.float64, device=selected.device).detach() for value in means.values()
        ]
        *numbers, count = torch.stack([*values, selected.count_nonzero().double()]).tolist()
        return {str(name): Mean(number * count, count) for name, number in zip(means, numbers, strict=True)}
