"""Ranks of the reward model: their process, the calls to it, and their group, which scores tasks of the rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import ray

from mcore_rl.config.schema import Config
from mcore_rl.data.trajectories import split_rows
from mcore_rl.data.transcripts import PromptSource
from mcore_rl.ports import ResponseScorer
from mcore_rl.resolved.placement import Guests
from mcore_rl.rewards.task_parts import TaskPart, join_scores, split_tasks
from mcore_rl.runtime.calls import ProcessCalls, Ref
from mcore_rl.runtime.delivery import Delivery, Rows
from mcore_rl.runtime.fanout import GroupCall
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.roles.base import RankProcess, see_only
from mcore_rl.runtime.roles.groups import RankCalls, RankMap, drain_spans
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.runtime.roles.role import Role, SetUpContext
from mcore_rl.types import RolloutResult, RolloutTask, Span, TrajectoryBuffers


@marks_errors
class RewardModelProcess(RankProcess):
    """One rank of the reward model."""

    def setup(
        self,
        config: Config,
        rank: int,
        world_size: int,
        init_method: str,
        visible_devices: str | None,
        prompts: Mapping[str, Ref[PromptSource]],
    ) -> None:
        see_only(visible_devices)
        from mcore_rl.megatron.roles.reward_model import MegatronRewardModel
        from mcore_rl.rewards.model_inputs import RewardInputs

        with self.spans.span("setup"):
            self.inputs = RewardInputs(config.reward_model, config.model, config.rollout)
            # Only a conversation that is encoded again needs its prompt; otherwise the trajectory's tokens suffice.
            self.prompts = {name: ray.get(ref) for name, ref in prompts.items()} if self.inputs.reencoded else {}
            self.model = MegatronRewardModel(config, rank, world_size, init_method)
        self.model.memory.span = self.spans.span

    def score(self, parts: list[TaskPart], *trajectories: TrajectoryBuffers) -> dict[int, float]:
        """Score the rows of all parts. Returns {number: score} on ranks of the last stage. `trajectories` is one object
        with the rows of all parts in order, or nothing if the parts are empty."""
        with self.spans.span("score"):
            sequences: dict[int, np.ndarray] = {}
            counts = [len(part.rows) for part in parts]
            chunks = split_rows(trajectories[0], counts) if trajectories else []
            for part, chunk in zip(parts, chunks, strict=True):
                name = part.prompt_set
                ids = self.inputs.of(chunk, part.prompt_rows, self.prompts.get(name), f"data.{name}")
                sequences |= zip(part.numbers.tolist(), ids, strict=True)
            return self.model.score(sequences)


RewardModelActor = ray.remote(concurrency_groups={"watch": 2, "pass_on": 1}, max_restarts=0)(RewardModelProcess)


class RewardModelRankCalls(ProcessCalls):
    """Calls to one rank of the reward model."""

    def setup(
        self,
        config: Config,
        rank: int,
        world_size: int,
        init_method: str,
        visible_devices: str | None,
        prompts: Mapping[str, Ref[PromptSource]],
    ) -> Ref[None]:
        return self.handle.setup.remote(config, rank, world_size, init_method, visible_devices, prompts)


class RewardModelCalls(RankCalls):
    """Calls to all ranks of the reward model."""

    def score(
        self, arguments: Sequence[tuple[list[TaskPart], *tuple[Ref[TrajectoryBuffers], ...]]]
    ) -> GroupCall[dict[int, float]]:
        return self.call_each(RewardModelProcess.score, arguments)


@dataclass
class RewardModelGroup:
    """All ranks of the reward model: a ports.ResponseScorer."""

    processes: Sequence[ProcessCalls]
    nodes: Sequence[int]
    ranks: RankMap
    watch: Watch

    @cached_property
    def calls(self) -> RewardModelCalls:
        return RewardModelCalls(self.processes, self.nodes, self.watch)

    @cached_property
    def _delivery(self) -> Delivery:
        return Delivery([self.processes[rank] for rank in self.ranks.reporting], self.watch)

    def score(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[np.ndarray]:
        """Implement ResponseScorer.score. Data-parallel ranks score parts with about equally many tokens."""
        scalars = [of_task for _, of_task in results]
        parts = split_tasks(tasks, scalars, len(self.ranks.reporting))
        rows = [Rows.of([part.rows for part in of_rank]) for of_rank in parts]
        trajectories = self._delivery.deliver([chunk for chunk, _ in results], rows)
        given = [[part for part in of_rank if len(part.rows)] for of_rank in parts]
        by_rank = self.calls.score([(given[dp], *trajectories[dp]) for dp in self.ranks.dp_rank_of]).results()
        scores = {number: score for rank in self.ranks.reporting for number, score in by_rank[rank].items()}
        return join_scores(tasks, scalars, scores)

    def spans(self) -> list[Span]:
        return drain_spans(self.watch, self.processes)


def reward_model_role(ranks: RankMap) -> Role:
    return Role(
        name="reward model rank",
        actor=RewardModelActor,
        guests=Guests("reward_model", len(ranks.dp_rank_of)),
        set_up=_set_up,
        group=lambda processes, nodes, watch: RewardModelGroup(processes, nodes, ranks, watch),
    )


def _set_up(context: SetUpContext, processes: Sequence[ProcessCalls], visible: Sequence[str | None]) -> list[Ref[None]]:
    address, size = context.rendezvous(processes), len(processes)
    return [
        RewardModelRankCalls(process.handle).setup(context.config, rank, size, address, devices, context.prompts)
        for rank, (process, devices) in enumerate(zip(processes, visible, strict=True))
    ]


if TYPE_CHECKING:
    _port: type[ResponseScorer] = RewardModelGroup
