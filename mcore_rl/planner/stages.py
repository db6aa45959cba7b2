"""Pipeline stages: parameters, from the model on the meta device, with activations and training state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mcore_rl.config.models import LoraConfig
from mcore_rl.config.roles import POLICY, KeyNames
from mcore_rl.config.schema import PlanConfig
from mcore_rl.megatron.lora.adapters import attach_adapters
from mcore_rl.megatron.model.model import DTYPES
from mcore_rl.megatron.model.output import PolicyModel
from mcore_rl.megatron.model.sharded import meta_model
from mcore_rl.megatron.model.value_model import train_head
from mcore_rl.megatron.model.vision.model import set_trained
from mcore_rl.planner.activations import StageActivations, stage_activations
from mcore_rl.planner.layers.execution import Execution
from mcore_rl.planner.shards import sharded_state
from mcore_rl.planner.state import RankState, StageParameter, stage_state
from mcore_rl.resolved.implementation import Implementation
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.resolved.recompute import recomputed_modules
from model_converters.mapping.layout import TrainLayout

_LAYER = re.compile(r"(decoder|model)\.layers\.\d+\.|mtp\.layers\.\d+\.transformer_layer\.")
"""Prefix of parameters that are gathered together (megatron.model.shards)."""


def stage_parameters(
    hf_config: dict[str, object],
    layout: TrainLayout,
    stage: int,
    kind: type[PolicyModel] = PolicyModel,
    *,
    lora: LoraConfig | None = None,
    train_vision: bool = False,
    names: KeyNames = POLICY,
) -> list[list[StageParameter]]:
    """List the parameters of each chunk of a pipeline stage, in Megatron's order, with the adapters of `lora`. A vision
    tower is frozen unless `train_vision` is set.

    All ranks of a stage hold parameters of the same sizes, so one of them is built. `kind` is the class of the model.

    Raises: ConfigError for a model that cannot be built.
    """
    # Context parallelism divides tokens and not weights, so cp=1 gives the same parameters.
    with meta_model(hf_config, replace(layout, cp=1), stage * layout.stage_size, kind, names=names) as chunks:
        set_trained(chunks, train_vision)
        if lora is not None and lora.rank:
            attach_adapters(chunks, replace(lora, path=None), hf_config, replace(layout, cp=1), seed=0)
            train_head(chunks)
        return [
            [
                StageParameter(
                    parameter.numel(),
                    # Megatron marks parameters of experts with allreduce=False (0.16.1).
                    not getattr(parameter, "allreduce", True),
                    bool(getattr(parameter, "shared_embedding", False)),
                    trained=parameter.requires_grad,
                    rows=len(parameter),
                    layer=layer[0] if (layer := _LAYER.match(name)) else "",
                )
                for name, parameter in chunk.named_parameters()
            ]
            for chunk in chunks
        ]


def execution_of(
    spec: ResolvedModel, implementation: Implementation, plan: PlanConfig, *, longest: int, cuda: bool
) -> Execution:
    """Describe a model that trains on sequences of up to `longest` tokens."""
    section = spec.role.section
    modules = recomputed_modules(section, spec.arguments, implementation)
    return Execution(
        replace(section, recompute_modules=modules),
        spec.layout,
        DTYPES[spec.role.model.dtype].itemsize,
        fused=implementation.transformer_engine,
        cuda=cuda,
        imbalance=plan.moe_imbalance,
        square_length=longest,
        unfused_rotation=implementation.rope.value == "unfused",
        float32_head=spec.role.model.float32_head,
    )


def planned_stages(
    spec: ResolvedModel,
    run: Execution,
    microbatches: int,
    kind: type[PolicyModel] = PolicyModel,
) -> Iterator[tuple[StageActivations, list[RankState]]]:
    """Yield, for each stage, the peak activations of an update and the state of its ranks.

    `microbatches` is per update and rank.
    """
    for stage in range(spec.layout.pp):
        chunks = stage_parameters(
            spec.hf_config,
            spec.layout,
            stage,
            kind,
            lora=run.section.lora,
            train_vision=run.section.train_vision,
            names=spec.role,
        )
        # Its gradient exists once more before it is added to the buffer.
        largest = max((parameter.elements for chunk in chunks for parameter in chunk if parameter.trained), default=0)
        activations = stage_activations(
            spec.arguments,
            stage,
            run,
            microbatches=microbatches,
            largest_weight_elements=largest,
            predicts_tokens=kind is PolicyModel,
        )
        yield activations, rank_states(chunks, stage, run)


def rank_states(chunks: Sequence[Sequence[StageParameter]], stage: int, run: Execution) -> list[RankState]:
    """Compute the state of every rank of a stage from the parameters of its chunks (`stage_parameters`)."""
    return sharded_state(chunks[0], run) if run.layout.shard_parameters else stage_state(chunks, stage, run)
