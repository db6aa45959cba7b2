"""Teachers on engines or servers: their processes, and the group of all of them, which scores the tokens of batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import ray

from mcore_rl.config.models import TeacherConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.rules.teacher import server_key
from mcore_rl.config.schema import Config
from mcore_rl.data.packing import divide_in_order
from mcore_rl.data.trajectories import after_hints
from mcore_rl.engines.server.client import connect
from mcore_rl.engines.settings import EngineSettings
from mcore_rl.errors import McoreRLError, TeacherError
from mcore_rl.ports import TokenScorer
from mcore_rl.resolved.layout import model_arguments
from mcore_rl.resolved.model import policy_config
from mcore_rl.resolved.placement import Guests
from mcore_rl.resolved.teacher import teacher_on_engines
from mcore_rl.runtime.calls import ProcessHandle, Ref, passed
from mcore_rl.runtime.delivery import Delivery, rows_by_rank
from mcore_rl.runtime.health import Starts, Watch
from mcore_rl.runtime.phases import Phase, Stages, staged
from mcore_rl.runtime.roles.base import RunProcess, SetUpContext
from mcore_rl.runtime.roles.groups import Role, drain_spans
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.types import Batch, ScoreColumn, ScoreRefs, Span, TokenScores, TokenSequence, TrajectoryBuffers

if TYPE_CHECKING:
    from mcore_rl.engines.vllm.engine import VllmEngine


@dataclass(frozen=True)
class ScoredSamples:
    """Samples of a batch that one teacher scores for one data-parallel rank of the actor.

    Shapes: samples int64 [b]; rows int32 [b], rows of the trajectories that the process receives.
    """

    teacher: int
    samples: np.ndarray
    rows: np.ndarray


@marks_errors
class TeacherProcess(RunProcess):
    """One engine with a teacher, or the client of all servers."""

    _engine: VllmEngine | None = None

    def setup(self, context: SetUpContext, number: int | None, key: str | None) -> None:
        """Build the teacher of this number in TeacherConfig.entries; None: the client. `key` is the API key of the
        servers."""
        context.prepare_environment()
        with self.spans.span("setup"):
            self._config = config = context.config
            role = ModelRole.policy(config.actor, config.model)
            self._vocab_size = model_arguments(policy_config(role)[0], role.checkpoint).vocab_size
            self._scorers: dict[int, TokenScorer]
            if number is None:
                entries = enumerate(config.teacher.entries)
                self._scorers = {place: connect(config.teacher, entry, key) for place, entry in entries}
            else:
                self._engine = _engine(config, number, self.name)
                self._scorers = {number: self._engine}

    def score(self, parts: list[ScoredSamples], trajectories: TrajectoryBuffers) -> list[Ref[ScoreColumn]]:
        """Score the trained tokens of samples, which have at least one each, after the prompts with hints where there
        are hints. Returns a reference per part.

        Raises: TeacherError if a server does not answer; McoreRLError for tokens that were not sampled at temperature
        1.
        """
        trajectories = after_hints(trajectories)
        with self.spans.span("score"), self._awake():
            columns: dict[int, ScoreColumn] = {}
            for number in dict.fromkeys(part.teacher for part in parts):
                own = [index for index, part in enumerate(parts) if part.teacher == number]
                wanted = [_wanted(trajectories, row) for index in own for row in parts[index].rows.tolist()]
                # One call for all parts, so that as many sequences as possible are computed at the same time.
                found = self._scorers[number].score([sequence for sequence, _ in wanted], self._config.teacher.top_k)
                scores = iter([each.take(trained) for each, (_, trained) in zip(found, wanted, strict=True)])
                for index in own:
                    columns[index] = ScoreColumn.of({sample: next(scores) for sample in parts[index].samples.tolist()})
                    self._check(number, columns[index].scores)
            return [cast("Ref[ScoreColumn]", ray.put(columns[index])) for index in range(len(parts))]

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Keep an engine in device memory during a block."""
        if self._engine is None:
            yield
            return
        for part in ("weights", "kv_cache"):
            self._engine.wake_up(part)
        yield
        self._engine.sleep(keep_weights=True)

    def _check(self, number: int, scores: TokenScores) -> None:
        if (ids := scores.top_ids) is None or not ids.size:
            return
        given, remedy = self._config.teacher.entries[number].given, "set teacher.in_loss=0 and teacher.in_advantage=1"
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            raise TeacherError(
                f"{given} returned token {outside[0]} among the most probable ones, and the policy has "
                f"{self._vocab_size} tokens; {remedy}"
            )
        ordered = np.sort(ids, axis=1)
        twice = ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]]
        if len(twice):
            raise TeacherError(
                f"{given} returned token {twice[0]} twice among the most probable ones of one place, so that its "
                f"probability would count twice; {remedy}"
            )


TeacherActor = ray.remote(concurrency_groups={"watch": 2}, max_restarts=0)(TeacherProcess)


@dataclass
class TeacherGroup:
    """All teachers on engines or servers: a ports.Teacher.

    per_teacher: number of engines of each teacher, in the order of the teachers; 0: one client for all servers.
    num_dp_ranks: data-parallel ranks of the actor.
    """

    processes: Sequence[ProcessHandle[TeacherProcess]]
    watch: Watch
    stages: Stages
    per_teacher: int
    num_dp_ranks: int

    def __post_init__(self) -> None:
        self._delivery = Delivery(self.processes, self.watch)

    def set_up(self, context: SetUpContext, visible: Sequence[str | None]) -> Starts:
        """Begin the set-up of all processes, each with the GPUs that it may see."""
        key = server_key(context.config.teacher)
        starting: Starts = {}
        for index, (process, devices) in enumerate(zip(self.processes, visible, strict=True)):
            number = index // self.per_teacher if self.per_teacher else None
            own = replace(context, visible_devices=devices)
            starting[process.call(TeacherProcess.setup, own, number, key)] = [process]
        return starting

    @staged("teacher", Phase.REPLACE, guest=True)
    def scores(self, batch: Batch) -> ScoreRefs:
        """Implement Teacher.scores. Engines of one teacher score about equally many tokens."""
        teachers = np.zeros(len(batch), np.int32) if batch.teachers is None else batch.teachers
        process_of = assign(batch, teachers, self.per_teacher)
        # The processes are the readers of the samples that they score.
        updates = tuple(update[process_of[update] >= 0] for update in batch.updates)
        rows, places = rows_by_rank(replace(batch, dp_ranks=process_of, updates=updates), len(self.processes))
        trajectories = self._delivery.deliver(batch.chunks, rows)
        samples = np.unique(np.concatenate([*updates, np.empty(0, np.int64)]))
        calls: list[Ref[list[Ref[ScoreColumn]]]] = []
        ranks: list[list[int]] = []
        for number, (process, fetched) in enumerate(zip(self.processes, trajectories, strict=True)):
            own = samples[process_of[samples] == number]
            if len(own):
                pairs = np.stack([teachers[own], batch.dp_ranks[own]], axis=1)
                kinds, kind_of = np.unique(pairs, axis=0, return_inverse=True)
                members = [own[kind_of == kind] for kind in range(len(kinds))]
                parts = [
                    ScoredSamples(teacher, part, places[part])
                    for teacher, part in zip(kinds[:, 0].tolist(), members, strict=True)
                ]
                calls.append(process.call(TeacherProcess.score, parts, *map(passed, fetched)))
                ranks.append(kinds[:, 1].tolist())
        columns: defaultdict[int, list[Ref[ScoreColumn]]] = defaultdict(list)
        for of_process, found in zip(ranks, self.watch.get(calls), strict=True):
            for dp, column in zip(of_process, found, strict=True):
                columns[dp].append(column)
        return ScoreRefs(tuple(tuple(columns[dp]) for dp in range(self.num_dp_ranks)))

    def spans(self) -> list[Span]:
        return drain_spans(self.watch, self.processes)


def assign(batch: Batch, teachers: np.ndarray, per_teacher: int) -> np.ndarray:
    """Assign every response to a process of its teacher, int32 [B]; -1 without a teacher or a trained token.

    Engines of a teacher get consecutive responses in the order of the data-parallel ranks, with about equally many
    tokens: so each rank receives scores from few of them.

    Shapes: teachers int32 [B], -1 without a teacher.
    """
    process_of = np.full(len(batch), -1, np.int32)
    scored = (teachers >= 0) & (batch.trained_tokens > 0)
    if not per_teacher:
        process_of[scored] = 0
        return process_of
    for number in np.unique(teachers[scored]).tolist():
        own = np.flatnonzero(scored & (teachers == number))
        places = divide_in_order(batch.total_tokens[own], batch.dp_ranks[own], per_teacher)
        process_of[own] = number * per_teacher + places
    return process_of


def teacher_role(teacher: TeacherConfig, num_dp_ranks: int) -> Role:
    """Return the role of teachers on engines or servers. `num_dp_ranks`: of the actor."""
    engines, models = teacher.num_engines, len(teacher.entries)
    return Role(
        name="teacher engine" if engines else "teacher client",
        actor=TeacherActor,
        guests=Guests("teacher", models * engines, teacher.tp, models) if engines else Guests("teacher", 1),
        group=lambda processes, nodes, watch, stages: TeacherGroup(processes, watch, stages, engines, num_dp_ranks),
    )


def _wanted(trajectories: TrajectoryBuffers, row: int) -> tuple[TokenSequence, np.ndarray]:
    """Return a trajectory up to its last trained token, and the indices of its trained tokens from the first response
    token.

    Raises: McoreRLError for another temperature than 1.
    """
    response = slice(int(trajectories.response_offsets[row]), int(trajectories.response_offsets[row + 1]))
    trained = np.flatnonzero(trajectories.trained[response])
    if (temperatures := trajectories.temperatures) is not None:
        sampled = temperatures[response][trained] if temperatures.ndim else temperatures[None]
        other = sampled[~np.isnan(sampled) & (sampled != 1)]
        if len(other):
            raise McoreRLError(
                f"a response was sampled at temperature {other[0]:g}, and teachers on engines or servers compute "
                "log-probabilities at temperature 1; remove temperatures from rows and from session.generate, or load "
                "the teacher on Megatron ranks"
            )
    start = int(trajectories.prompt_tokens[row])
    first = int(trajectories.token_offsets[row])
    length = start + int(trained[-1]) + 1 if len(trained) else start
    return TokenSequence(trajectories.tokens[first : first + length], start), trained


def engine_settings(config: Config, number: int, name: str) -> EngineSettings:
    """Return the settings of an engine of the teacher of this number, which computes as the policy's engines do.

    Raises: ConfigError for an unreadable config.json.
    """
    role = teacher_on_engines(config, config.teacher.entries[number])
    return EngineSettings(
        role.model.hf_path,
        role.section,
        dtype=role.model.dtype,
        seed=config.run.seed,
        timeout_seconds=config.cluster.collective_timeout_seconds,
        name=name,
        float32_head=role.model.float32_head,
        float32_router=role.model.float32_router,
        names=role,
    )


def _engine(config: Config, number: int, name: str) -> VllmEngine:
    """Build a sleeping engine with the teacher's weights, which never change."""
    from mcore_rl.engines.vllm.engine import VllmEngine

    engine = VllmEngine(engine_settings(config, number, name))
    # It shares its device with other processes; `score` wakes it.
    engine.sleep(keep_weights=True)
    return engine
