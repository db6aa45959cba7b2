"""The reward model's processes, and the driver's handle of them, which scores tasks of the rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from mcore_rl.config.schema import Config
from mcore_rl.data.trajectories import split_rows
from mcore_rl.ports import ResponseScorer
from mcore_rl.resolved.placement import Guests
from mcore_rl.rewards.task_parts import TaskPart, join_scores, split_tasks
from mcore_rl.runtime.delivery import Delivery, Rows
from mcore_rl.runtime.fanout import FanOut
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.roles.base import RankMap, RankProcess, Role, Surroundings, drain_spans, see_only, set_up_ranks
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.types import RolloutResult, RolloutTask, Span, TrajectoryBuffers


@ray.remote(concurrency_groups={"watch": 2, "pass_on": 1}, max_restarts=0)
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
        prompts: Mapping[str, Any],
    ) -> None:
        see_only(visible_devices)
        from mcore_rl.megatron.roles.reward_model import MegatronRewardModel
        from mcore_rl.rewards.model_inputs import RewardInputs

        with self.spans.span("setup"):
            self.inputs = RewardInputs(config.reward_model, config.model, config.rollout)
            # The tokens of a trajectory say it all; only a conversation that is encoded anew needs its prompt.
            self.prompts = {name: ray.get(ref) for name, ref in prompts.items()} if self.inputs.reencoded else {}
            self.model = MegatronRewardModel(config, rank, world_size, init_method)
        self.model.memory.span = self.spans.span

    def score(self, parts: list[TaskPart], *trajectories: TrajectoryBuffers) -> dict[int, float]:
        """Scores by number, on ranks of the last stage; the trajectories are those of the parts, one after the other,
        and absent where these are empty."""
        with self.spans.span("score"):
            sequences: dict[int, np.ndarray] = {}
            counts = [len(part.rows) for part in parts]
            chunks = split_rows(trajectories[0], counts) if trajectories else []
            for part, chunk in zip(parts, chunks, strict=True):
                name = part.prompt_set
                ids = self.inputs.of(chunk, part.prompt_rows, self.prompts.get(name), f"data.{name}")
                sequences |= zip(part.numbers.tolist(), ids, strict=True)
            return self.model.score(sequences)


@dataclass
class RewardModelGroup:
    """All ranks of the reward model: a ports.ResponseScorer."""

    handles: list[Any]
    nodes: Sequence[int]
    """Of each rank."""
    ranks: RankMap
    watch: Watch

    def __post_init__(self) -> None:
        self._fan_out = FanOut(self.handles, self.nodes)
        readers = [self.handles[speaker] for speaker in self.ranks.speakers]
        self._delivery = Delivery(readers, self.watch)

    def score(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[np.ndarray]:
        """Every data-parallel rank scores a part of about as many tokens. Shapes: float32 [B] per task.

        Raises: NonFiniteError naming the response.
        """
        parts = split_tasks(tasks, [scalars for _, scalars in results], len(self.ranks.speakers))
        chunks = [chunk for chunk, _ in results]
        trajectories = self._delivery.deliver(chunks, [Rows.of([part.rows for part in of_rank]) for of_rank in parts])
        given = [[part for part in of_rank if len(part.rows)] for of_rank in parts]
        calls = self._fan_out.begin("score", [(given[dp], *trajectories[dp]) for dp in self.ranks.dp_rank_of])
        scores_by_rank = calls.results(self.watch.get(calls.references))
        scores = {number: score for speaker in self.ranks.speakers for number, score in scores_by_rank[speaker].items()}
        return join_scores(tasks, [scalars for _, scalars in results], scores)

    def spans(self) -> list[Span]:
        return drain_spans(self.watch, self.handles)


def reward_model_role(ranks: RankMap) -> Role:
    return Role(
        name="reward model rank",
        process=RewardModelProcess,
        guests=Guests("reward_model", len(ranks.dp_rank_of)),
        set_up=_set_up,
        group=lambda handles, nodes, watch: RewardModelGroup(handles, nodes, ranks, watch),
    )


def _set_up(around: Surroundings, handles: list[Any], visible: Sequence[str | None]) -> list[Any]:
    return set_up_ranks(around, handles, visible, around.prompts)


if TYPE_CHECKING:
    _port: type[ResponseScorer] = RewardModelGroup
