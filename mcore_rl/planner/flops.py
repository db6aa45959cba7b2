"""Floating-point operations of a step, and what they take at the rates that `plan.*` assumes.

A token costs 2 FLOP per weight that it is multiplied with (embedding lookups are none; the output projection only
where a token is predicted), and causal attention 2 x heads x (query size + value size) per token before it, so half a
sequence on average. A backward pass is two forward passes, under LoRA adapters one and a second of attention; full
recomputation adds one, selective recomputation of core_attn adds attention.

Seconds: training phases take FLOP / (ranks x plan.peak_tflops x plan.mfu_*), where the guess contains bubbles and
communication. Prompts likewise with plan.mfu_prefill. Decoding is bound by memory: every pass reads the engine's
weights (a large batch meets all experts) and the KV cache of the running sequences at
plan.memory_bandwidth_gib_per_second; there are as many passes as response tokens over running sequences, and no fewer
than the longest response has tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mcore_rl.config.rules.lora import uses_lora
from mcore_rl.config.schema import Config
from mcore_rl.planner.batches import BatchArithmetic
from mcore_rl.planner.engine import GIB, EngineRank
from mcore_rl.planner.model_size import ModelSize
from mcore_rl.resolved.costs import attention_flops
from model_converters.families import ModelArguments


@dataclass(frozen=True)
class StepFlops:
    """FLOP of one step, on all ranks together."""

    generate: float
    logp: float
    update: float


@dataclass(frozen=True)
class StepSeconds:
    """None where an assumption of `plan.*` is not set."""

    generate: float | None
    logp: float | None
    update: float | None


def forward_flops(arguments: ModelArguments, size: ModelSize, mean_tokens: float, predicted: float) -> float:
    """Of one token in a sequence of mean_tokens; `predicted`: the share of tokens that the output projection sees."""
    hidden = arguments.transformer["hidden_size"]
    vocabulary = arguments.vocab_size * hidden
    tables = vocabulary if arguments.tied_embeddings else 2 * vocabulary
    weights = size.active - tables + predicted * vocabulary
    return 2 * weights + attention_flops(arguments.transformer) * mean_tokens / 2


def step_flops(config: Config, arguments: ModelArguments, size: ModelSize, batch: BatchArithmetic) -> StepFlops:
    """One step of training."""
    predicted = batch.mean_response / batch.mean_tokens
    forward = forward_flops(arguments, size, batch.mean_tokens, predicted)
    attention = attention_flops(arguments.transformer) * batch.mean_tokens / 2
    # Frozen weights have no gradient; that of the adapters is small.
    passes = 2 * forward + attention if uses_lora(config.actor) else 3 * forward
    if config.actor.recompute == "full":
        passes += forward
    elif config.actor.recompute == "selective" and "core_attn" in config.actor.recompute_modules:
        passes += attention
    later = 1 - 1 / batch.updates * config.trainer.update_epochs if batch.updates > 1 else 0.0
    return StepFlops(
        generate=batch.tokens * forward,
        # The first update starts from the policy that it is to remember: only later samples have a pass.
        logp=batch.tokens * later * forward,
        update=batch.tokens * config.trainer.update_epochs * passes,
    )


def step_seconds(
    config: Config, flops: StepFlops, batch: BatchArithmetic, engine: EngineRank, world_size: int
) -> StepSeconds:
    """What the step takes, per phase."""
    peak = config.plan.peak_tflops
    rate = None if peak is None else world_size * peak * 1e12
    return StepSeconds(
        generate=_generation(config, flops, batch, engine),
        logp=None if rate is None else flops.logp / (rate * config.plan.mfu_logp),
        update=None if rate is None else flops.update / (rate * config.plan.mfu_update),
    )


def _generation(config: Config, flops: StepFlops, batch: BatchArithmetic, engine: EngineRank) -> float | None:
    sequences = ceil(batch.responses / config.rollout.num_engines)
    running = max(min(sequences, config.rollout.max_concurrent_requests, int(room(config, batch, engine))), 1)
    passes = max(sequences * batch.mean_response / running, config.rollout.max_response_tokens)
    return generation_seconds(config, flops, batch, engine, running=running, passes=passes)


def room(config: Config, batch: BatchArithmetic, engine: EngineRank) -> float:
    """Sequences of mean length that an engine's KV cache holds."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    return engine.sequences * longest / batch.mean_tokens


def generation_seconds(
    config: Config,
    flops: StepFlops,
    batch: BatchArithmetic,
    engine: EngineRank,
    *,
    running: float,
    passes: float,
    anew: float = 0.0,
) -> float | None:
    """Of the engines, which share the responses of a step: their prompts, and decoding in `passes` passes of each
    engine with `running` requests in it on average. `anew`: tokens of all engines whose KV cache is computed anew.
    None where an assumption of `plan.*` is not set."""
    rollout, peak, bandwidth = config.rollout, config.plan.peak_tflops, config.plan.memory_bandwidth_gib_per_second
    if peak is None or bandwidth is None:
        return None
    prompts = flops.generate / batch.tokens * (batch.responses * batch.mean_prompt + anew)
    prefill = prompts / (rollout.num_engines * rollout.tp * peak * 1e12 * config.plan.mfu_prefill)
    cache = running * (batch.mean_prompt + batch.mean_response / 2) * engine.kv_bytes_per_token
    return prefill + passes * (engine.weights_bytes + cache) / (bandwidth * GIB)
