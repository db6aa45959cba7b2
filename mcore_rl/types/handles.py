"""Handles of data that stays on ranks or in the object store; remote calls return them and later calls take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mcore_rl.types.data import Batch
from mcore_rl.types.metrics import Metric


@dataclass(frozen=True)
class BatchHandle:
    """A batch on the actor's ranks, including the results computed for it so far. Ranks reject a call whose `key` is
    not the key of the batch that they hold. `metrics` accumulates the metrics of the passes.

    `is_sent` is false until the first call that needs the batch on the ranks; this call sends it.
    """

    batch: Batch
    key: int
    is_sent: bool = False
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenRefs:
    """References to TokenColumns in the object store, one per data-parallel rank of the producing group. `key`
    identifies the batch on the ranks of that group."""

    columns: tuple[object, ...]
    key: int

    def overlapping(self, dp_rank: int, num_dp_ranks: int) -> tuple[object, ...]:
        """Return the columns with samples of one data-parallel rank of another group. One group's number of ranks must
        divide the other's."""
        return tuple(self.columns[part] for part in matching(dp_rank, num_dp_ranks, len(self.columns)))


def matching(dp_rank: int, num_dp_ranks: int, others: int) -> range:
    """Return the ranks of a group of `others` ranks that share samples with `dp_rank`. The larger group is divided into
    runs of equal length."""
    # A rank of the smaller group shares its samples with a run of consecutive ranks of the larger group.
    if others >= num_dp_ranks:
        run = others // num_dp_ranks
        return range(dp_rank * run, (dp_rank + 1) * run)
    first = dp_rank * others // num_dp_ranks
    return range(first, first + 1)
