"""Floating-point operations of a training step.

A token costs 2 FLOP per weight that multiplies it (none for embedding lookups; the output projection only where a token
is predicted). Causal attention costs 2 x heads x (query size + value size) per preceding token, so half a sequence on
average. A backward pass costs two forward passes; with LoRA adapters, one forward pass plus attention once more. Full
recomputation adds a forward pass; selective recomputation of core_attn adds attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.models import ActorConfig
from mcore_rl.config.rules.models import uses_lora
from mcore_rl.planner.batches import BatchArithmetic
from mcore_rl.planner.model_size import ModelSize
from mcore_rl.resolved.costs import attention_flops
from model_converters.families.parts.family import ModelArguments


@dataclass(frozen=True)
class StepFlops:
    """FLOP of one training step, summed over all ranks."""

    generate: float
    logp: float
    update: float


def forward_flops(arguments: ModelArguments, size: ModelSize, mean_tokens: float, predicted: float) -> float:
    """Compute the FLOP of one token in a sequence of mean_tokens.

    `predicted` is the share of tokens that pass through the output projection.
    """
    hidden = arguments.transformer["hidden_size"]
    vocabulary = arguments.vocab_size * hidden
    tables = vocabulary if arguments.tied_embeddings else 2 * vocabulary
    # Embedding lookups are no matrix products; the output projection runs for predicted tokens only.
    weights = size.active - tables + predicted * vocabulary
    return 2 * weights + attention_flops(arguments.transformer) * mean_tokens / 2


def step_flops(
    actor: ActorConfig, update_epochs: int, arguments: ModelArguments, size: ModelSize, batch: BatchArithmetic
) -> StepFlops:
    """Count the FLOP of one training step."""
    predicted = batch.mean_response / batch.mean_tokens
    forward = forward_flops(arguments, size, batch.mean_tokens, predicted)
    attention = attention_flops(arguments.transformer) * batch.mean_tokens / 2
    # Frozen weights have no gradient. The gradient of the adapters is small.
    passes = 2 * forward + attention if uses_lora(actor) else 3 * forward
    if actor.recompute == "full":
        passes += forward
    elif actor.recompute == "selective" and "core_attn" in actor.recompute_modules:
        passes += attention
    # `updates` counts all epochs, so the first update trains update_epochs / updates of the step's samples.
    later = 1 - 1 / batch.updates * update_epochs if batch.updates > 1 else 0.0
    return StepFlops(
        generate=batch.tokens * forward,
        # The first update computes the old log-probabilities in its own forward pass, so only later samples need one.
        logp=batch.tokens * later * forward,
        update=batch.tokens * update_epochs * passes,
    )
