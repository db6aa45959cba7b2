"""Judge engines: their process, and their group, which scores tasks of the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import ray

from mcore_rl.config.reward import JudgeConfig
from mcore_rl.config.roles import EngineRole
from mcore_rl.config.rules.judge import server_key, template_text
from mcore_rl.config.schema import Config
from mcore_rl.data.tokenizer import eos_token_ids, load_tokenizer
from mcore_rl.engines.registry import engine_class
from mcore_rl.engines.settings import EngineSettings
from mcore_rl.resolved.placement import Guests
from mcore_rl.rewards.judge.answers import EngineAnswerer
from mcore_rl.rewards.judge.judge import Judge
from mcore_rl.rewards.judge.prompts import JudgePrompts, Template
from mcore_rl.rewards.judge.scores import score_reader
from mcore_rl.rewards.judge.server import ServerAnswerer, served_model
from mcore_rl.rewards.task_parts import TaskPart, TranscriptReader, join_scores, split_tasks
from mcore_rl.runtime.calls import ProcessHandle, passed
from mcore_rl.runtime.delivery import Delivery, Rows
from mcore_rl.runtime.health import Starts, Watch
from mcore_rl.runtime.phases import Phase, Stages, staged
from mcore_rl.runtime.roles.base import RunProcess, SetUpContext
from mcore_rl.runtime.roles.groups import Role, drain_spans
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.types import Metric, RolloutResult, RolloutTask, Span, TrajectoryBuffers, merge_metrics


@marks_errors
class JudgeProcess(RunProcess):
    """One judge engine, or a client of a judge server."""

    def setup(self, context: SetUpContext, key: str | None) -> None:
        """Build the judge. `key` is the API key of the server."""
        context.prepare_environment()
        with self.spans.span("setup"):
            config, judge = context.config, context.config.judge
            prompts = {name: ray.get(reference) for name, reference in context.prompts.items()}
            answerer = _engine(config, self.name) if judge.url is None else _server(config, key)
            tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.hf_path)
            reader = TranscriptReader(prompts, tokenizer, config.rollout.stop)
            self.judge = Judge(answerer, score_reader(judge), reader, judge, config.run.seed)

    def score(
        self, parts: list[TaskPart], trajectories: TrajectoryBuffers
    ) -> tuple[dict[int, float], dict[str, Metric]]:
        """Score parts of tasks; see Judge.score."""
        with self.spans.span("judge"), self.judge.answerer.awake():
            return self.judge.score(parts, trajectories)


JudgeActor = ray.remote(concurrency_groups={"watch": 2}, max_restarts=0)(JudgeProcess)


@dataclass
class JudgeGroup:
    """All judge engines: a ports.ResponseScorer."""

    processes: Sequence[ProcessHandle[JudgeProcess]]
    watch: Watch
    stages: Stages
    _metrics: dict[str, Metric] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._delivery = Delivery(self.processes, self.watch)

    def set_up(self, context: SetUpContext, visible: Sequence[str | None]) -> Starts:
        """Begin the set-up of all processes, each with the GPUs that it may see."""
        key = server_key(context.config.judge)
        return {
            process.call(JudgeProcess.setup, replace(context, visible_devices=devices), key): [process]
            for process, devices in zip(self.processes, visible, strict=True)
        }

    @staged("judge", Phase.KEEP, guest=True)  # dynamic sampling may generate another batch with the same weights
    def score(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[np.ndarray]:
        """Implement ResponseScorer.score. Engines score parts with about equally many tokens, and write their answers
        into the tasks' records."""
        scalars = [of_task for _, of_task in results]
        by_judge = split_tasks(tasks, scalars, len(self.processes))
        rows = [Rows.of([part.rows for part in parts]) for parts in by_judge]
        trajectories = self._delivery.deliver([chunk for chunk, _ in results], rows)
        calls = [
            process.call(JudgeProcess.score, given, *map(passed, fetched))
            for process, parts, fetched in zip(self.processes, by_judge, trajectories, strict=True)
            if (given := [part for part in parts if len(part.rows)])
        ]
        scores: dict[int, float] = {}
        for engine_scores, metrics in self.watch.get(calls):
            scores |= engine_scores
            # Validation must not change the metrics of training.
            if all(task.prompt_set == "train" for task in tasks):
                self._metrics = merge_metrics([self._metrics, metrics])
        return join_scores(tasks, scalars, scores)

    def take_metrics(self) -> dict[str, Metric]:
        """Return the metrics of scoring training responses since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def spans(self) -> list[Span]:
        return drain_spans(self.watch, self.processes)


def judge_role(config: JudgeConfig) -> Role:
    return Role(
        name="judge engine",
        actor=JudgeActor,
        guests=Guests("judge", config.num_engines, config.tp) if config.url is None else Guests("judge", 1),
        group=lambda processes, nodes, watch, stages: JudgeGroup(processes, watch, stages),
    )


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
    """Build a sleeping engine on judge.hf_path. Its weights never change."""
    role = EngineRole.judge(config.judge, config.rollout, config.model)
    hf_path = role.model.hf_path
    tokenizer = load_tokenizer(role.model.tokenizer_path or hf_path, role.tokenizer)
    engine = engine_class(role.section.engine)(
        EngineSettings(
            hf_path,
            role.section,
            dtype=role.model.dtype,
            seed=config.run.seed,
            timeout_seconds=config.cluster.collective_timeout_seconds,
            name=name,
            eos_token_ids=eos_token_ids(tokenizer, hf_path, role.tokenizer),
            names=role,
        )
    )
    # It shares its device with other processes; `awake` wakes it for each call of `score`.
    engine.sleep(keep_weights=True)
    return EngineAnswerer(engine, JudgePrompts(tokenizer, template_text(config.judge)), tokenizer, config.judge)
