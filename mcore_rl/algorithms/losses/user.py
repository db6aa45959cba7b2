"""User-defined policy loss: algorithm.policy_loss.name=module_or_file.py:function.

    f(logp=, old_logp=, advantages=, mask=, rollout_logp=, **options) -> loss or (loss, {metric: mean over tokens})

The options are the set keys of algorithm.policy_loss and algorithm.policy_loss.kwargs. Only logp carries gradient, all
tensors are 0 where mask is 0, and unavailable tensors are None. The attribute f.needs declares required inputs, for
example f.needs = Needs(rollout_logp=True). The default is advantages and old_logp, with tokens in any shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked
from mcore_rl.config.functions import check_call, load_function
from mcore_rl.errors import ConfigError
from mcore_rl.types import Mean, Metric

KEY = "algorithm.policy_loss.name"
ARGUMENTS = ("logp", "old_logp", "advantages", "mask", "rollout_logp")


@dataclass(frozen=True)
class UserLoss:
    """A user-defined policy loss. name: key=value. Calls raise ConfigError for a result of the wrong type or shape."""

    name: str
    function: Callable[..., object]
    options: dict[str, object]
    needs: Needs

    def __reduce__(self) -> tuple[Callable[..., UserLoss], tuple[str, dict[str, object]]]:
        # Pickle the name instead of the function: other processes cannot import the module of a user's file.
        return UserLoss.load, (self.name.removeprefix(f"{KEY}="), self.options)

    @classmethod
    def load(cls, spec: str, options: dict[str, object]) -> UserLoss:
        """Load the function `spec`. Raises: ConfigError if it does not exist, does not take ARGUMENTS and `options`, or
        needs other inputs."""
        name, function = f"{KEY}={spec}", load_function(KEY, spec, instead="a loss's name")
        check_call(name, function, ARGUMENTS, options, f"f({', '.join(f'{given}=' for given in ARGUMENTS)}, **options)")
        needs = getattr(function, "needs", Needs(advantages=True, old_logp=True))
        if not isinstance(needs, Needs):
            raise ConfigError(f"{name}: its attribute needs must be a mcore_rl.algorithms.Needs, not {needs!r}")
        more = [fact for fact, needed in vars(needs).items() if needed and fact not in {*ARGUMENTS, "whole_sequence"}]
        if more:
            raise ConfigError(f"{name} needs {', '.join(more)}, which is not available to user-defined losses")
        return cls(name, function, options, needs)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected = inputs.mask > 0
        tensors = {name: getattr(inputs, name) for name in ARGUMENTS}
        given = {name: None if tensor is None else masked(tensor, selected) for name, tensor in tensors.items()}
        result = self.function(**given, **self.options)
        pair = result if isinstance(result, tuple) else (result, {})
        if len(pair) != 2:
            raise ConfigError(f"{self.name} returned {len(pair)} values instead of a loss or (loss, metrics)")
        loss, means = pair
        if not isinstance(loss, Tensor) or loss.shape != inputs.logp.shape:
            got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"{self.name} returned {got}; the loss must be a tensor shaped as logp, {list(inputs.logp.shape)}"
            )
        # The function may return any value for tokens that are not trained.
        return PolicyLossResult(masked(loss, selected), self._metrics(means, selected))

    @torch.no_grad()
    def _metrics(self, means: object, selected: Tensor) -> dict[str, Metric]:
        if not isinstance(means, Mapping):
            raise ConfigError(f"{self.name} returned metrics as {type(means).__name__}; they must be a dict of floats")
        if not means:
            return {}
        values = [torch.as_tensor(mean, dtype=torch.float64, device=selected.device) for mean in means.values()]
        # One device-to-host transfer instead of one per number.
        *numbers, count = torch.stack([*values, selected.count_nonzero().double()]).tolist()
        return {str(name): Mean(number * count, count) for name, number in zip(means, numbers, strict=True)}
