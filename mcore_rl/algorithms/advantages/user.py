"""User-defined advantage estimator: algorithm.advantage=module_or_file.py:function.

    f(token_rewards=, mask=, group_ids=, values=, baseline_rewards=, **options) -> advantages

The options are the set keys among algorithm.{gamma,lam,whiten,normalize_by_std,std_level,leave_one_out,part_weights}
and algorithm.advantage_kwargs.
Unavailable tensors are None. The function computes one of two kinds of advantages:

    per response: called with all responses of a step, so groups are complete. token_rewards [B, 1] are the rewards of
        the responses, mask [B, 1] is 1, group_ids [B] are equal for responses to the same prompt. Returns [B] or
        [B, 1], used for every trained token of the response. An optional parameter `lengths` receives the number of
        trained tokens, [B].
    per token: called on each rank with some of the responses; groups are incomplete. token_rewards, mask and values
        are [B, T], group_ids is None. Returns [B, T], or (advantages, returns) to train a critic on other returns.

Attributes of the function select the kind; the default is per response:

    f.per_response = False                    per token, from rewards only
    f.needs = Needs(values=True)              per token, with the values of a critic
    f.needs = Needs(baseline_rewards=True)    per response, with the reward of the greedy response to the same prompt

Import Needs from mcore_rl.algorithms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import AdvantageInputs, AdvantageResult, Needs, masked
from mcore_rl.config.functions import check_call, load_function
from mcore_rl.errors import ConfigError

KEY = "algorithm.advantage"
ARGUMENTS = ("token_rewards", "mask", "group_ids", "values", "baseline_rewards")
LENGTHS = "lengths"
PER_RESPONSE_HINT = (
    ": it is called with one number per response; set its attribute per_response to False to call it with tokens"
)


@dataclass(frozen=True)
class UserEstimator:
    """A user-defined estimator. name: key=value. Calls raise ConfigError for a result of the wrong type or shape."""

    whitened: ClassVar[bool] = False

    name: str
    function: Callable[..., object]
    options: dict[str, object]
    needs: Needs
    per_response: bool
    takes_lengths: bool = False

    def __reduce__(self) -> tuple[Callable[..., UserEstimator], tuple[str, dict[str, object]]]:
        # Pickle the name instead of the function: other processes cannot import the module of a user's file.
        return UserEstimator.load, (self.name.removeprefix(f"{KEY}="), self.options)

    @classmethod
    def load(cls, spec: str, options: dict[str, object]) -> UserEstimator:
        """Load the function `spec`. Raises: ConfigError if it does not exist, does not take ARGUMENTS and `options`, or
        has contradictory attributes."""
        name, function = f"{KEY}={spec}", load_function(KEY, spec, instead="an estimator's name")
        needs, per_response = _declared(name, function)
        takes_lengths = per_response and _has_parameter(function, LENGTHS)
        given = (*ARGUMENTS, LENGTHS) if takes_lengths else ARGUMENTS
        check_call(name, function, given, options, f"f({', '.join(f'{own}=' for own in ARGUMENTS)}, **options)")
        return cls(name, function, options, needs, per_response, takes_lengths)

    @torch.no_grad()
    def raw(self, inputs: AdvantageInputs) -> AdvantageResult:
        given = _response_inputs(inputs) if self.per_response else inputs
        lengths = {LENGTHS: inputs.trained_tokens().long()} if self.takes_lengths else {}
        result = self.function(**{name: getattr(given, name) for name in ARGUMENTS}, **lengths, **self.options)
        pair = result if isinstance(result, tuple) else (result, result)
        if len(pair) != 2:
            raise ConfigError(f"{self.name} returned {len(pair)} values instead of advantages or (advantages, returns)")
        # masked() spreads the column of a function per response over the tokens.
        advantages, returns = (masked(self._checked(tensor, given), inputs.mask > 0) for tensor in pair)
        return AdvantageResult(advantages, returns)

    def _checked(self, tensor: object, given: AdvantageInputs) -> Tensor:
        like = given.token_rewards
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{self.name} returned {type(tensor).__name__} instead of a tensor {list(like.shape)}")
        column = tensor[:, None] if self.per_response and tensor.shape == like.shape[:1] else tensor
        if column.shape != like.shape or not column.is_floating_point():
            raise ConfigError(
                f"{self.name} returned {tensor.dtype} {list(tensor.shape)}; it must be floating point, shaped as "
                f"token_rewards, {list(like.shape)}{PER_RESPONSE_HINT if self.per_response else ''}"
            )
        return column.to(like)


def _response_inputs(inputs: AdvantageInputs) -> AdvantageInputs:
    """Reduce token inputs to the driver's [B, 1] form. Rewards on tokens that are not trained are included."""
    rewards = inputs.token_rewards.sum(-1, keepdim=True)
    return replace(inputs, token_rewards=rewards, mask=torch.ones_like(rewards), values=None)


def _declared(name: str, function: Callable[..., object]) -> tuple[Needs, bool]:
    """Read the function's attributes `needs` and `per_response`. Raises: ConfigError if they are contradictory."""
    per_response, needs = getattr(function, "per_response", None), getattr(function, "needs", None)
    if per_response not in (None, True, False):
        raise ConfigError(f"{name}: its attribute per_response must be True or False, not {per_response!r}")
    if needs is None:
        # Without attributes, the function is called per response, with whole groups.
        needs = Needs(group_ids=per_response is not False)
    if not isinstance(needs, Needs):
        raise ConfigError(f"{name}: its attribute needs must be a mcore_rl.algorithms.Needs, not {needs!r}")
    private = [fact for fact in ("parts", "score_norms") if getattr(needs, fact)]
    if private:
        raise ConfigError(
            f"{name}: its attribute needs has {', '.join(private)}, which only built-in estimators receive"
        )
    whole = [fact for fact in ("group_ids", "baseline_rewards") if getattr(needs, fact)]
    per_response = bool(whole) if per_response is None else per_response
    if needs.values and per_response:
        raise ConfigError(
            f"{name} needs per-token values and also {'whole groups' if whole else 'one number per response'}, but the "
            "ranks with the values hold parts of groups. Remove group_ids, baseline_rewards and per_response=True, or "
            "remove values"
        )
    if whole and not per_response:
        raise ConfigError(
            f"{name} needs {', '.join(whole)}, but has per_response=False, and ranks hold parts of groups. Set its "
            "attribute per_response to True to receive whole groups and return one number per response, or its "
            "attribute needs to Needs() to receive tokens without groups"
        )
    return needs, per_response


def _has_parameter(function: Callable[..., object], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature
        return False
