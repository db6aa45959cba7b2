"""Ranks of the reward model: the process of a rank, and the group of all ranks, which scores rollout tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import ray

from mcore_rl.config.rules.precision import FLOAT16, overflow_advice
from mcore_rl.data.trajectories import split_rows
from mcore_rl.resolved.placement import Guests
from mcore_rl.rewards.task_parts import TaskPart, join_scores, split_tasks
from mcore_rl.runtime.delivery import Rows
from mcore_rl.runtime.phases import Phase, staged
from mcore_rl.runtime.roles.base import RankProcess, SetUpContext
from mcore_rl.runtime.roles.groups import RankGroup, RankMap, Role
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.types import RolloutResult, RolloutTask, TrajectoryBuffers


@marks_errors
class RewardModelProcess(RankProcess):
    """One rank of the reward model."""

    def _build(self, context: SetUpContext, rank: int, world_size: int, address: str) -> None:
        from mcore_rl.megatron.roles.reward_model import MegatronRewardModel
        from mcore_rl.rewards.model_inputs import RewardInputs

        config, prompts = context.config, context.prompts
        self.inputs = RewardInputs(config.reward_model, config.model, config.rollout)
        # Prompts are needed only if conversations are encoded again; otherwise the trajectory's tokens suffice.
        self.prompts = {name: ray.get(ref) for name, ref in prompts.items()} if self.inputs.reencoded else {}
        self.model = MegatronRewardModel(config, rank, world_size, address)
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


@dataclass
class RewardModelGroup(RankGroup[RewardModelProcess]):
    """All ranks of the reward model: a ports.ResponseScorer. `advice` ends errors about scores that are not finite."""

    advice: str = ""

    @staged("reward_model", Phase.KEEP, guest=True)  # dynamic sampling may generate another batch with the same weights
    def score(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[np.ndarray]:
        """Implement ResponseScorer.score. Data-parallel ranks score parts with about equally many tokens."""
        scalars = [of_task for _, of_task in results]
        parts = split_tasks(tasks, scalars, len(self.ranks.reporting))
        rows = [Rows.of([part.rows for part in of_rank]) for of_rank in parts]
        trajectories = self._delivery.deliver([chunk for chunk, _ in results], rows)
        given = [[part for part in of_rank if len(part.rows)] for of_rank in parts]
        arguments = [(given[dp], *trajectories[dp]) for dp in self.ranks.dp_rank_of]
        by_rank = self.call_each(RewardModelProcess.score, arguments).results()
        scores = {number: score for rank in self.ranks.reporting for number, score in by_rank[rank].items()}
        return join_scores(tasks, scalars, scores, self.advice)


def reward_model_role(ranks: RankMap, dtype: str) -> Role:
    """Return the role of the reward model's ranks. dtype: model.dtype, the data type of its parameters."""
    advice = overflow_advice("model.dtype") if dtype == FLOAT16 else ""
    return Role(
        name="reward model rank",
        actor=RewardModelActor,
        guests=Guests("reward_model", len(ranks.dp_rank_of)),
        group=lambda processes, nodes, watch, stages: RewardModelGroup(processes, nodes, watch, ranks, stages, advice),
    )
