"""Typed remote calls. A process of the run is a Ray actor. A call names a method of the actor's class, so that mypy
checks its arguments and its result:

    process.call(EngineProcess.give_up, 4)     # Ref[GivenUp]
    ranks.call(TrainerProcess.send_weights)    # GroupCall[npt.NDArray[np.int64]], from all ranks
"""

from __future__ import annotations

import functools
import pickle
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

import ray

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from mcore_rl.runtime.health import Watch
    from mcore_rl.runtime.roles.base import RankProcess

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
T_co = TypeVar("T_co", covariant=True)
Process_co = TypeVar("Process_co", covariant=True)
Rank_co = TypeVar("Rank_co", bound="RankProcess", covariant=True)
Method = TypeVar("Method", bound=Callable[..., object])


class Ref(Protocol[T_co]):
    """Result of a remote call that may not have ended: a ray.ObjectRef."""

    def __await__(self) -> Generator[None, None, T_co]: ...


def remote_method(*, concurrency_group: str | None = None, num_returns: int = 1) -> Callable[[Method], Method]:
    """Decorate a method like ray.method, and keep its type."""
    options = {} if concurrency_group is None else {"concurrency_group": concurrency_group}
    return cast("Callable[[Method], Method]", ray.method(num_returns=num_returns, **options))


_PACKED = "is_packed"


def packed(method: Method) -> Method:
    """Decorate a method of a process class, below `remote_method`: its arguments travel as one `bytes` object, and its
    result as another one.

    Ray serializes every argument by itself, with a Python callback per object. A call with four rollout tasks takes
    290 us of the driver's time, and 130 us as `bytes`, which Ray copies. Neither arguments nor result may contain
    references or handles of processes, because only Ray's own serialization counts them.
    """

    @functools.wraps(method)
    def call(self: object, arguments: bytes) -> bytes:
        return pickle.dumps(method(self, *pickle.loads(arguments)), pickle.HIGHEST_PROTOCOL)

    # Ray checks calls against the signature, which it would read from the undecorated method.
    del call.__dict__["__wrapped__"]
    setattr(call, _PACKED, True)
    return cast("Method", call)


def unpacked(value: T) -> T:
    """Return the result of a call, which is packed if the method is. No method of a process has a result of type
    `bytes` itself."""
    return cast(T, pickle.loads(value)) if isinstance(value, bytes) else value


def passed(ref: Ref[T]) -> T:
    """Pass a reference as an argument of a call: the method receives the value, because Ray replaces the reference."""
    return cast(T, ref)


@dataclass(eq=False)
class ProcessHandle(Generic[Process_co]):
    """Handle of a process of the run, a subclass of roles.base.RunProcess. `name` is its role and rank and, in runs
    with several hosts, its host."""

    name: str
    actor: ActorHandle

    @property
    def actor_id(self) -> object:
        """Ray's id of the process."""
        return self.actor._actor_id

    def call(self, method: Callable[Concatenate[Process_co, P], T], *arguments: P.args, **options: P.kwargs) -> Ref[T]:
        """Begin a call of a method of the process class."""
        remote = getattr(self.actor, method.__name__)
        if hasattr(method, _PACKED):
            assert not options, "packed arguments are passed by position"
            return cast("Ref[T]", remote.remote(pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL)))
        return cast("Ref[T]", remote.remote(*arguments, **options))

    def call_for_two(
        self, method: Callable[Concatenate[Process_co, P], tuple[T, U]], *arguments: P.args, **options: P.kwargs
    ) -> tuple[Ref[T], Ref[U]]:
        """Begin a call of a remote_method with num_returns=2."""
        first, second = getattr(self.actor, method.__name__).remote(*arguments, **options)
        return first, second


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
class FanOut(Generic[Rank_co]):
    """Calls to every rank of a process group, forwarded by one rank of each node.

    A call takes about 1 ms of the driver's time, so calling a thousand ranks would take a second. The driver calls one
    rank per node instead, which calls the other ranks of its node and returns all results. `nodes[rank]` is the node of
    `processes[rank]`. A rank that is alone on its node is called directly.
    """

    processes: Sequence[ProcessHandle[Rank_co]]
    nodes: Sequence[int]
    watch: Watch
    _introduced: set[int] = field(default_factory=set, init=False)
    """Ranks that have received the handles of the other ranks of their node."""

    def __post_init__(self) -> None:
        by_node: dict[int, list[int]] = defaultdict(list)
        for rank, node in zip(range(len(self.processes)), self.nodes, strict=True):
            by_node[node].append(rank)
        self._by_node = list(by_node.values())

    def call(
        self, method: Callable[Concatenate[Rank_co, P], T], *arguments: P.args, **options: P.kwargs
    ) -> GroupCall[T]:
        """Call a method of the process class on all ranks, with the same arguments."""
        assert not options, "arguments are forwarded by position"
        return self.call_each(method, [arguments] * len(self.processes))

    def call_each(
        self, method: Callable[Concatenate[Rank_co, ...], T], arguments: Sequence[tuple[object, ...]]
    ) -> GroupCall[T]:
        """Call a method of the process class on all ranks, each with its own arguments."""
        references: list[Ref[T | list[T]]] = [self._call(ranks, method.__name__, arguments) for ranks in self._by_node]
        return GroupCall(references, self._by_node, self.watch)

    def call_each_for_two(
        self, method: Callable[Concatenate[Rank_co, ...], tuple[T, U]], arguments: Sequence[tuple[object, ...]]
    ) -> list[tuple[Ref[T], Ref[U]]]:
        """Call a remote_method with num_returns=2 on all ranks, each with its own arguments. Each rank is called
        directly, so that its results stay in the object store."""
        calls = zip(self.processes, arguments, strict=True)
        return [getattr(process.actor, method.__name__).remote(*own) for process, own in calls]

    def _call(self, ranks: list[int], method: str, arguments: Sequence[tuple[object, ...]]) -> Ref[T | list[T]]:
        first, actors = ranks[0], [self.processes[rank].actor for rank in ranks]
        if len(ranks) == 1:
            return cast("Ref[T]", getattr(actors[0], method).remote(*arguments[first]))
        # Handles take time to serialize, so only the first call passes them.
        neighbours = None if first in self._introduced else actors
        self._introduced.add(first)
        return cast("Ref[list[T]]", actors[0].pass_on.remote(method, [arguments[rank] for rank in ranks], neighbours))


def call_all(actors: Sequence[ActorHandle], method: str, arguments: Sequence[tuple[object, ...]]) -> list[object]:
    """Call a method of all `actors` and return the results. Raises the first error at once, because the other ranks
    may wait for the failed one forever."""
    calls = [getattr(actor, method).remote(*given) for actor, given in zip(actors, arguments, strict=True)]
    results, pending = {}, calls
    while pending:
        (ready,), pending = ray.wait(pending, num_returns=1)
        results[ready] = ray.get(ready)
    return [results[call] for call in calls]
