"""Layouts that `--suggest` tries: they divide the ranks and the model, and have balanced pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mcore_rl.config.models import ParallelConfig
from mcore_rl.config.rules.objective import responses_per_prompt
from mcore_rl.errors import ConfigError
from mcore_rl.planner.plan import Job
from mcore_rl.resolved.layout import train_layout
from model_converters.mapping.layout import TrainLayout

SHORTEST_PART = 4096
"""Minimum tokens of a row on one context-parallel rank. With fewer, attention does not hide the exchange of keys
and values."""


def candidate_layouts(job: Job) -> Iterator[TrainLayout]:
    """Yield the layouts that divide the ranks and the model; cp is at most 8, etp is 1 or tp."""
    sizes, world, node = job.spec.arguments.transformer, job.spec.layout.world_size, job.config.cluster.gpus_per_node
    experts = sizes.get("num_moe_experts") or 1
    # Tensor parallelism stays within a node, whose links are faster than the network.
    tensor = [tp for tp in _divisors(node) if sizes["num_attention_heads"] % tp == 0]
    pipelines = [pp for pp in _divisors(world) if pp <= sizes["num_layers"]]
    for tp in tensor:
        for pp in pipelines:
            for cp in (1, 2, 4, 8):
                if world % (tp * pp * cp) or (cp > 1 and job.config.actor.tokens_per_microbatch < SHORTEST_PART * cp):
                    continue
                for ep in _divisors(experts):
                    # A model without experts has no expert layout of its own.
                    for etp in sorted({1, tp}) if experts > 1 else [tp]:
                        if world % (pp * ep * etp) == 0:
                            yield from _with_stages(job, TrainLayout(world, tp, pp, ep, etp, cp))


def _with_stages(job: Job, layout: TrainLayout) -> Iterator[TrainLayout]:
    """Yield the layout with equal pipeline stages, and variants with another length of the first and last stage.

    The ends hold the embedding and the output projection, and the first stage has the most micro-batches in flight.
    """
    batch = job.config.trainer.prompts_per_update * responses_per_prompt(job.config)
    if batch < layout.dp:
        return  # an update would leave data-parallel ranks without a response
    for first, last in _ends(job.spec.arguments.transformer["num_layers"], layout.pp):
        candidate = replace(layout, first_stage_layers=first, last_stage_layers=last)
        try:
            train_layout(parallel_of(candidate, job.config.actor.parallel), candidate.world_size, job.spec.hf_config)
        except ConfigError:
            continue  # a run would reject the layout
        yield candidate


def _ends(layers: int, pp: int) -> Iterator[tuple[int | None, int | None]]:
    if layers % pp == 0:
        yield None, None
    if pp < 3:
        if pp == 2 and layers % 2:
            yield layers // 2 + 1, layers // 2
        return
    middle = -(-layers // pp)
    for length in (middle, middle + 1):
        rest = layers - length * (pp - 2)
        if 2 <= rest <= 2 * length:
            yield -(-rest // 2), rest // 2


def parallel_of(layout: TrainLayout, base: ParallelConfig) -> ParallelConfig:
    """Return the configuration of `layout` with the sequence parallelism of `base`."""
    names = ("tp", "pp", "ep", "etp", "cp", "first_stage_layers", "last_stage_layers")
    return ParallelConfig(
        **{name: getattr(layout, name) for name in names},
        sequence_parallel=base.sequence_parallel,
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
