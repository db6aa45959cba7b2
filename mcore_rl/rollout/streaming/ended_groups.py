"""Finished groups that no step has trained, and the selection of the groups that a step trains."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mcore_rl.errors import McoreRLError
from mcore_rl.rollout.admission import take_batch
from mcore_rl.rollout.streaming.checkpoint import Bounds
from mcore_rl.rollout.streaming.interface import Group
from mcore_rl.rollout.streaming.replay import KEY as REPLAY

BY_NUMBER = operator.attrgetter("number")
InFlight = Callable[[], Iterator[Group]]
"""Function that yields the submitted, unfinished groups, usually with the oldest first."""


@dataclass
class EndedGroups:
    """Groups that have ended since they were submitted: `finished` have signal, `zero_variance` have none.

    If the hard bound equals max_staleness, groups are trained in the order of submission.
    """

    bounds: Bounds
    finished: list[Group] = field(default_factory=list)
    zero_variance: list[Group] = field(default_factory=list)

    def take(self, version: int, in_flight: InFlight) -> list[Group] | None:
        """Return the groups to train at weight `version`; None if there are too few, or if training these would make
        another group too old."""
        size, hard = self.bounds.prompts_per_step, self.bounds.max_staleness_hard
        taken = self._oldest(version, in_flight) if len(self.finished) >= size else self._remaining(in_flight)
        if taken is None:
            return None
        oldest = max((version - group.version for group in taken), default=0)
        if len(taken) != size or oldest > hard:  # internal invariant: admission guarantees both
            raise RuntimeError(f"{len(taken)} groups of {size} are to be trained, the oldest {oldest} versions old")
        self.finished = _without(self.finished, taken)
        return taken

    def take_recorded(self, step: int, recorded: Sequence[int]) -> list[Group] | None:
        """Return the groups that a step of a replayed run trained, once all groups that it recorded have ended; else
        None.

        Raises: McoreRLError if the groups with signal differ.
        """
        wanted = set(recorded)
        ended = [group for group in self.finished if group.number in wanted]
        zero_variance = sorted((group for group in self.zero_variance if group.number in wanted), key=BY_NUMBER)
        if len(ended) + len(zero_variance) < len(wanted):
            return None
        self.finished = _without(self.finished, ended)
        size = self.bounds.prompts_per_step
        taken = [*ended, *zero_variance[: size - len(ended)]]
        if len(taken) != size:
            raise McoreRLError(
                f"replay diverged at step {step}: {len(ended)} groups to train, but the run of {REPLAY} had {size}; "
                "trainer.prompts_per_step, the reward or the dynamic sampling differs"
            )
        return taken

    def give_up(self, taken: Sequence[Group], recorded: Sequence[int] | None = None) -> list[Group]:
        """Remove and return the groups without signal that are dropped with a step that trains `taken`: in a replay,
        the recorded ones; with ordered training, the groups submitted before its last one; otherwise all."""
        # With ordered training, groups without signal before the step's last group can no longer be used.
        left, last = _without(self.zero_variance, taken), max(group.number for group in taken)
        if recorded is not None:
            given_up = [group for group in left if group.number in set(recorded)]
        else:
            given_up = [group for group in left if not self._in_order or group.number < last]
        self.zero_variance = _without(left, given_up)
        return given_up

    def _oldest(self, version: int, in_flight: InFlight) -> list[Group] | None:
        """Select from finished groups, which are enough for a step."""
        self.finished.sort(key=BY_NUMBER)
        size, hard = self.bounds.prompts_per_step, self.bounds.max_staleness_hard
        last = self.finished[size - 1].number
        # Usually the first running group decides, so the iteration ends at once.
        if self._in_order and any(group.number < last for group in in_flight()):
            return None
        finished, running = [group.version for group in self.finished], [group.version for group in in_flight()]
        places = take_batch(finished, running, version=version, groups_per_version=size, max_staleness_hard=hard)
        if places is None and next(in_flight(), None) is None:  # internal invariant, see take
            raise RuntimeError(f"some of {len(self.finished)} finished groups can no longer be trained in time")
        return None if places is None else [self.finished[place] for place in places]

    def _remaining(self, in_flight: InFlight) -> list[Group] | None:
        """Fill a step that has too few finished groups with groups without signal, if no group is running any more.

        Called in nearly every wait, so it checks the running groups first.
        """
        if next(in_flight(), None) is not None:
            return None
        missing = self.bounds.prompts_per_step - len(self.finished)
        return [*self.finished, *sorted(self.zero_variance, key=BY_NUMBER)[:missing]]

    @property
    def _in_order(self) -> bool:
        return self.bounds.max_staleness_hard == self.bounds.max_staleness


def _without(groups: Iterable[Group], taken: Iterable[Group]) -> list[Group]:
    numbers = {group.number for group in taken}
    return [group for group in groups if group.number not in numbers]
