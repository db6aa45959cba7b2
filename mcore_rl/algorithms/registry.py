"""Registries of advantage estimators and policy losses by configuration name, and the functions to build and call them.

Each registry is a literal dict of frozen dataclasses; the fields of an entry are its options.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TypeVar

from torch import Tensor

from mcore_rl.algorithms.advantages.per_response import (
    GPG,
    GRPO,
    OPO,
    RLOO,
    GRPOPassK,
    MaxRL,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from mcore_rl.algorithms.advantages.per_token import GAE, ReinforcePlusPlus
from mcore_rl.algorithms.advantages.reward_parts import GDPO
from mcore_rl.algorithms.advantages.token_baseline import OptimalTokenBaseline
from mcore_rl.algorithms.advantages.user import UserEstimator
from mcore_rl.algorithms.interface import (
    AdvantageInputs,
    AdvantageResult,
    Estimator,
    PolicyLoss,
    PolicyLossInputs,
    PolicyLossResult,
    check_advantage_inputs,
    check_shapes,
)
from mcore_rl.algorithms.losses.covariance import ClipCov, KLCov
from mcore_rl.algorithms.losses.divergence import DPPOKL, DPPOTV
from mcore_rl.algorithms.losses.future import FIPO
from mcore_rl.algorithms.losses.labels import REAL
from mcore_rl.algorithms.losses.plain import SFT, Reinforce
from mcore_rl.algorithms.losses.preference import DPO, BradleyTerry
from mcore_rl.algorithms.losses.quadratic import DRO
from mcore_rl.algorithms.losses.ratio import CISPO, DecoupledPPO, PPOClip
from mcore_rl.algorithms.losses.sequences import GMPO, GSPO
from mcore_rl.algorithms.losses.soft import SAPO, VESPO
from mcore_rl.algorithms.losses.user import UserLoss
from mcore_rl.algorithms.whitening import whiten_batch
from mcore_rl.config.algorithm import AlgorithmConfig, PolicyLossConfig
from mcore_rl.config.functions import FORM, names_function
from mcore_rl.errors import ConfigError

Entry = TypeVar("Entry")

ADVANTAGES: dict[str, type[Estimator]] = {
    "gae": GAE,
    "grpo": GRPO,
    "grpo_passk": GRPOPassK,
    "rloo": RLOO,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "remax": ReMax,
    "opo": OPO,
    "gpg": GPG,
    "maxrl": MaxRL,
    "gdpo": GDPO,
    "optimal_token_baseline": OptimalTokenBaseline,
}

POLICY_LOSSES: dict[str, type[PolicyLoss]] = {
    "ppo_clip": PPOClip,
    "gspo": GSPO,
    "gmpo": GMPO,
    "clip_cov": ClipCov,
    "kl_cov": KLCov,
    "cispo": CISPO,
    "sapo": SAPO,
    "dppo_tv": DPPOTV,
    "dppo_kl": DPPOKL,
    "vespo": VESPO,
    "dro": DRO,
    "fipo": FIPO,
    "real": REAL,
    "decoupled_ppo": DecoupledPPO,
    "reinforce": Reinforce,
    "sft": SFT,
    "dpo": DPO,
    "reward_model": BradleyTerry,
}


def estimator(name: str, /, **options: object) -> Estimator:
    """Build the advantage estimator `name`: a registered name or module_or_file.py:function. An option of None takes
    its default.

    Raises: ConfigError for an unknown name, an unsupported option, or a value out of range.
    """
    given = {option: value for option, value in options.items() if value is not None}
    if names_function(name):
        return UserEstimator.load(name, given)
    return _build(ADVANTAGES, "algorithm.advantage", "algorithm", name, given)


def advantage_options(config: AlgorithmConfig) -> dict[str, object]:
    """Collect the options of an estimator: its configuration keys (None if unset) and advantage_kwargs.

    Raises: ConfigError if advantage_kwargs is set for a registered name, or repeats an option that has a key.
    """
    names = ("normalize_by_std", "std_level", "leave_one_out", "gamma", "lam", "whiten")
    named = {name: getattr(config, name) for name in names}
    named["part_weights"] = config.part_weights or None
    chosen = f"algorithm.advantage={config.advantage}"
    return _with_user_options(named, config.advantage_kwargs, "algorithm.advantage_kwargs", chosen)


def policy_loss(name: str, /, **options: object) -> PolicyLoss:
    """Build the policy loss `name`: a registered name or module_or_file.py:function. An option of None takes its
    default.

    Raises: ConfigError for an unknown name, an unsupported option, or a value out of range.
    """
    given = {option: value for option, value in options.items() if value is not None}
    if names_function(name):
        return UserLoss.load(name, given)
    return _build(POLICY_LOSSES, "algorithm.policy_loss.name", "algorithm.policy_loss", name, given)


def policy_loss_options(config: PolicyLossConfig) -> dict[str, object]:
    """Collect the options of a policy loss, like advantage_options."""
    named = {name: value for name, value in vars(config).items() if name not in ("name", "kwargs")}
    chosen = f"algorithm.policy_loss.name={config.name}"
    return _with_user_options(named, config.kwargs, "algorithm.policy_loss.kwargs", chosen)


def compute_advantages(
    name: str,
    *,
    token_rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor | None = None,
    values: Tensor | None = None,
    baseline_rewards: Tensor | None = None,
    lengths: Tensor | None = None,
    parts: Mapping[str, Tensor] | None = None,
    score_norms: Tensor | None = None,
    **options: object,
) -> AdvantageResult:
    """Compute advantages and returns, without gradient.

    Shapes: token_rewards, mask, values, score_norms [B, T]; group_ids int64 [B]; baseline_rewards, lengths [B]; parts
    by name [B] each; results [B, T].
    Raises: ConfigError for an unknown name or option; ValueError for a missing tensor, a wrong shape, or rewards that
    are not finite (names the responses).
    """
    chosen = estimator(name, **options)
    inputs = AdvantageInputs(token_rewards, mask, group_ids, values, baseline_rewards, lengths, parts, score_norms)
    chosen.needs.check(name, inputs)
    check_advantage_inputs(inputs)
    result = chosen.raw(inputs)
    return whiten_batch(result, inputs) if chosen.whitened else result


def compute_policy_loss(
    name: str,
    *,
    logp: Tensor,
    mask: Tensor,
    old_logp: Tensor | None = None,
    advantages: Tensor | None = None,
    rollout_logp: Tensor | None = None,
    prox_logp: Tensor | None = None,
    staleness: Tensor | None = None,
    group_ids: Tensor | None = None,
    **options: object,
) -> PolicyLossResult:
    """Compute the unreduced loss per token, with gradient through logp only, and metrics over the trained tokens.

    group_ids: groups of the responses, for a loss that compares the responses of a group; None: one group.

    Shapes: all tensors and the loss [B, T], except group_ids int64 [B]. Units: nats; staleness in weight versions.
    Raises: ConfigError for an unknown name or option; ValueError for a missing tensor or a wrong shape.
    """
    chosen = policy_loss(name, **options)
    # Only logp carries gradient.
    others = (None if t is None else t.detach() for t in (old_logp, advantages, rollout_logp, prox_logp, staleness))
    inputs = PolicyLossInputs(logp, mask.detach(), *others)
    chosen.needs.check(name, inputs)
    check_shapes("logp", logp.shape, **vars(inputs))
    if group_ids is not None:
        check_shapes("the rows of logp", logp.shape[:1], group_ids=group_ids)
        inputs = replace(inputs, group_ids=group_ids)
    if chosen.needs.whole_sequence and logp.dim() != 2:
        raise ValueError(f"{name} takes one response per row, [B, T], not {list(logp.shape)}")
    return chosen(inputs)


def _with_user_options(
    named: dict[str, object], own: dict[str, object], kwargs_key: str, chosen: str
) -> dict[str, object]:
    """Merge `named`, the options with a configuration key, and `own`, the options of a user function.

    kwargs_key: key that holds `own`. chosen: key=value of the selected function; both are for errors.

    Raises: ConfigError if `own` is set for a built-in function or repeats an option of `named`.
    """
    if own and not names_function(chosen):
        raise ConfigError(
            f"{kwargs_key}={own} requires a user-defined function, but {chosen} is built in; remove it, or set "
            f"{chosen.partition('=')[0]} to {FORM}"
        )
    both = [f"{kwargs_key.rpartition('.')[0]}.{option}" for option in own if option in named]
    if both:
        raise ConfigError(f"{kwargs_key}: {', '.join(both)} has its own key; set that key instead")
    return named | own


def _build(registry: Mapping[str, type[Entry]], key: str, section: str, name: str, given: dict[str, object]) -> Entry:
    if name not in registry:
        close = difflib.get_close_matches(str(name), registry, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ConfigError(f"{key}={name} is not known{hint} Known: {', '.join(registry)}.")
    entry = registry[name]
    supported = [field.name for field in fields(entry)]  # type: ignore[arg-type]  # entries are dataclasses
    unsupported = [f"{section}.{option}" for option in given if option not in supported]
    if unsupported:
        takes = f"it takes {', '.join(supported)}" if supported else "it takes no options"
        raise ConfigError(f"{', '.join(unsupported)}: not an option of {key}={name}; {takes}")
    return entry(**given)
