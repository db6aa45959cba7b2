"""Calls to every rank of a process group, forwarded by one rank of each node.

A call takes about 1 ms of the driver's time, so calling a thousand ranks would take a second. The driver calls one rank
per node instead, which calls the other ranks of its node and returns all results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import ray

from mcore_rl.runtime.calls import ProcessCalls, Ref

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from mcore_rl.runtime.health import Watch

T = TypeVar("T")


@dataclass(frozen=True)
class GroupCall(Generic[T]):
    """A pending call to all ranks. `references[i]` refers to the result of the only rank in `ranks[i]`, or to the list
    of results of several ranks."""

    references: list[Ref[T | list[T]]]
    ranks: list[list[int]]
    watch: Watch

    def results(self) -> list[T]:
        """Wait for the results of all ranks, in the order of the ranks.

        Raises: as Watch.get.
        """
        return self.in_order(self.watch.get(self.references))

    def in_order(self, found: Sequence[T | list[T]]) -> list[T]:
        """Order the values of `references` by rank."""
        of_rank: dict[int, T] = {}
        for ranks, results in zip(self.ranks, found, strict=True):
            of_node = results if len(ranks) > 1 else [results]
            of_rank |= zip(ranks, cast("list[T]", of_node), strict=True)
        return [of_rank[rank] for rank in range(len(of_rank))]


@dataclass
class FanOut:
    """Calls to all ranks, through one rank per node. `nodes[rank]` is the node of `ranks[rank]`. A rank that is alone
    on its node is called directly."""

    ranks: Sequence[ProcessCalls]
    nodes: Sequence[int]
    watch: Watch
    _introduced: set[int] = field(default_factory=set, init=False)
    """Ranks that have received the handles of the other ranks of their node."""

    def __post_init__(self) -> None:
        by_node: dict[int, list[int]] = defaultdict(list)
        for rank, node in zip(range(len(self.ranks)), self.nodes, strict=True):
            by_node[node].append(rank)
        self._by_node = list(by_node.values())

    def begin(self, method: Callable[..., T], *arguments: object) -> GroupCall[T]:
        """Call a method of the process class on all ranks, with the same arguments."""
        return self.begin_each(method, [arguments] * len(self.ranks))

    def begin_each(self, method: Callable[..., T], arguments: Sequence[tuple[object, ...]]) -> GroupCall[T]:
        """Call a method of the process class on all ranks, each with its own arguments."""
        references: list[Ref[T | list[T]]] = [self._call(ranks, method.__name__, arguments) for ranks in self._by_node]
        return GroupCall(references, self._by_node, self.watch)

    def _call(self, ranks: list[int], method: str, arguments: Sequence[tuple[object, ...]]) -> Ref[T | list[T]]:
        first = ranks[0]
        if len(ranks) == 1:
            return getattr(self.ranks[first].handle, method).remote(*arguments[first])  # type: ignore[no-any-return]
        neighbours = None if first in self._introduced else [self.ranks[rank].handle for rank in ranks]
        self._introduced.add(first)
        return self.ranks[first].handle.pass_on.remote(method, [arguments[rank] for rank in ranks], neighbours)  # type: ignore[no-any-return]


def call_all(handles: Sequence[ActorHandle], method: str, arguments: Sequence[tuple[object, ...]]) -> list[object]:
    """Call a method of all `handles` and return the results. Raises the first error at once, because the other ranks
    may wait for the failed one forever."""
    calls = [getattr(handle, method).remote(*given) for handle, given in zip(handles, arguments, strict=True)]
    results, pending = {}, calls
    while pending:
        (ready,), pending = ray.wait(pending, num_returns=1)
        results[ready] = ray.get(ready)
    return [results[call] for call in calls]
