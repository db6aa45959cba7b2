"""What calls to groups of ranks return to name what stays on the ranks: later calls take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mcore_rl.types.data import Batch
from mcore_rl.types.metrics import Metric


@dataclass(frozen=True)
class BatchHandle:
    """A batch on the actor's ranks, with all that passes over it have found so far; ranks refuse a `key` that is not of
    the batch that they hold. `metrics` are those of the passes.

    Where `is_sent` is false nothing has needed the batch yet: the first call that does brings it.
    """

    batch: Batch
    key: int
    is_sent: bool = False
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenRefs:
    """References of TokenColumns in the object store, one per data-parallel rank of the group that made them; `key` is
    that of the batch that they are of, on that group's ranks."""

    columns: tuple[object, ...]
    key: int

    def overlapping(self, dp_rank: int, num_dp_ranks: int) -> tuple[object, ...]:
        """The columns with samples of a data-parallel rank of another group, whose number of them divides this one or
        is a multiple of it."""
        return tuple(self.columns[part] for part in matching(dp_rank, num_dp_ranks, len(self.columns)))


def matching(dp_rank: int, num_dp_ranks: int, others: int) -> range:
    """The ranks of `others` that have samples of `dp_rank`, when the larger number is cut into runs of equal length."""
    if others >= num_dp_ranks:
        run = others // num_dp_ranks
        return range(dp_rank * run, (dp_rank + 1) * run)
    first = dp_rank * others // num_dp_ranks
    return range(first, first + 1)
