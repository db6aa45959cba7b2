"""Judge engines: processes beside the rollout's, and the ResponseScorer that the driver has of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from mcore_rl.config.reward import JudgeConfig
from mcore_rl.config.schema import Config
from mcore_rl.ports import ResponseScorer
from mcore_rl.rollout.judge_worker import Share, shares
from mcore_rl.rollout.task_parts import join_scores
from mcore_rl.runtime.groups import drain_spans
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.placement import Guests, Slot
from mcore_rl.runtime.processes import RunProcess, see_only
from mcore_rl.runtime.roles import Role, Surroundings
from mcore_rl.types import Metric, RolloutResult, RolloutTask, Span, TrajectoryBuffers, merge_metrics


@ray.remote(concurrency_groups={"watch": 2}, max_restarts=0)
class JudgeProcess(RunProcess):
    """One judge engine. It sleeps but while it scores: on GPUs others need the memory, and everywhere an engine that
    remembers no earlier prefixes answers a resumed run as it answers an uninterrupted one."""

    def setup(self, config: Config, visible_devices: tuple[int, ...] | None, prompts: Mapping[str, Any]) -> None:
        see_only(visible_devices)
        from mcore_rl.rollout.building import build_judge

        with self.spans.span("setup"):
            resolved = {name: ray.get(reference) for name, reference in prompts.items()}
            self.worker = build_judge(config, self.name, resolved)
            self.worker.judge.engine.sleep(keep_weights=True)

    def score(self, given: list[Share], *chunks: TrajectoryBuffers) -> tuple[dict[int, float], dict[str, Metric]]:
        """As JudgeWorker.score."""
        engine = self.worker.judge.engine
        with self.spans.span("judge"):
            for part in ("weights", "kv_cache"):
                engine.wake_up(part)
            found = self.worker.score(given, chunks)
            engine.sleep(keep_weights=True)
        return found


@dataclass
class JudgeGroup:
    """All judge engines: a ports.ResponseScorer."""

    handles: list[Any]
    watch: Watch
    _figures: dict[str, Metric] = field(default_factory=dict, init=False)

    def score(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[np.ndarray]:
        """Every engine scores a part of about as many tokens; what it says goes into the tasks' records.

        Shapes: float32 [B] per task.
        """
        scalars = [of_task for _, of_task in results]
        calls = [
            handle.score.remote(given, *(results[share.task][0] for share in given))
            for handle, given in zip(self.handles, shares(tasks, scalars, len(self.handles)), strict=True)
            if given
        ]
        scores: dict[int, float] = {}
        for found, figures in self.watch.get(calls):
            scores |= found
            if all(task.prompt_set == "train" for task in tasks):
                self._figures = merge_metrics([self._figures, figures])
        return join_scores(tasks, scalars, scores)

    def take_figures(self) -> dict[str, Metric]:
        """Of what was scored for training since the last call."""
        figures, self._figures = self._figures, {}
        return figures

    def spans(self) -> list[Span]:
        return drain_spans(self.watch, self.handles)


def judge_role(config: JudgeConfig) -> Role:
    return Role(
        name="judge engine",
        process=JudgeProcess,
        guests=Guests("judge", config.num_engines, config.tp),
        set_up=_set_up,
        group=JudgeGroup,
    )


def _set_up(around: Surroundings, handles: list[Any], slots: Sequence[Slot]) -> list[Any]:
    return [
        handle.setup.remote(around.config, slot.devices, around.prompts)
        for handle, slot in zip(handles, slots, strict=True)
    ]


if TYPE_CHECKING:
    _port: type[ResponseScorer] = JudgeGroup
