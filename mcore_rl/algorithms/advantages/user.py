"""An estimator that a user brings: algorithm.advantage=module_or_file.py:function.

    f(token_rewards=, mask=, group_ids=, values=, baseline_rewards=, **options) -> advantages or (advantages, returns)

with the options that algorithm (gamma, lam, whiten, normalize_by_std) and algorithm.advantage_kwargs set. Tensors are
shaped as in AdvantageInputs and those that nothing provides are None. What the function needs beside rewards and mask
it says in an attribute, f.needs = Needs(values=True); without one it gets group_ids. It is called per token, with all
that the batch holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import AdvantageInputs, AdvantageResult, Needs, trained
from mcore_rl.config.functions import check_call, load_function
from mcore_rl.errors import ConfigError

KEY = "algorithm.advantage"
GIVEN = ("token_rewards", "mask", "group_ids", "values", "baseline_rewards")


@dataclass(frozen=True)
class UserEstimator:
    """Raises: ConfigError, when called, for a result that is not what `name` (key=value) must return."""

    per_response: ClassVar[bool] = False
    whitened: ClassVar[bool] = False

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]
    needs: Needs

    @classmethod
    def load(cls, spec: str, options: dict[str, Any]) -> UserEstimator:
        """Raises: ConfigError where `spec` names no function that takes GIVEN and `options`."""
        name, function = f"{KEY}={spec}", load_function(KEY, spec, instead="an estimator's name")
        check_call(name, function, GIVEN, options, f"f({', '.join(f'{given}=' for given in GIVEN)}, **options)")
        needs = getattr(function, "needs", Needs(group_ids=True))
        if not isinstance(needs, Needs):
            raise ConfigError(f"{name}: its attribute needs must be a mcore_rl.algorithms.Needs, not {needs!r}")
        return cls(name, function, options, needs)

    @torch.no_grad()
    def raw(self, inputs: AdvantageInputs) -> AdvantageResult:
        result = self.function(**{name: getattr(inputs, name) for name in GIVEN}, **self.options)
        pair = result if isinstance(result, tuple) else (result, result)
        if len(pair) != 2:
            raise ConfigError(f"{self.name} returned {len(pair)} values instead of advantages or (advantages, returns)")
        advantages, returns = (self._checked(tensor, inputs) for tensor in pair)
        return AdvantageResult(advantages, returns)

    def __call__(self, inputs: AdvantageInputs) -> AdvantageResult:
        return self.raw(inputs)

    def _checked(self, tensor: object, inputs: AdvantageInputs) -> Tensor:
        like = inputs.token_rewards
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{self.name} returned {type(tensor).__name__} instead of a tensor {list(like.shape)}")
        if tensor.shape != like.shape or not tensor.is_floating_point():
            raise ConfigError(
                f"{self.name} returned {tensor.dtype} {list(tensor.shape)}; it must be floating point, shaped as "
                f"token_rewards, {list(like.shape)}"
            )
        return trained(tensor.to(like), inputs.mask > 0)
