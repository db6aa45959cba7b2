"""Floating-point operations of a training step, and their time at the rates assumed in `plan.*`.

A token costs 2 FLOP per weight that multiplies it (none for embedding lookups; the output projection only where a token
is predicted). Causal attention costs 2 x heads x (query size + value size) per preceding token, so half a sequence on
average. A backward pass costs two forward passes; with LoRA adapters, one forward pass plus attention once more. Full
recomputation adds a forward pass; selective recomputation of core_attn adds attention.

Time of training phases: FLOP / (ranks x plan.peak_tflops x plan.mfu_*), where the assumed mfu includes pipeline bubbles
and communication. Prefill: the same with plan.mfu_prefill. Decoding is bound by memory bandwidth: every engine step
reads the weights (a large batch uses all experts) and the KV cache of the running sequences at
plan.memory_bandwidth_gib_per_second. There are response tokens / running sequences steps, and at least as many as the
longest response has tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mcore_rl.config.models import ActorConfig
from mcore_rl.config.rules.lora import uses_lora
from mcore_rl.config.schema import PlanConfig, RolloutConfig
from mcore_rl.planner.batches import BatchArithmetic
from mcore_rl.planner.engine import GIB, EngineRank, longest_sequence
from mcore_rl.planner.model_size import ModelSize
from mcore_rl.resolved.costs import attention_flops
from model_converters.families.parts.family import ModelArguments


@dataclass(frozen=True)
class StepFlops:
    """FLOP of one training step, summed over all ranks."""

    generate: float
    logp: float
    update: float


@dataclass(frozen=True)
class StepSeconds:
    """Time of each phase of a step. None if an assumption in `plan.*` is not set."""

    generate: float | None
    logp: float | None
    update: float | None


def forward_flops(arguments: ModelArguments, size: ModelSize, mean_tokens: float, predicted: float) -> float:
    """Compute the FLOP of one token in a sequence of mean_tokens.

    `predicted` is the share of tokens that pass through the output projection.
    """
    hidden = arguments.transformer["hidden_size"]
    vocabulary = arguments.vocab_size * hidden
    tables = vocabulary if arguments.tied_embeddings else 2 * vocabulary
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


def step_seconds(
    plan: PlanConfig,
    rollout: RolloutConfig,
    flops: StepFlops,
    batch: BatchArithmetic,
    engine: EngineRank,
    world_size: int,
) -> StepSeconds:
    """Compute the time of each phase of a step, with `world_size` trainer ranks."""
    rate = None if plan.peak_tflops is None else world_size * plan.peak_tflops * 1e12
    return StepSeconds(
        generate=_generation(plan, rollout, flops, batch, engine),
        logp=None if rate is None else flops.logp / (rate * plan.mfu_logp),
        update=None if rate is None else flops.update / (rate * plan.mfu_update),
    )


def _generation(
    plan: PlanConfig, rollout: RolloutConfig, flops: StepFlops, batch: BatchArithmetic, engine: EngineRank
) -> float | None:
    sequences = ceil(batch.responses / rollout.num_engines)
    running = max(min(sequences, rollout.max_concurrent_requests, int(cache_sequences(rollout, batch, engine))), 1)
    steps = max(sequences * batch.mean_response / running, rollout.max_response_tokens)
    return generation_seconds(plan, rollout, flops, batch, engine, running=running, steps=steps)


def cache_sequences(rollout: RolloutConfig, batch: BatchArithmetic, engine: EngineRank) -> float:
    """Return the number of mean-length sequences that an engine's KV cache holds."""
    return engine.sequences * longest_sequence(rollout) / batch.mean_tokens


def generation_seconds(
    plan: PlanConfig,
    rollout: RolloutConfig,
    flops: StepFlops,
    batch: BatchArithmetic,
    engine: EngineRank,
    *,
    running: float,
    steps: float,
    recomputed: float = 0.0,
) -> float | None:
    """Compute the time in which the engines generate the responses of a step: prefill, then decoding.

    Each engine runs `steps` engine steps with `running` requests on average. `recomputed` counts tokens, over all
    engines, whose KV cache is computed again. None if an assumption in `plan.*` is not set.
    """
    peak, bandwidth = plan.peak_tflops, plan.memory_bandwidth_gib_per_second
    if peak is None or bandwidth is None:
        return None
    prompts = flops.generate / batch.tokens * (batch.responses * batch.mean_prompt + recomputed)
    prefill = prompts / (rollout.num_engines * rollout.tp * peak * 1e12 * plan.mfu_prefill)
    cache = running * (batch.mean_prompt + batch.mean_response / 2) * engine.kv_bytes_per_token
    return prefill + steps * (engine.weights_bytes + cache) / (bandwidth * GIB)
