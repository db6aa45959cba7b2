"""Rules for the reference policy and the KL terms."""

from __future__ import annotations

from mcore_rl.config.algorithm import KLConfig
from mcore_rl.config.models import ReferenceConfig
from mcore_rl.config.rules.changed_keys import reject_unless_default
from mcore_rl.errors import ConfigError


def uses_reference(kl: KLConfig) -> bool:
    """Return True if the loss or the reward has a KL term."""
    return kl.in_loss > 0 or kl.in_reward > 0


def check_reference(kl: KLConfig, reference: ReferenceConfig) -> None:
    """Raise ConfigError for a key without effect, or one that needs another."""
    if kl.controller == "adaptive":
        _check_adaptive(kl)
    else:
        reject_unless_default("algorithm.kl", kl, "set algorithm.kl.controller=adaptive", ("target", "horizon"))
    for use in ("loss", "reward"):
        key = f"algorithm.kl.in_{use}"
        if not getattr(kl, f"in_{use}"):
            reject_unless_default("algorithm.kl", kl, f"set {key} above 0", (f"{use}_kind",))
    if not uses_reference(kl):
        needed = "set algorithm.kl.in_loss or algorithm.kl.in_reward above 0"
        reject_unless_default("reference", reference, needed)


def _check_adaptive(kl: KLConfig) -> None:
    chosen = "algorithm.kl.controller=adaptive"
    if kl.in_reward <= 0:
        raise ConfigError(
            f"{chosen} multiplies algorithm.kl.in_reward={kl.in_reward}; set algorithm.kl.in_reward to an initial "
            "value above 0, or algorithm.kl.controller=fixed"
        )
    for name in ("target", "horizon"):
        if getattr(kl, name) is None:
            raise ConfigError(f"{chosen} needs algorithm.kl.{name} above 0, not null; set it")
