"""Section `algorithm.correction`, and the entries of `algorithm.corrections`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from mcore_rl.config.fields import check_domains, setting
from mcore_rl.errors import ConfigError


@dataclass
class CorrectionConfig:
    """Importance correction for the difference between the engine, which samples, and the trainer, which computes the
    same policy with slightly different results. Each token's loss is multiplied by a factor that is computed from the
    weight exp(old_logp - rollout_logp) and its bounds."""

    PREFIX: ClassVar[str] = "algorithm.correction."

    kind: str = setting("auto", choices=("auto", "none", "truncate", "mask", "reject"))
    """Factor of a weight: truncate, the weight within the bounds; mask, the weight, or 0 out of bounds; reject, 1, or 0
    out of bounds; none: no correction. auto: truncate with rollout.quantization, if the policy loss supports
    corrections; else none."""
    level: str = setting("token", choices=("token", "sequence", "geometric", "any_token"))
    """Unit of the weights: each token, a response's product (sequence), or a response's geometric mean (geometric).
    any_token, for kind reject: a response is dropped if one of its tokens is out of bounds."""
    low: float | None = setting(None, minimum=0)
    """Lower bound; null: 1 / high for mask and for reject with measure ratio, otherwise 0."""
    high: float | None = setting(2.0, above=0)
    """Upper bound; null: none."""
    apply: bool = True
    """Apply the correction to the loss; false: only report its metrics."""
    measure: str = setting("ratio", choices=("ratio", "k2", "k3", "bernoulli_kl", "second_moment"))
    """Quantity that the bounds limit: ratio, the weight w; k2 or k3, for kind reject, (log w)^2 / 2 or w - 1 - log w of
    each token (level token, any_token), its sum (sequence) or its mean (geometric); bernoulli_kl, for kind reject at
    level token or any_token: the larger of the two KL divergences between trainer and engine, whose two outcomes are
    the sampled token and any other token, in nats; second_moment, for kind reject at level token: the mean of the
    squared log weight over the kept tokens of an update. Tokens with the largest squared log weights are dropped until
    it is at most high; each update takes an additional forward pass."""
    negative_only: bool = False
    """Drop only tokens with a negative advantage; above level token, only responses whose advantages have a negative
    sum. Needs kind reject."""
    policy: str = setting("old", choices=("old", "current"))
    """Trainer's policy in the weight: before the first update of the batch (old), or at the update (current)."""

    def __post_init__(self) -> None:
        check_domains(self, self.PREFIX)
        low, high = self.bounds
        if not 0 <= low < high:
            raise ConfigError(f"{self.PREFIX}low={low:g} must be at least 0 and less than {self.PREFIX}high={high:g}")
        if self.kind != "reject":
            for key, value, free in (
                ("level", self.level, self.level != "any_token"),
                ("measure", self.measure, self.measure == "ratio"),
                ("negative_only", str(self.negative_only).lower(), not self.negative_only),
            ):
                if not free:
                    raise ConfigError(f"{self.PREFIX}{key}={value} needs {self.PREFIX}kind=reject, not {self.kind}")
        if self.measure == "bernoulli_kl" and self.level not in ("token", "any_token"):
            raise ConfigError(
                f"{self.PREFIX}level={self.level}: {self.PREFIX}measure=bernoulli_kl is a quantity of single tokens; "
                "set the level to token or any_token"
            )

        if self.measure == "second_moment":
            if self.high is None:
                raise ConfigError(
                    f"{self.PREFIX}high=null: {self.PREFIX}measure=second_moment drops no token without a bound; set "
                    "it to the largest mean, such as 0.04"
                )
            for key, value, free in (
                ("level", self.level, self.level == "token"),
                ("low", str(self.low), self.low is None),
                ("negative_only", "true", not self.negative_only),
            ):
                if not free:
                    raise ConfigError(
                        f"{self.PREFIX}{key}={value}: {self.PREFIX}measure=second_moment drops the tokens with the "
                        f"largest log weights of an update, up to {self.PREFIX}high; leave {key} at its default"
                    )

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound; the upper one may be infinite."""
        high = math.inf if self.high is None else self.high
        if self.low is not None:
            return self.low, high
        # The default bounds of these are symmetric in the logarithm of the weight.
        symmetric = self.kind in ("mask", "reject") and self.measure == "ratio"
        return (1 / high if symmetric else 0.0), high


@dataclass
class ListedCorrectionConfig(CorrectionConfig):
    """An entry of algorithm.corrections."""

    PREFIX: ClassVar[str] = "algorithm.corrections: "

    kind: str = setting("truncate", choices=("truncate", "mask", "reject"))
    """Factor of a weight, as in algorithm.correction.kind."""
