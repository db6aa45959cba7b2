"""What estimators and losses take, return and declare. Shape letters: B responses, T response tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_rl.errors import ConfigError
from mcore_rl.types import Metric

MAX_NAMED = 10
"""Samples that an error names."""


@dataclass(frozen=True)
class Needs:
    """What an estimator or loss must be given beside the log-probabilities under training (a loss) or the rewards
    (an estimator). The trainer asks these facts and never a name.

    whole_sequence: all tokens of a response must be in one call, one response per row; other losses take any
    shape, so also tokens of many responses packed in one row.
    selection: some tokens are treated differently, chosen among all of an update (see selection.py).
    staleness: of each token, in versions of the weights (see PolicyLossInputs).
    """

    group_ids: bool = False
    values: bool = False
    baseline_rewards: bool = False
    advantages: bool = False
    old_logp: bool = False
    rollout_logp: bool = False
    prox_logp: bool = False
    reference: bool = False
    whole_sequence: bool = False
    selection: bool = False
    staleness: bool = False

    @property
    def critic(self) -> bool:
        return self.values

    def missing(self, inputs: object) -> list[str]:
        """Names of tensors that are needed and that `inputs` holds as None."""
        return [name for name in vars(self) if getattr(self, name) and getattr(inputs, name, True) is None]


@dataclass(frozen=True)
class AdvantageInputs:
    """Shapes: token_rewards, mask, values [B, T]; group_ids int64 [B], arbitrary and unsorted; baseline_rewards,
    lengths [B]. mask is 1 on trained tokens. lengths: how many trained tokens a response has; None: as the mask says.
    """

    token_rewards: Tensor
    mask: Tensor
    group_ids: Tensor | None = None
    values: Tensor | None = None
    baseline_rewards: Tensor | None = None
    lengths: Tensor | None = None

    def trained_tokens(self) -> Tensor:
        """Of each response, float64 [B]."""
        return ((self.mask > 0).sum(-1) if self.lengths is None else self.lengths).double()


@dataclass(frozen=True)
class AdvantageResult:
    """Shapes: both [B, T], 0 where mask is 0. returns: what a critic would be trained towards."""

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class PolicyLossInputs:
    """Shapes: all [B, T], or any one shape for a loss without needs.whole_sequence. Units: logp in nats.

    logp alone carries gradient; mask is 1 on trained tokens. prox_logp: of the proximal policy, where it is not the
    one of old_logp. staleness: how many versions newer than the weights that a token was sampled with those are that
    the updates lead to; 1 where they start from the very weights that sampled. chosen (bool): of a loss with
    needs.selection, the tokens chosen among the whole update; None: it chooses among these.
    """

    logp: Tensor
    mask: Tensor
    old_logp: Tensor | None = None
    advantages: Tensor | None = None
    rollout_logp: Tensor | None = None
    prox_logp: Tensor | None = None
    staleness: Tensor | None = None
    chosen: Tensor | None = None


@dataclass(frozen=True)
class PolicyLossResult:
    """loss: un-reduced, shaped as logp, exactly 0 in value and gradient where mask is 0.
    metrics: sums and counts over the trained tokens of this call."""

    loss: Tensor
    metrics: dict[str, Metric]


class Estimator(Protocol):
    """An advantage estimator: a frozen dataclass of which the fields are the options.

    per_response: the advantage is one number per response, so a driver can carry a scalar instead of tokens.
    whitened: calling it is `raw`, then whitening.whiten over the tokens of its inputs. Where those are one rank's part
    of a batch, the ranks whiten `raw` by the sum of their moments instead.
    """

    @property
    def needs(self) -> Needs: ...

    @property
    def per_response(self) -> bool: ...

    @property
    def whitened(self) -> bool: ...

    def raw(self, inputs: AdvantageInputs) -> AdvantageResult: ...

    def __call__(self, inputs: AdvantageInputs) -> AdvantageResult: ...


class PolicyLoss(Protocol):
    """A policy loss: a frozen dataclass of which the fields are the options. needs may depend on them."""

    @property
    def needs(self) -> Needs: ...

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult: ...


def check_fraction(key: str, value: float) -> None:
    """Raises: ConfigError unless 0 <= value <= 1."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{key}={value} must be between 0 and 1")


def check_shapes(inputs: Any, like: str, names: tuple[str, ...]) -> None:
    """Raises ValueError naming the tensors of `inputs` that are not shaped as inputs.<like>."""
    expected = getattr(inputs, like).shape
    given = {name: getattr(inputs, name) for name in names}
    wrong = [f"{name} {list(t.shape)}" for name, t in given.items() if t is not None and t.shape != expected]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} must have the shape of {like}, {list(expected)}")


def check_advantage_inputs(inputs: AdvantageInputs) -> None:
    """Raises: ValueError naming the tensors that are misshapen, or the responses whose rewards are not finite."""
    rewards = inputs.token_rewards
    if rewards.dim() != 2 or not rewards.is_floating_point():
        raise ValueError(f"token_rewards must be floating point [B, T], not {rewards.dtype} {list(rewards.shape)}")
    if inputs.group_ids is not None and inputs.group_ids.is_floating_point():
        raise ValueError(f"group_ids must be integers, not {inputs.group_ids.dtype}")
    check_shapes(inputs, "token_rewards", ("mask", "values"))
    given = {name: getattr(inputs, name) for name in ("group_ids", "baseline_rewards", "lengths")}
    wrong = [f"{name} {list(t.shape)}" for name, t in given.items() if t is not None and t.shape != rewards.shape[:1]]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} must have one entry per row of token_rewards, {list(rewards.shape)}")
    for name, tensor in (("token_rewards", rewards), ("baseline_rewards", inputs.baseline_rewards)):
        # One sum tells of all: where it is finite, every term is.
        if tensor is None or math.isfinite(tensor.sum()):
            continue
        rows = (~tensor.reshape(len(tensor), -1).isfinite().all(-1)).nonzero()[:, 0].tolist()
        if rows:
            raise ValueError(f"{name} of {len(rows)} responses are not finite: {rows[:MAX_NAMED]}")


def trained(tensor: Tensor, selected: Tensor) -> Tensor:
    """`tensor` with 0 where `selected` (bool) is false, whatever was there, NaN included; so is its gradient."""
    return torch.where(selected, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
