"""Judge engines: processes beside the rollout's, and the ResponseScorer that the driver has of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from mcore_rl.config.reward import JudgeConfig
from mcore_rl.config.roles import EngineRole
from mcore_rl.config.rules.judge import server_key, template_text
from mcore_rl.config.schema import Config
from mcore_rl.data.tokenizer import eos_token_ids, load_tokenizer
from mcore_rl.data.transcripts import PromptSource
from mcore_rl.engines.registry import engine_class
from mcore_rl.ports import ResponseScorer
from mcore_rl.resolved.placement import Guests
from mcore_rl.rewards.judge.answers import EngineAnswerer
from mcore_rl.rewards.judge.judge import Judge
from mcore_rl.rewards.judge.prompts import JudgePrompts, Template
from mcore_rl.rewards.judge.scores import score_reader
from mcore_rl.rewards.judge.server import ServerAnswerer, served_model
from mcore_rl.rewards.judge.worker import JudgeWorker, Share, shares
from mcore_rl.rewards.task_parts import join_scores
from mcore_rl.runtime.delivery import Delivery, Rows
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.roles.base import Role, RunProcess, Surroundings, drain_spans, see_only
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.types import Metric, RolloutResult, RolloutTask, Span, TrajectoryBuffers, merge_metrics


@ray.remote(concurrency_groups={"watch": 2}, max_restarts=0)
@marks_errors
class JudgeProcess(RunProcess):
    """One judge engine, or who asks a server."""

    def setup(self, config: Config, visible_devices: str | None, prompts: Mapping[str, Any], key: str | None) -> None:
        """`key` is the server's."""
        see_only(visible_devices)

        with self.spans.span("setup"):
            resolved = {name: ray.get(reference) for name, reference in prompts.items()}
            self.worker = build_judge(config, self.name, resolved, key)

    def score(self, given: list[Share], trajectories: TrajectoryBuffers) -> tuple[dict[int, float], dict[str, Metric]]:
        """As JudgeWorker.score."""
        with self.spans.span("judge"), self.worker.judge.answerer.awake():
            return self.worker.score(given, trajectories)


@dataclass
class JudgeGroup:
    """All judge engines: a ports.ResponseScorer."""

    handles: list[Any]
    watch: Watch
    _figures: dict[str, Metric] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._delivery = Delivery(self.handles, self.watch)

    def score(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[np.ndarray]:
        """Every engine scores a part of about as many tokens; what it says goes into the tasks' records.

        Shapes: float32 [B] per task.
        """
        scalars = [of_task for _, of_task in results]
        by_judge = shares(tasks, scalars, len(self.handles))
        rows = [Rows.of(_rows(given, len(tasks))) for given in by_judge]
        trajectories = self._delivery.deliver([chunk for chunk, _ in results], rows)
        calls = [
            handle.score.remote(given, *fetched)
            for handle, given, fetched in zip(self.handles, by_judge, trajectories, strict=True)
            if given
        ]
        scores: dict[int, float] = {}
        for engine_scores, figures in self.watch.get(calls):
            scores |= engine_scores
            if all(task.prompt_set == "train" for task in tasks):
                self._figures = merge_metrics([self._figures, figures])
        return join_scores(tasks, scalars, scores)

    def take_figures(self) -> dict[str, Metric]:
        """Of what was scored for training since the last call."""
        figures, self._figures = self._figures, {}
        return figures

    def spans(self) -> list[Span]:
        return drain_spans(self.watch, self.handles)


def _rows(given: Sequence[Share], num_tasks: int) -> list[np.ndarray]:
    """Of every task, none of those of which a judge has no share."""
    rows = [np.empty(0, np.int64)] * num_tasks
    for share in given:
        rows[share.task] = share.part.rows
    return rows


def judge_role(config: JudgeConfig) -> Role:
    return Role(
        name="judge engine",
        process=JudgeProcess,
        guests=Guests("judge", config.num_engines, config.tp) if config.url is None else Guests("judge", 1),
        set_up=_set_up,
        group=lambda handles, nodes, watch: JudgeGroup(handles, watch),
    )


def _set_up(around: Surroundings, handles: list[Any], visible: Sequence[str | None]) -> list[Any]:
    return [
        handle.setup.remote(around.config, devices, around.prompts, server_key(around.config.judge))
        for handle, devices in zip(handles, visible, strict=True)
    ]


def build_judge(config: Config, name: str, prompts: Mapping[str, PromptSource], key: str | None) -> JudgeWorker:
    """`name` as in build_engine, `key` as in setup."""
    answerer = _engine(config, name) if config.judge.url is None else _server(config, key)
    judge = Judge(answerer, score_reader(config.judge), config.judge, seed=config.run.seed)
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.hf_path)
    return JudgeWorker(judge, prompts, tokenizer, config.rollout.stop)


def _server(config: Config, key: str | None) -> ServerAnswerer:
    judge, text = config.judge, template_text(config.judge)
    prompts = None if judge.tokenizer_path is None else JudgePrompts(load_tokenizer(judge.tokenizer_path), text)
    return ServerAnswerer(
        judge,
        Template(text) if prompts is None else prompts.template,
        prompts,
        model=served_model(judge, key),
        key=key,
        max_failed=config.reward.max_error_fraction,
    )


def _engine(config: Config, name: str) -> EngineAnswerer:
    """On judge.hf_path with its weights, which stay as they are; it sleeps."""
    role = EngineRole.judge(config)
    hf_path = role.model.hf_path
    tokenizer = load_tokenizer(role.model.tokenizer_path or hf_path, role.tokenizer)
    engine = engine_class(role.section.engine)(
        hf_path,
        role.section,
        dtype=role.model.dtype,
        eos_token_ids=eos_token_ids(tokenizer, hf_path, role.tokenizer),
        seed=config.run.seed,
        name=name,
        timeout_seconds=config.cluster.collective_timeout_seconds,
        names=role,
    )
    engine.sleep(keep_weights=True)
    return EngineAnswerer(engine, JudgePrompts(tokenizer, template_text(config.judge)), tokenizer, config.judge)


if TYPE_CHECKING:
    _port: type[ResponseScorer] = JudgeGroup
