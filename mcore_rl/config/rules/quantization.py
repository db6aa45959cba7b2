"""Rules for quantised rollouts (rollout.quantization)."""

from __future__ import annotations

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.fields import reject_unless_default
from mcore_rl.config.quantization import BLOCK_SCALES, FP8, FP8_RECIPES, GROUPS, INT4, UNQUANTIZED
from mcore_rl.config.sampling import MTP, NGRAM, NO_DRAFTS
from mcore_rl.config.schema import Config, RolloutConfig, resolved_dtype
from mcore_rl.errors import ConfigError

CAPABILITIES = {FP8: (8, 9), INT4: (8, 0)}
"""Oldest compute capability by rollout.quantization: of GPUs that multiply FP8 (vLLM repacks weights for older ones),
and of vLLM's kernels for INT4 beside bfloat16."""


def check_quantization(config: Config) -> None:
    """Raise ConfigError for a key that does not support rollout.quantization. A supervised run has no engines."""
    rollout, chosen = config.rollout, f"rollout.quantization={config.rollout.quantization}"
    _check_groups(config)
    if rollout.quantization == UNQUANTIZED or is_supervised(config.algorithm):
        return
    if rollout.engine != "vllm":
        raise ConfigError(
            f"{chosen} needs rollout.engine=vllm: {rollout.engine} cannot receive codes and scales here; set "
            f"rollout.quantization={UNQUANTIZED}, or rollout.engine=vllm"
        )
    if resolved_dtype(config.model.dtype, cuda=config.cluster.device != "cpu") != "bfloat16":
        raise ConfigError(
            f"{chosen} needs model.dtype=bfloat16, in which vLLM computes with quantised weights; set it, or "
            f"rollout.quantization={UNQUANTIZED}"
        )
    if rollout.draft == MTP:
        raise ConfigError(
            f"{chosen} does not support rollout.draft={MTP} yet; set rollout.draft={NGRAM} or {NO_DRAFTS}, or "
            f"rollout.quantization={UNQUANTIZED}"
        )
    recipe = FP8_RECIPES.get(config.actor.fp8)
    if recipe is not None and rollout.quantization not in recipe.rollouts:
        accepted = [name for name, each in FP8_RECIPES.items() if rollout.quantization in each.rollouts]
        scales = "one scale per group of a row" if rollout.quantization == INT4 else BLOCK_SCALES
        raise ConfigError(
            f"actor.fp8={config.actor.fp8} has {recipe.scales}, but {chosen} has {scales}: trainer and engine "
            f"would round the weights differently; set actor.fp8 to {' or '.join([UNQUANTIZED, *accepted])}, or "
            f"rollout.quantization={UNQUANTIZED}"
        )


def _check_groups(config: Config) -> None:
    """Check the sizes of INT4 groups in engines, and in the trainer's forward passes.

    Raises: ConfigError naming the key.
    """
    group, trained = config.rollout.quantization_group, config.actor.quantization_aware
    sizes = " or ".join(map(str, GROUPS))
    if config.rollout.quantization != INT4:
        remedy = f"set rollout.quantization={INT4}"
        reject_unless_default("rollout", config.rollout, remedy, ("quantization_group",))
    if group not in GROUPS:
        raise ConfigError(f"rollout.quantization_group={group} has no kernels in vLLM; set it to {sizes}")
    if not trained:
        return
    chosen = f"actor.quantization_aware={trained}"
    if config.rollout.quantization != INT4 or is_supervised(config.algorithm):
        raise ConfigError(
            f"{chosen} rounds experts as engines with rollout.quantization={INT4} do, but this run has none; set "
            "actor.quantization_aware=0"
        )
    if trained != group:
        raise ConfigError(
            f"{chosen} differs from rollout.quantization_group={group}: trainer and engine would round the weights "
            f"differently; set both to {sizes}"
        )


def check_capability(rollout: RolloutConfig, capability: tuple[int, int]) -> None:
    """Raise ConfigError if the engine's GPU, of this compute capability, has no kernels for rollout.quantization."""
    oldest = CAPABILITIES.get(rollout.quantization, capability)
    if capability < oldest:
        needed, found = (".".join(map(str, version)) for version in (oldest, capability))
        raise ConfigError(
            f"rollout.quantization={rollout.quantization} needs GPUs of compute capability {needed} or newer, but the "
            f"engine's has {found}; set it to {UNQUANTIZED}"
        )
