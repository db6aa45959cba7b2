"""Teachers on ranks of their own: the process of a rank, the group of one teacher, and the group of all teachers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import ray

from mcore_rl.config.models import TeacherConfig
from mcore_rl.data.packing import SequenceCost, divide_in_order
from mcore_rl.resolved.placement import teacher_ranks
from mcore_rl.runtime.calls import ProcessHandle, Ref
from mcore_rl.runtime.delivery import rows_by_rank
from mcore_rl.runtime.health import Starts, Watch
from mcore_rl.runtime.phases import Phase, Stages, staged
from mcore_rl.runtime.roles.base import RankProcess, SetUpContext
from mcore_rl.runtime.roles.groups import RankGroup, RankMap, Role
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.types import Batch, RankShares, ScoreColumn, ScoreRefs, Span, TrajectoryBuffers

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.teacher_ranks import MegatronTeacher

SamplesByReader = Mapping[int, np.ndarray]
"""Samples of a teacher's rank, int64 [b], by the data-parallel rank of the actor that reads their scores."""


@marks_errors
class TeacherRankProcess(RankProcess):
    """One rank of a teacher."""

    model: MegatronTeacher
    _number: int

    def setup_teacher(self, context: SetUpContext, number: int, rank: int, world_size: int, address: str) -> None:
        """Build the rank's part of the teacher of this number in TeacherConfig.entries; see RankProcess.setup."""
        self._number = number
        self.setup(context, rank, world_size, address)

    def _build(self, context: SetUpContext, rank: int, world_size: int, address: str) -> None:
        from mcore_rl.megatron.roles.teacher_ranks import MegatronTeacher

        self.model = MegatronTeacher(context.config, self._number, rank, world_size, address)
        self.model.memory.span = self.spans.span

    def score(
        self, share: RankShares, readers: SamplesByReader, *chunks: TrajectoryBuffers
    ) -> dict[int, Ref[ScoreColumn]]:
        """Score the trained tokens of the share. A reporting rank returns a reference for each reader, other ranks {}.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        with self.spans.span("score"):
            scores = self.model.scores(share.by_update()[0], chunks)
        if not self.model.reports:
            return {}
        columns = {
            reader: ScoreColumn.of({sample: scores[sample] for sample in samples.tolist()})
            for reader, samples in readers.items()
        }
        return {reader: cast("Ref[ScoreColumn]", ray.put(column)) for reader, column in columns.items()}


TeacherRankActor = ray.remote(concurrency_groups={"watch": 2, "pass_on": 1}, max_restarts=0)(TeacherRankProcess)


@dataclass
class TeacherRanks(RankGroup[TeacherRankProcess]):
    """All ranks of the teacher `number` of TeacherConfig.entries."""

    number: int
    cost: SequenceCost

    def _begin(
        self, process: ProcessHandle[RankProcess], context: SetUpContext, rank: int, world_size: int, address: str
    ) -> Ref[None]:
        own = cast("ProcessHandle[TeacherRankProcess]", process)
        return own.call(TeacherRankProcess.setup_teacher, context, self.number, rank, world_size, address)

    def scores(self, batch: Batch, samples: np.ndarray) -> list[dict[int, Ref[ScoreColumn]]]:
        """Score samples of a batch, by the data-parallel rank of the actor. Each reporting rank returns one dictionary.
        Each data-parallel rank of the teacher scores for few ranks of the actor, and its cost differs from the mean by
        at most the longest sequence's.

        Shapes: samples int64 [b], at least one.
        """
        size = len(self.ranks.reporting)
        dp_ranks = np.zeros(len(batch), np.int32)
        dp_ranks[samples] = divide_in_order(self.cost.of(batch.total_tokens[samples]), batch.dp_ranks[samples], size)
        own = replace(batch, dp_ranks=dp_ranks, updates=(samples,))
        rows, places = rows_by_rank(own, size)
        trajectories = self._delivery.deliver(batch.chunks, rows)
        shares = own.shares(size, places)
        readers = [_by_reader(batch, samples[dp_ranks[samples] == dp]) for dp in range(size)]
        # Every rank takes part, even a data-parallel rank without samples.
        arguments = [(shares[dp], readers[dp], *trajectories[dp]) for dp in self.ranks.dp_rank_of]
        by_rank = self.call_each(TeacherRankProcess.score, arguments).results()
        return [by_rank[rank] for rank in self.ranks.reporting]


@dataclass
class TeacherRankGroup:
    """All teachers on ranks of their own: a ports.Teacher. They share devices, so they take turns.

    num_dp_ranks: data-parallel ranks of the actor.
    """

    teachers: Sequence[TeacherRanks]
    stages: Stages
    num_dp_ranks: int

    @property
    def processes(self) -> Sequence[ProcessHandle[TeacherRankProcess]]:
        return [process for teacher in self.teachers for process in teacher.processes]

    def set_up(self, context: SetUpContext, visible: Sequence[str | None]) -> Starts:
        """Begin the set-up of the ranks of all teachers. On GPUs, which teachers share, every teacher but the last has
        freed them when the next one begins."""
        starts: Starts = {}
        devices = iter(visible)
        for teacher in self.teachers:
            if starts and any(visible):
                teacher.watch.get_started(starts)
            starts |= teacher.set_up(context, [next(devices) for _ in teacher.processes])
        return starts

    @staged("teacher", Phase.REPLACE, guest=True)
    def scores(self, batch: Batch) -> ScoreRefs:
        """Implement Teacher.scores."""
        numbers = np.zeros(len(batch), np.int32) if batch.teachers is None else batch.teachers
        trained = np.unique(np.concatenate([*batch.updates, np.empty(0, np.int64)]))
        trained = trained[batch.trained_tokens[trained] > 0]
        columns: list[list[Ref[ScoreColumn]]] = [[] for _ in range(self.num_dp_ranks)]
        for teacher in self.teachers:
            samples = trained[numbers[trained] == teacher.number]
            for found in teacher.scores(batch, samples) if len(samples) else []:
                for reader, column in found.items():
                    columns[reader].append(column)
        return ScoreRefs(tuple(map(tuple, columns)))

    def spans(self) -> list[Span]:
        return [span for teacher in self.teachers for span in teacher.spans()]


def teacher_ranks_role(teacher: TeacherConfig, ranks: Sequence[RankMap], num_dp_ranks: int, cost: SequenceCost) -> Role:
    """Return the role of teachers on ranks of their own. `ranks`: of each teacher. `num_dp_ranks`: of the actor.
    `cost`: of a sequence, by which samples are divided."""

    def group(
        processes: Sequence[ProcessHandle[TeacherRankProcess]], nodes: Sequence[int], watch: Watch, stages: Stages
    ) -> TeacherRankGroup:
        teachers = []
        for number, own in enumerate(ranks):
            part = slice(number * teacher.num_ranks, (number + 1) * teacher.num_ranks)
            teachers.append(TeacherRanks(processes[part], nodes[part], watch, own, stages, number, cost))
        return TeacherRankGroup(teachers, stages, num_dp_ranks)

    return Role(name="teacher rank", actor=TeacherRankActor, guests=teacher_ranks(teacher), group=group)


def _by_reader(batch: Batch, samples: np.ndarray) -> SamplesByReader:
    readers = batch.dp_ranks[samples]
    return {reader: samples[readers == reader] for reader in np.unique(readers).tolist()}
