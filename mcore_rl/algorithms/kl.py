"""Per-token estimators of KL(policy || reference) from samples of the policy, with d = ref_logp - logp:

    k1       -d                    unbiased, may be negative
    abs      |d|
    mse      d^2 / 2               (k2)
    low_var  exp(d) - 1 - d        (k3) unbiased and never negative

Source: J. Schulman, "Approximating KL divergence" (2020); k3 in GRPO: arXiv 2402.03300, equation 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mcore_rl.errors import ConfigError

ALIASES = {"k2": "mse", "k3": "low_var"}
# For smaller |d|, exp(d) - 1 - d loses digits by cancellation (relative error 2 eps / d); the series up to d^10 has a
# relative error of at most 1e-16 there.
SERIES_BELOW = 0.1
SERIES = [1 / math.factorial(n) for n in range(2, 11)]
MAX_EXPONENT = 20.0


def kl_penalty(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Estimate the KL per token with estimator `kind`; the gradient flows through both arguments.

    Shapes: logp, ref_logp [B, T] -> [B, T]. Units: nats.
    Raises: ConfigError for an unknown kind.
    """
    kind = ALIASES.get(kind, kind)
    if kind not in KINDS:
        raise ConfigError(f"kind of KL {kind!r} is not known. Known: {', '.join(KINDS)} (k2 is mse, k3 is low_var).")
    return KINDS[kind](ref_logp - logp)


def _low_var(d: Tensor) -> Tensor:
    small = d.abs() < SERIES_BELOW
    near = torch.where(small, d, 0.0)
    series = torch.full_like(d, SERIES[-1])
    for coefficient in reversed(SERIES[:-1]):
        series = series * near + coefficient
    # Beyond MAX_EXPONENT the exponential continues as its tangent. With a clamped exponential, the remaining -d would
    # give a gradient of the wrong sign.
    beyond = (d - MAX_EXPONENT).clamp(min=0)
    direct = torch.expm1(d.clamp(max=MAX_EXPONENT)) + math.exp(MAX_EXPONENT) * beyond - d
    return torch.where(small, series * near.square(), direct)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": torch.neg,
    "abs": torch.abs,
    "mse": lambda d: d.square() / 2,
    "low_var": _low_var,
}


def sums_in_both_directions(logp: Tensor, engine: Tensor) -> list[Tensor]:
    """Return the sums of four estimates from tokens that the engine sampled: k1 and k3 of KL(engine || policy), k1 and
    k3 of KL(policy || engine). The latter have the weights exp(logp - engine), limited to 20 nats, since the tokens are
    not samples of the policy.

    Shapes: logp, engine of any one shape -> 4 scalars. Units: nats.
    """
    weights = (logp - engine).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    kinds = ("k1", "low_var")
    forward = [kl_penalty(engine, logp, kind).sum() for kind in kinds]
    return forward + [(weights * kl_penalty(logp, engine, kind)).sum() for kind in kinds]
