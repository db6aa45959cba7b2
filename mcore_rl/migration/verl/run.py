"""Facts about a verl run that several translations need: trainer, training backend, batch sizes, devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from mcore_rl.migration.draft import Draft
from mcore_rl.migration.source import Source
from mcore_rl.migration.verl.defaults import ACTOR, ROLLOUT

CONFIG_NAME, MODULE = "--config-name", "-m"
"""Names of the settings that hold the base configuration and the program."""
ENGINE_NAMES = (
    *(CONFIG_NAME, "model_engine", f"{ACTOR}.strategy", f"{ACTOR}.model_engine", "actor@actor_rollout_ref.actor"),
    *("engine", "engine.strategy"),
)
"""Settings that name the training backend."""
OTHER_BACKENDS = ("veomni", "torchtitan", "automodel")
"""Backends that shard states like FSDP, but with layouts of their own."""
EXPERTS = (f"{ROLLOUT}.expert_parallel_size", f"{ROLLOUT}.engine_kwargs.vllm.enable_expert_parallel")
"""Settings of engines whose ranks hold whole experts."""


@dataclass
class VerlRun:
    """A verl run under translation.

    rows: number of training prompts; None if unknown.
    """

    source: Source
    draft: Draft
    rows: int | None = None

    @cached_property
    def module(self) -> str:
        return self.source.text(MODULE) or ""

    @cached_property
    def is_supervised(self) -> bool:
        """True for the SFT trainers, which a launcher may start and whose model is a section of its own."""
        own_model = self.source.is_set("model.path") and not self.source.is_set("actor_rollout_ref.model.path")
        return "sft" in self.module.rpartition(".")[2] or self.source.is_set("model.partial_pretrain") or own_model

    @cached_property
    def is_fully_asynchronous(self) -> bool:
        return "fully_async" in self.module or any(key.startswith("async_training.") for key in self.source.settings)

    @cached_property
    def is_one_step_off(self) -> bool:
        return "one_step_off" in self.module

    @cached_property
    def uses_megatron(self) -> bool:
        """True if Megatron trains; otherwise FSDP or a similar backend that shards all states."""
        named = [self.source.text(name) or "" for name in ENGINE_NAMES]
        # mlite is Megatron Lite, which has Megatron's layout.
        return any("megatron" in name or "mlite" in name for name in named) or any(
            key.startswith((f"{ACTOR}.megatron.", "engine.tensor_model_parallel_size")) for key in self.source.settings
        )

    @cached_property
    def uses_fsdp(self) -> bool:
        """True if torch's FSDP trains, and shards all states over all GPUs."""
        named = [self.source.text(name) or "" for name in ENGINE_NAMES]
        named += [key.removeprefix(f"{ACTOR}.") for key in self.source.settings if key.startswith(f"{ACTOR}.")]
        return not self.uses_megatron and not any(other in name for name in named for other in OTHER_BACKENDS)

    @property
    def samples(self) -> int:
        """Responses per prompt."""
        return max(self.source.integer(f"{ROLLOUT}.n"), 1)

    @property
    def prompts_per_update(self) -> int:
        return max(self.source.integer(f"{ACTOR}.ppo_mini_batch_size"), 1)

    @property
    def updates_per_scheduler_step(self) -> int:
        """Optimizer updates between two steps of verl's learning rate schedule, which advances once per call of the
        actor's update."""
        epochs = max(self.source.integer(f"{ACTOR}.ppo_epochs"), 1)
        if self.is_fully_asynchronous:
            return max(self.source.integer("async_training.require_batches"), 1) * epochs
        return max(self.prompts_per_step // self.prompts_per_update, 1) * epochs

    @property
    def prompts_per_step(self) -> int:
        """Prompts between two weight syncs."""
        if self.is_fully_asynchronous:
            local = self.source.integer("async_training.trigger_parameter_sync_step")
            return local * max(self.source.integer("async_training.require_batches"), 1) * self.prompts_per_update
        return self.source.integer("data.train_batch_size")

    @property
    def trainer_gpus(self) -> int:
        return self.source.integer("trainer.nnodes") * self.source.integer("trainer.n_gpus_per_node")

    @property
    def spreads_experts(self) -> bool:
        """True if the ranks of an engine hold whole experts."""
        return self.source.integer(EXPERTS[0]) > 1 or self.source.flag(EXPERTS[1])

    @property
    def engine_gpus(self) -> int:
        """GPUs of an engine. Data-parallel ranks count if they share the experts; otherwise each is a whole model."""
        names = ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
        names += ["data_parallel_size"] if self.spreads_experts else []
        return math.prod(max(self.source.integer(f"{ROLLOUT}.{name}"), 1) for name in names)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        if self.is_supervised:
            return self.source.integer("data.max_length")
        return self.source.integer("data.max_prompt_length") + self.source.integer("data.max_response_length")
