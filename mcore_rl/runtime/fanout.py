"""Calls to every rank of a group, passed on by one rank of each node.

A call costs the driver about a millisecond, so a thousand ranks would cost it a second each time. It calls one rank per
node instead, which calls its neighbours; what comes back is again one result per node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray


@dataclass(frozen=True)
class Calls:
    """Calls that have begun, to wait for with `references`; `ranks[i]` are those whose results `references[i]` has."""

    references: list[Any]
    ranks: list[list[int]]

    def results(self, found: Sequence[Any]) -> list[Any]:
        """Rank by rank, of what the references referred to."""
        of_rank: dict[int, Any] = {}
        for ranks, results in zip(self.ranks, found, strict=True):
            of_rank |= zip(ranks, results if len(ranks) > 1 else [results], strict=True)
        return [of_rank[rank] for rank in range(len(of_rank))]


@dataclass
class FanOut:
    """`nodes[rank]` is where `handles[rank]` runs. A rank that has its node to itself is called directly."""

    handles: Sequence[Any]
    nodes: Sequence[int]
    _told: set[int] = field(default_factory=set, init=False)
    """Ranks that know their neighbours."""

    def __post_init__(self) -> None:
        by_node: dict[int, list[int]] = defaultdict(list)
        for rank, node in zip(range(len(self.handles)), self.nodes, strict=True):
            by_node[node].append(rank)
        self._by_node = list(by_node.values())

    def begin(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> Calls:
        """A method of all ranks, each with its own arguments, if any."""
        given = arguments if arguments is not None else [()] * len(self.handles)
        return Calls([self._call(ranks, method, given) for ranks in self._by_node], self._by_node)

    def _call(self, ranks: list[int], method: str, given: Sequence[tuple[Any, ...]]) -> Any:
        first = ranks[0]
        if len(ranks) == 1:
            return getattr(self.handles[first], method).remote(*given[first])
        neighbours = None if first in self._told else [self.handles[rank] for rank in ranks]
        self._told.add(first)
        return self.handles[first].pass_on.remote(method, [given[rank] for rank in ranks], neighbours)


def call_all(handles: Sequence[Any], method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Results of a method of all `handles`. Raises at once what the first of them to fail raised: its peers may wait
    for it in vain."""
    calls = [getattr(handle, method).remote(*given) for handle, given in zip(handles, arguments, strict=True)]
    results, pending = {}, calls
    while pending:
        (ready,), pending = ray.wait(pending, num_returns=1)
        results[ready] = ray.get(ready)
    return [results[call] for call in calls]
