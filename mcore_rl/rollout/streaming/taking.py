"""Groups that have ended and that no step has trained, and which of them a step trains."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mcore_rl.errors import McoreRLError
from mcore_rl.rollout.admission import take_batch
from mcore_rl.rollout.streaming.interface import Group
from mcore_rl.rollout.streaming.replay import KEY as REPLAY
from mcore_rl.rollout.streaming.saved import Bounds

BY_NUMBER = operator.attrgetter("number")
UnderWay = Callable[[], Iterator[Group]]
"""Groups that have been submitted and not ended, the oldest most often first."""


@dataclass
class EndedGroups:
    """`finished` have a signal; `dull` have none, and have ended since the last step.

    Where the hard bound is max_staleness, groups are trained in the order of submission.
    """

    bounds: Bounds
    finished: list[Group] = field(default_factory=list)
    dull: list[Group] = field(default_factory=list)

    def take(self, version: int, under_way: UnderWay) -> list[Group] | None:
        """The groups that are trained now, at `version` of the weights; None while there are too few, or others would
        become too old."""
        size, hard = self.bounds.prompts_per_step, self.bounds.max_staleness_hard
        taken = self._oldest(version, under_way) if len(self.finished) >= size else self._remaining(under_way)
        if taken is None:
            return None
        oldest = max((version - group.version for group in taken), default=0)
        if len(taken) != size or oldest > hard:  # our own invariant: admission promises both
            raise RuntimeError(f"{len(taken)} groups of {size} are to be trained, the oldest {oldest} versions old")
        self.finished = _without(self.finished, taken)
        return taken

    def take_recorded(self, step: int, recorded: Sequence[int]) -> list[Group] | None:
        """Of the groups that a step has recorded in an earlier run, once all have ended: those that it trained.

        Raises: McoreRLError where these are others by now.
        """
        wanted = set(recorded)
        ended = [group for group in self.finished if group.number in wanted]
        dull = sorted((group for group in self.dull if group.number in wanted), key=BY_NUMBER)
        if len(ended) + len(dull) < len(wanted):
            return None
        self.finished = _without(self.finished, ended)
        size = self.bounds.prompts_per_step
        taken = [*ended, *dull[: size - len(ended)]]
        if len(taken) != size:
            raise McoreRLError(
                f"{len(ended)} groups of step {step} are to be trained, and the run of {REPLAY} had {size}: "
                "trainer.prompts_per_step, the reward or the dynamic sampling has changed"
            )
        return taken

    def give_up(self, taken: Sequence[Group], recorded: Sequence[int] | None = None) -> list[Group]:
        """Groups without signal that leave with a step, which trains `taken`: in order, those before its last group; of
        an earlier run, those that it recorded."""
        left, last = _without(self.dull, taken), max(group.number for group in taken)
        if recorded is not None:
            given_up = [group for group in left if group.number in set(recorded)]
        else:
            given_up = [group for group in left if not self._in_order or group.number < last]
        self.dull = _without(left, given_up)
        return given_up

    def _oldest(self, version: int, under_way: UnderWay) -> list[Group] | None:
        """Of finished groups, which are enough for a step."""
        self.finished.sort(key=BY_NUMBER)
        last = self.finished[self.bounds.prompts_per_step - 1].number
        # Most often it is the first that runs, and nothing has to be listed.
        if self._in_order and any(group.number < last for group in under_way()):
            return None
        places = take_batch(
            [group.version for group in self.finished],
            [group.version for group in under_way()],
            version=version,
            groups_per_version=self.bounds.prompts_per_step,
            max_staleness_hard=self.bounds.max_staleness_hard,
        )
        if places is None and next(under_way(), None) is None:  # our own invariant, as in take
            raise RuntimeError(
                f"of {len(self.finished)} groups that have finished some can no longer be trained in time"
            )
        return None if places is None else [self.finished[place] for place in places]

    def _remaining(self, under_way: UnderWay) -> list[Group] | None:
        """Fewer finished groups than a step takes, with as many without signal as are missing, where nothing begins any
        more. It is asked for in nearly every wait."""
        if next(under_way(), None) is not None:
            return None
        missing = self.bounds.prompts_per_step - len(self.finished)
        return [*self.finished, *sorted(self.dull, key=BY_NUMBER)[:missing]]

    @property
    def _in_order(self) -> bool:
        return self.bounds.max_staleness_hard == self.bounds.max_staleness


def _without(groups: Iterable[Group], taken: Iterable[Group]) -> list[Group]:
    numbers = {group.number for group in taken}
    return [group for group in groups if group.number not in numbers]
