"""Inputs, results and requirements of estimators and losses. Shape letters: B responses, T response tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mcore_rl.algorithms.segments import Segments
from mcore_rl.errors import ConfigError
from mcore_rl.types import Metric

MAX_NAMED = 10
"""Maximum number of samples listed in an error."""


@dataclass(frozen=True)
class Needs:
    """Inputs that an estimator requires besides rewards, or a loss besides logp. The trainer reads these flags
    and never compares names.

    whole_sequence: all tokens of a response must be in one call, one response per row. Other losses take any shape,
    for example tokens of many responses packed in one row.
    values: the values of a critic.
    parts: the parts of the rewards by name, such as the score of each reward function.
    score_norms: squared norms of the score of each token with respect to the logits. The ranks compute them; estimators
    with this need implement GroupTokenEstimator (advantages/token_baseline.py).
    selection: the loss treats some tokens differently, chosen among all tokens of an update (see selection.py).
    staleness: per-token staleness in weight versions (see PolicyLossInputs).
    whole_group: the gradient of a response depends on all responses of its group in the update (see
    group_scores.WholeGroupLoss).
    pairs: the advantages of the loss are weights of the responses of pairs, computed before the update from the sums
    of their log-probabilities, or from their scores (see preference.py).
    scores: `logp` are scores of responses from a value model, not log-probabilities of tokens.
    """

    group_ids: bool = False
    values: bool = False
    baseline_rewards: bool = False
    parts: bool = False
    score_norms: bool = False
    advantages: bool = False
    old_logp: bool = False
    rollout_logp: bool = False
    prox_logp: bool = False
    reference: bool = False
    whole_sequence: bool = False
    selection: bool = False
    staleness: bool = False
    whole_group: bool = False
    pairs: bool = False
    scores: bool = False

    def __or__(self, other: Needs) -> Needs:
        """Return the inputs that one of both requires."""
        return Needs(**{name: needed or getattr(other, name) for name, needed in vars(self).items()})

    def check(self, name: str, inputs: object) -> None:
        """Check that `inputs` has every required tensor.

        Raises: ValueError naming `name`, the estimator or loss, and the missing tensors.
        """
        # Flags without a tensor of that name, such as whole_sequence, are never missing.
        missing = [need for need in vars(self) if getattr(self, need) and getattr(inputs, need, True) is None]
        if missing:
            raise ValueError(f"{name} needs {', '.join(missing)}")


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage estimator.

    Shapes: token_rewards, mask, values, score_norms [B, T]; group_ids int64 [B], arbitrary and unsorted;
    baseline_rewards, lengths [B]; parts by name, float64 [B] each. mask is 1 on trained tokens. lengths: trained tokens
    per response; None: counted from the mask. parts: parts of the rewards; NaN if a response has none.
    """

    token_rewards: Tensor
    mask: Tensor
    group_ids: Tensor | None = None
    values: Tensor | None = None
    baseline_rewards: Tensor | None = None
    lengths: Tensor | None = None
    parts: Mapping[str, Tensor] | None = None
    score_norms: Tensor | None = None

    def groups(self) -> Segments:
        """Assign the responses to their groups."""
        assert self.group_ids is not None
        return Segments.of(self.group_ids)

    def trained_tokens(self) -> Tensor:
        """Number of trained tokens of each response, float64 [B]."""
        return ((self.mask > 0).sum(-1) if self.lengths is None else self.lengths).double()


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages and returns. Shapes: both [B, T], 0 where mask is 0. returns: the targets of a critic."""

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class PolicyLossInputs:
    """Inputs of a policy loss.

    Shapes: all [B, T], or any one shape for a loss without needs.whole_sequence. Units: logp in nats.

    Only logp carries gradient; mask is 1 on trained tokens.
    prox_logp: log-probabilities of the proximal policy if it differs from the policy of old_logp.
    staleness: version that the updates produce minus version that sampled the token; 1 if the updates start from the
    weights that sampled it.
    within (bool): for a correction with measure second_moment, tokens kept among the whole update; None: the correction
    keeps tokens among those of this call.
    chosen (bool): for a loss with needs.selection, tokens chosen among the whole update; None: the loss chooses among
    the tokens of this call.
    group_loss, slope: for a loss with needs.whole_group, the results of its group_terms for the response of each token,
    computed from the whole update; None: the loss computes them from the responses of this call.
    group_ids int64 [B]: groups of the responses of this call, for such a loss without group_loss and slope; None: one
    group.
    """

    logp: Tensor
    mask: Tensor
    old_logp: Tensor | None = None
    advantages: Tensor | None = None
    rollout_logp: Tensor | None = None
    prox_logp: Tensor | None = None
    staleness: Tensor | None = None
    chosen: Tensor | None = None
    within: Tensor | None = None
    group_loss: Tensor | None = None
    slope: Tensor | None = None
    group_ids: Tensor | None = None


@dataclass(frozen=True)
class PolicyLossResult:
    """Loss and metrics of one call.

    loss: not reduced, shaped like logp, exactly 0 in value and gradient where mask is 0.
    metrics: sums and counts over the trained tokens of this call.
    """

    loss: Tensor
    metrics: dict[str, Metric]


class Estimator(Protocol):
    """An advantage estimator: a frozen dataclass whose fields are the options.

    per_response: the advantage is one number per response, so the driver handles scalars instead of tokens.
    whitened: the caller whitens the result of `raw` over all tokens of the batch. If each rank has only a part of the
    batch, the ranks whiten with their summed moments.
    """

    @property
    def needs(self) -> Needs: ...

    @property
    def per_response(self) -> bool: ...

    @property
    def whitened(self) -> bool: ...

    def raw(self, inputs: AdvantageInputs) -> AdvantageResult: ...


class PolicyLoss(Protocol):
    """A policy loss: a frozen dataclass whose fields are the options. `needs` may depend on them."""

    @property
    def needs(self) -> Needs: ...

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult: ...


def check_fraction(key: str, value: float) -> None:
    """Check that 0 <= value <= 1. Raises: ConfigError."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{key}={value} must be between 0 and 1")


def check_shapes(like: str, shape: torch.Size, **given: Tensor | None) -> None:
    """Check that the given tensors have the `shape` of the tensor `like`. Raises: ValueError that names the others."""
    wrong = [f"{name} {list(t.shape)}" for name, t in given.items() if t is not None and t.shape != shape]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} must have the shape of {like}, {list(shape)}")


def check_advantage_inputs(inputs: AdvantageInputs) -> None:
    """Check shapes, dtypes and finite rewards. Raises: ValueError that names the wrong tensors or responses."""
    rewards = inputs.token_rewards
    if rewards.dim() != 2 or not rewards.is_floating_point():
        raise ValueError(f"token_rewards must be floating point [B, T], not {rewards.dtype} {list(rewards.shape)}")
    if inputs.group_ids is not None and inputs.group_ids.is_floating_point():
        raise ValueError(f"group_ids must be integers, not {inputs.group_ids.dtype}")
    tokens = {name: getattr(inputs, name) for name in ("mask", "values", "score_norms")}
    check_shapes("token_rewards", rewards.shape, **tokens)
    given = {name: getattr(inputs, name) for name in ("group_ids", "baseline_rewards", "lengths")}
    given |= {f"part {name}": part for name, part in (inputs.parts or {}).items()}
    wrong = [f"{name} {list(t.shape)}" for name, t in given.items() if t is not None and t.shape != rewards.shape[:1]]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} must have one entry per row of token_rewards, {list(rewards.shape)}")
    for name, tensor in (("token_rewards", rewards), ("baseline_rewards", inputs.baseline_rewards)):
        # Fast path: a finite sum implies that every term is finite.
        if tensor is None or math.isfinite(tensor.sum()):
            continue
        rows = (~tensor.reshape(len(tensor), -1).isfinite().all(-1)).nonzero()[:, 0].tolist()
        if rows:
            raise ValueError(f"{name} of {len(rows)} responses are not finite: {rows[:MAX_NAMED]}")


def masked(tensor: Tensor, selected: Tensor) -> Tensor:
    """Replace entries where `selected` (bool) is false with 0, including NaN; their gradient is 0 too."""
    # Not a product with the mask: NaN * 0 is NaN.
    return torch.where(selected, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
