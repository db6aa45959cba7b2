"""Rules for quantised rollouts (rollout.quantization)."""

from __future__ import annotations

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.quantization import BLOCK_SCALES, FP8_RECIPES, UNQUANTIZED
from mcore_rl.config.sampling import MTP, NGRAM, NO_DRAFTS
from mcore_rl.config.schema import Config, RolloutConfig, resolved_dtype
from mcore_rl.errors import ConfigError

FP8_CAPABILITY = (8, 9)
"""Compute capability from which GPUs multiply FP8. vLLM repacks FP8 weights for older ones."""


def check_quantization(config: Config) -> None:
    """Raise ConfigError for a key that does not support rollout.quantization. A supervised run has no engines."""
    rollout, chosen = config.rollout, f"rollout.quantization={config.rollout.quantization}"
    if rollout.quantization == UNQUANTIZED or is_supervised(config.algorithm):
        return
    if rollout.engine != "vllm":
        raise ConfigError(
            f"{chosen} needs rollout.engine=vllm: {rollout.engine} cannot receive codes and scales here; set "
            f"rollout.quantization={UNQUANTIZED}, or rollout.engine=vllm"
        )
    if resolved_dtype(config.model.dtype, cuda=config.cluster.device != "cpu") != "bfloat16":
        raise ConfigError(
            f"{chosen} needs model.dtype=bfloat16, in which vLLM computes with FP8 weights; set it, or "
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
        raise ConfigError(
            f"actor.fp8={config.actor.fp8} has {recipe.scales}, but {chosen} has {BLOCK_SCALES}: trainer and engine "
            f"would round the weights differently; set actor.fp8 to none or {' or '.join(accepted)}, or "
            f"rollout.quantization={UNQUANTIZED}"
        )


def check_capability(rollout: RolloutConfig, capability: tuple[int, int]) -> None:
    """Raise ConfigError if the engine's GPU, of this compute capability, does not multiply FP8."""
    if rollout.quantization != UNQUANTIZED and capability < FP8_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (FP8_CAPABILITY, capability))
        raise ConfigError(
            f"rollout.quantization={rollout.quantization} needs GPUs of compute capability {needed} or newer, but the "
            f"engine's has {found}; set it to {UNQUANTIZED}"
        )
