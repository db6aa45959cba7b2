"""An estimator that a user brings: algorithm.advantage=module_or_file.py:function.

    f(token_rewards=, mask=, group_ids=, values=, baseline_rewards=, **options) -> advantages

with the options that algorithm (gamma, lam, whiten, normalize_by_std) and algorithm.advantage_kwargs set. Tensors that
nothing provides are None. It is asked for one of two things:

    one number per response: called with all responses of a step, so with whole groups. token_rewards [B, 1] are their
        rewards, mask [B, 1] is 1, group_ids [B] says which share a prompt. It returns [B] or [B, 1], and every trained
        token of a response gets its number. One with a parameter `lengths` is given how many those are, [B].
    one number per token: called on the ranks, each with some of the responses and not with whole groups. token_rewards,
        mask and values are [B, T], group_ids is None. It returns [B, T]; or a pair (advantages, returns), where a
        critic is to be trained towards other returns.

The first, unless an attribute of the function says otherwise:

    f.per_response = False                    one number per token, of the rewards alone
    f.needs = Needs(values=True)              one number per token, with a critic's values
    f.needs = Needs(baseline_rewards=True)    one number per response, with the reward of a greedy one to its prompt

Needs is in mcore_rl.algorithms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import AdvantageInputs, AdvantageResult, Needs, trained
from mcore_rl.config.functions import check_call, load_function
from mcore_rl.errors import ConfigError

KEY = "algorithm.advantage"
GIVEN = ("token_rewards", "mask", "group_ids", "values", "baseline_rewards")
LENGTHS = "lengths"
PER_RESPONSE_HINT = (
    ": it is called with one number per response; set its attribute per_response to False if it wants tokens"
)


@dataclass(frozen=True)
class UserEstimator:
    """Raises: ConfigError, when called, for a result that is not what `name` (key=value) must return."""

    whitened: ClassVar[bool] = False

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]
    needs: Needs
    per_response: bool
    takes_lengths: bool = False

    def __reduce__(self) -> tuple[Callable[..., UserEstimator], tuple[str, dict[str, Any]]]:
        return UserEstimator.load, (self.name.removeprefix(f"{KEY}="), self.options)

    @classmethod
    def load(cls, spec: str, options: dict[str, Any]) -> UserEstimator:
        """Raises: ConfigError where `spec` names no function that takes GIVEN and `options`, or one that contradicts
        itself."""
        name, function = f"{KEY}={spec}", load_function(KEY, spec, instead="an estimator's name")
        needs, per_response = _declared(name, function)
        takes_lengths = per_response and _has_parameter(function, LENGTHS)
        given = (*GIVEN, LENGTHS) if takes_lengths else GIVEN
        check_call(name, function, given, options, f"f({', '.join(f'{own}=' for own in GIVEN)}, **options)")
        return cls(name, function, options, needs, per_response, takes_lengths)

    @torch.no_grad()
    def raw(self, inputs: AdvantageInputs) -> AdvantageResult:
        given = _of_responses(inputs) if self.per_response else inputs
        lengths = {LENGTHS: inputs.trained_tokens().long()} if self.takes_lengths else {}
        result = self.function(**{name: getattr(given, name) for name in GIVEN}, **lengths, **self.options)
        pair = result if isinstance(result, tuple) else (result, result)
        if len(pair) != 2:
            raise ConfigError(f"{self.name} returned {len(pair)} values instead of advantages or (advantages, returns)")
        advantages, returns = (trained(self._checked(tensor, given), inputs.mask > 0) for tensor in pair)
        return AdvantageResult(advantages, returns)

    def __call__(self, inputs: AdvantageInputs) -> AdvantageResult:
        return self.raw(inputs)

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


def _of_responses(inputs: AdvantageInputs) -> AdvantageInputs:
    """As the driver has them, whatever the caller's tokens: a reward may sit on a token that is not trained."""
    rewards = inputs.token_rewards.sum(-1, keepdim=True)
    return replace(inputs, token_rewards=rewards, mask=torch.ones_like(rewards), values=None)


def _declared(name: str, function: Callable[..., Any]) -> tuple[Needs, bool]:
    """What the function's attributes say: its needs, and whether it wants one number per response."""
    per_response, needs = getattr(function, "per_response", None), getattr(function, "needs", None)
    if per_response not in (None, True, False):
        raise ConfigError(f"{name}: its attribute per_response must be True or False, not {per_response!r}")
    if needs is None:
        needs = Needs(group_ids=per_response is not False)
    if not isinstance(needs, Needs):
        raise ConfigError(f"{name}: its attribute needs must be a mcore_rl.algorithms.Needs, not {needs!r}")
    whole = [fact for fact in ("group_ids", "baseline_rewards") if getattr(needs, fact)]
    per_response = bool(whole) if per_response is None else per_response
    if needs.values and per_response:
        raise ConfigError(
            f"{name} needs values, of every token, and wants {'whole groups' if whole else 'one number per response'}: "
            "the ranks that have the tokens hold parts of groups. Take group_ids and baseline_rewards out of its needs "
            "and per_response=True off, or do without values"
        )
    if whole and not per_response:
        raise ConfigError(
            f"{name} needs {', '.join(whole)}, but says per_response=False: ranks hold parts of groups. Set its "
            "attribute per_response to True, and it is given whole groups and returns one number per response; or its "
            "attribute needs to Needs(), and it is given tokens without groups"
        )
    return needs, per_response


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature
        return False
