"""What an engine gives up to one that has nothing left to begin, and how tasks fall into pieces by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tail:
    """Responses at the end of a task, in groups of `samples`, that have not begun: from `first` on, before `last`."""

    task: int
    first: int
    last: int
    samples: int


def share(tails: Sequence[Tail], free: int) -> list[Tail]:
    """Which of them go to an engine that could begin `free` at once, so that as many wait there as here then.

    Whole groups, or what of them has not begun, from the ends of the last tasks on, as far as that is not too many; a
    part of a group where one is too many. At least one response, where there is any.
    """
    waiting = sum(tail.last - tail.first for tail in tails)
    left = most = min(waiting, (waiting + free + 1) // 2)
    shared: list[Tail] = []
    for tail in reversed(tails):
        first = tail.last
        while first > tail.first:
            begin = max(tail.first, (first - 1) // tail.samples * tail.samples)
            if first - begin > left:
                break
            left -= first - begin
            first = begin
        if first < tail.last:
            shared.append(Tail(tail.task, first, tail.last, tail.samples))
        if first > tail.first:  # the next group is too large
            break
    if left == most > 0:
        last = next(tail for tail in reversed(tails) if tail.last > tail.first)
        return [Tail(last.task, last.last - most, last.last, last.samples)]
    return shared


@dataclass
class Piece:
    """The responses of a task, from `first` on and before `last`, that one engine makes."""

    task: int
    first: int
    last: int


class Pieces:
    """All tasks by their pieces, which have numbers: at first one each, with the number of the task. `spans` are the
    responses of each task."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._pieces = [Piece(task, first, last) for task, (first, last) in enumerate(spans)]
        self._of_task = [[task] for task in range(len(spans))]
        self._num_pieces = len(spans)

    def __len__(self) -> int:
        """Of those that have responses."""
        return self._num_pieces

    def __getitem__(self, number: int) -> Piece:
        return self._pieces[number]

    def of_task(self, task: int) -> list[int]:
        """In the order of the responses."""
        return sorted(self._of_task[task], key=lambda number: self._pieces[number].first)

    def cut(self, number: int, first: int) -> int:
        """Ends a piece before response `first`, which may leave it none; the number of another one with the rest."""
        piece = self._pieces[number]
        assert piece.first <= first < piece.last, f"{piece} has no response {first}"
        rest, of_task = len(self._pieces), self._of_task[piece.task]
        self._pieces.append(Piece(piece.task, first, piece.last))
        of_task.append(rest)
        piece.last = first
        if piece.first == first:
            of_task.remove(number)
        else:
            self._num_pieces += 1
        return rest
