"""Collection of groups while the trainer updates: groups are submitted when others leave, and trained when they finish.

version 0    submit (max_staleness + 1) B groups
collect      wait for B groups that may be trained (admission.take_batch), oldest first
published    the groups in training have left: submit as many new ones
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mcore_rl.config.staleness import FINISH
from mcore_rl.data.records import join_parts, part_path
from mcore_rl.ports import PendingSave, Publisher, WorkBoard
from mcore_rl.rollout.admission import may_submit
from mcore_rl.rollout.collector import GroupSource
from mcore_rl.rollout.streaming.checkpoint import (
    FINISHED,
    RUNNING,
    UNSCORED,
    ZERO_VARIANCE,
    Bounds,
    load_groups,
    save_groups,
)
from mcore_rl.rollout.streaming.ended_groups import BY_NUMBER, EndedGroups
from mcore_rl.rollout.streaming.interface import Group, ScoreTasks, TaskStream
from mcore_rl.rollout.streaming.replay import Replay
from mcore_rl.rollout.streaming.staleness import QueueLengths, describe_staleness
from mcore_rl.types import Groups, Mean, RolloutResult, RolloutTask, SavedFile, SavedState, Total
from mcore_rl.types.json import JsonObject

FINISHED_GROUPS = "finished groups of the step"


@dataclass
class StreamingCollector:
    """Collector that submits groups ahead of their training, following the rules of `admission`.

    Admission only counts existing groups: running, finished, and in training. With dynamic sampling, a group without
    signal leaves the count when it finishes, and another replaces it. If there are more than `dynamic.max_batches`
    steps' worth of them, the excess stays in the count and fills up the step if nothing better is available, as in a
    synchronous run. All work happens while the driver waits, on its only thread.

    If groups are trained in the order of submission (see EndedGroups), the trained groups do not depend on timing,
    provided that their submission versions do not (swap=finish).
    """

    stream: TaskStream
    source: GroupSource
    steps: int
    """Total steps of the run; groups that no step would train are not submitted."""
    score: ScoreTasks | None = None
    replay: Replay | None = None
    """Schedule of an earlier run, whose steps are repeated as far as it goes."""
    drain: bool = False
    """Finish running groups before a checkpoint is saved."""
    board: WorkBoard | None = None
    """Shows the number of finished groups while a step waits for them."""
    _version: int | None = field(default=None, init=False)
    """Current weight version; None before the first publication."""
    _collected: int = field(default=0, init=False)
    """Last step whose groups were collected."""
    _in_training: int = field(default=0, init=False)
    _scoring: float = field(default=0.0, init=False)
    """Seconds of the step spent on scoring by reward models."""
    _last: float = field(default_factory=time.perf_counter, init=False)
    """Time of the last collection."""
    _paused: bool = field(default=False, init=False)
    _results: dict[int, RolloutResult] = field(default_factory=dict, init=False)
    """Results that were not processed yet, by ticket."""
    _running: dict[int, Group] = field(default_factory=dict, init=False)
    _unscored: list[Group] = field(default_factory=list, init=False)
    _ended: EndedGroups = field(init=False)
    _restored: list[Group] = field(default_factory=list, init=False)
    """Groups that were running at checkpoint time and have not been resubmitted."""
    _queue_lengths: QueueLengths = field(init=False)

    def __post_init__(self) -> None:
        self.stream.attend(self._advance)
        self._ended = EndedGroups(self._bounds)
        self._queue_lengths = QueueLengths(self._lengths)

    def published(self, version: int) -> None:
        """Start using weights of `version`; the groups in training have left."""
        self._version, self._in_training, self._paused = version, 0, False
        # Restored groups start before new ones: they are older and count against the bounds.
        restored, self._restored = self._restored, []
        with self.stream.together():
            for group in restored:
                self._running[self.stream.begin(group.task, self._results)] = group
            self._admit()

    def settle(self) -> None:
        """Wait until all running groups have finished; no group starts before the next publication."""
        self._paused = True
        while self._running:
            self.stream.wait()

    def rest(self) -> None:
        """Wait, in a replay, until all responses have the tokens of the current version."""
        if self._replayed is not None:
            self.stream.rest()

    @property
    def _replayed(self) -> Replay | None:
        """The replay, while it has steps left."""
        return self.replay if self.replay is not None and self._collected < self.replay.steps else None

    def collect(self, step: int) -> Groups:
        """Return the groups of a step: the oldest finished ones, as soon as all other groups can still be trained in
        time."""
        started, self._paused, self._scoring = time.perf_counter(), False, 0.0
        self._advance()
        while (taken := self._take()) is None:
            self._show_finished()
            self.stream.wait()
            self._score()
        if self.board is not None:
            self.board.end(FINISHED_GROUPS)
        waited = time.perf_counter() - started - self._scoring
        self._collected, self._in_training = step, len(taken)
        recorded = None if self.replay is None else self.replay.of_step.get(step)
        groups = sorted([*taken, *self._ended.give_up(taken, recorded)], key=BY_NUMBER)
        join_parts([str(group.task.records) for group in groups], self.source.records_dir, f"step_{step}")
        self.source.failures.check([group.scalars for group in groups], f"step {step}", f"rollouts/step_{step}.jsonl")
        return self._as_groups(groups, {group.number for group in taken}, waited)

    def _show_finished(self) -> None:
        if self.board is not None:
            size = self.source.prompts_per_step
            self.board.update(FINISHED_GROUPS, min(len(self._ended.finished), size), size, "groups")

    def state_dict(self) -> JsonObject:
        """Return the position for a checkpoint. No group starts between this call and start_save, so that both describe
        the same groups."""
        self._paused = True
        if self.drain:
            self.settle()
        return {**self.source.state_dict(), "collected": self._collected}

    def load_state_dict(self, state: JsonObject) -> None:
        self.source.load_state_dict(state)
        collected = state.get("collected", 0)
        assert isinstance(collected, int)
        self._collected = collected

    def start_save(self, directory: str) -> PendingSave:
        """Save the groups that no step has trained, complete or partial."""
        self._advance()
        groups: list[tuple[int | None, Group, str]] = []
        groups += [(ticket, group, RUNNING) for ticket, group in self._running.items()]
        groups += [(None, group, state) for state, of_state in self._not_running.items() for group in of_state]
        saved: Future[SavedState] = Future()
        saved.set_result(SavedState(save_groups(self.stream, Path(directory), self._bounds, groups), {}))
        self._paused = False
        self._admit()
        return saved

    def load(self, directory: str, files: Sequence[SavedFile]) -> None:
        """Load the groups of a checkpoint; partial ones continue at the next publication.

        Raises: DamagedCheckpointError, CheckpointError.
        """
        lists = {RUNNING: self._restored, **self._not_running}
        for group, state in load_groups(self.stream, Path(directory), files, self._bounds, self._task):
            lists[state].append(group)

    @property
    def _not_running(self) -> dict[str, list[Group]]:
        """Groups that have ended, by state."""
        return {
            UNSCORED: self._unscored,
            FINISHED: self._ended.finished,
            ZERO_VARIANCE: self._ended.zero_variance,
        }

    @property
    def _bounds(self) -> Bounds:
        rollout, size = self.source.rollout, self.source.prompts_per_step
        return Bounds(
            rollout.max_staleness,
            rollout.hard_staleness,
            size,
            rollout.samples_per_prompt,
            rollout.keep_sampling_mask,
        )

    def _advance(self) -> None:
        """Process finished groups and submit new ones, without waiting."""
        # Sorted by ticket, so that the order does not depend on which engine reported first.
        for ticket in sorted(self._results):
            group = self._running.pop(ticket)
            group.result = self._results.pop(ticket)
            if self.replay is not None:
                self.replay.check_same(group.number, group.scalars)
            if self.score is not None:
                self._unscored.append(group)
            else:
                self._sort(group)
        self._admit()

    def _score(self) -> None:
        if self.score is None or not self._unscored:
            return
        groups, started = self._unscored[:], time.perf_counter()
        results = [group.result for group in groups if group.result is not None]
        scored = self.score([group.task for group in groups], results)
        # Removed only now: more groups may have been appended while the models were scoring.
        self._unscored = self._unscored[len(groups) :]
        for group, result in zip(groups, scored, strict=True):
            group.result = result
            self._sort(group)
        self._scoring += time.perf_counter() - started
        self._admit()

    def _sort(self, group: Group) -> None:
        has_signal = self.source.signal(group.scalars).all()
        (self._ended.finished if has_signal else self._ended.zero_variance).append(group)

    def _admit(self) -> None:
        if self._version is not None and not self._paused:
            slots = self.stream.slots  # queries every engine, hence once and not for each group
            with self.stream.together():
                while self._may_submit(slots):
                    self._submit(self._version)
        self._queue_lengths.update()

    def _may_submit(self, slots: int) -> bool:
        if self._replayed is not None and self._version is not None:
            return self._replayed.was_submitted(self.source.next_group, self._version)
        # Groups without signal leave the count, except for those beyond max_batches steps' worth (see the class).
        size = self.source.prompts_per_step
        spare = size * (self.source.dynamic.max_batches - 1)
        finished = len(self._unscored) + len(self._ended.finished) + max(0, len(self._ended.zero_variance) - spare)
        # Groups beyond the last step would never be trained.
        wanted = size * (self.steps - self._collected)
        return len(self._running) + finished < wanted and may_submit(
            running=len(self._running),
            finished=finished,
            in_training=self._in_training,
            groups_per_version=size,
            max_staleness=self.source.rollout.max_staleness,
            running_requests=self.stream.running_requests,
            slots=slots,
            samples_per_group=self.source.rollout.samples_per_prompt,
        )

    def _submit(self, version: int) -> None:
        task = self._submitted(self.source.new_task(1), version)
        self._running[self.stream.begin(task, self._results)] = Group(task, version)

    def _task(self, number: int, row: int, version: int) -> RolloutTask:
        return self._submitted(self.source.task(np.array([row], np.int64), np.array([number], np.int64)), version)

    def _submitted(self, task: RolloutTask, version: int) -> RolloutTask:
        """Return the task of one group as it is submitted at this weight version."""
        number, per_version = int(task.group_ids[0]), self.source.rollout.partial_tokens
        records = part_path(self.source.records_dir, "group", 0, number)
        spans = () if self.replay is None else self.replay.spans.get(number, ())
        return replace(task, records=records, version=version, tokens_per_version=per_version, spans=spans)

    def _take(self) -> list[Group] | None:
        """Return the groups to train now, or None if the step must wait."""
        assert self._version is not None, "a step was collected before any weights were published"
        if (replay := self._replayed) is not None:
            return self._ended.take_recorded(self._collected + 1, replay.of_step[self._collected + 1])
        return self._ended.take(self._version, lambda: itertools.chain(self._running.values(), self._unscored))

    def _as_groups(self, groups: Sequence[Group], taken: set[int], waited: float) -> Groups:
        results = [group.result for group in groups if group.result is not None]
        # Groups that are given up count in metrics and records, but none of their responses is kept.
        keep = [
            np.arange(len(group.scalars.group_ids) if group.number in taken else 0, dtype=np.int64) for group in groups
        ]
        assert self._version is not None
        idle, now = self.stream.idle_fraction(), time.perf_counter()
        elapsed, self._last = now - self._last, now
        # The total adds up all engines; the metric is the time of an average engine.
        idle_seconds = idle.total / self.stream.num_engines
        trained = [group for group in groups if group.number in taken]
        submitted, scalars = [group.version for group in trained], [group.scalars for group in trained]
        staleness = describe_staleness(submitted, scalars, self._version)
        return Groups(
            tuple(chunk for chunk, _ in results),
            tuple(scalars for _, scalars in results),
            tuple(keep),
            metrics={
                "groups/drawn": Total(len(groups)),
                "groups/dropped": Total(len(groups) - len(taken)),
                "groups/batches": Total(1),
                "time/generate": Total(waited),
                "time/reward": Total(self._scoring),
                **staleness,
                "time/trainer_idle": Total(waited),
                "time/trainer_idle_fraction": Mean(waited, elapsed),
                "time/generator_idle": Total(idle_seconds),
                "time/generator_idle_fraction": idle,
                "time/overlap": Total(max(0.0, elapsed - waited - idle_seconds)),
                **self._queue_lengths.means(),
            },
        )

    def _lengths(self) -> dict[str, int]:
        return {
            "async/running_groups": len(self._running),
            "async/finished_groups": len(self._ended.finished) + len(self._unscored),
            "async/running_requests": self.stream.running_requests,
        }


@dataclass(frozen=True)
class SwappingPublisher:
    """Publisher that notifies the collector of new weights. With rollout.swap=finish, running responses finish first;
    otherwise they continue with the new weights."""

    publisher: Publisher
    collector: StreamingCollector

    def publish(self, version: int) -> int:
        # Engines update between two steps, so running responses need no pause here unless they must finish first.
        if self.collector.source.rollout.swap == FINISH:
            self.collector.settle()
        self.collector.rest()
        version = self.publisher.publish(version)
        self.collector.published(version)
        return version

    def verify(self) -> int:
        return self.publisher.verify()
