"""Typed remote calls. A process of the run is a Ray actor. Its calls class has one method per remote method, with the
same name and arguments, which returns a reference to the result."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from mcore_rl.runtime.agreement import HostFacts, Question
    from mcore_rl.runtime.collectives import Collective
    from mcore_rl.runtime.trajectory_store import FetchRequest
    from mcore_rl.types import Span, TrajectoryBuffers
    from mcore_rl.weights.transports.hosts import Host

T_co = TypeVar("T_co", covariant=True)


class Ref(Protocol[T_co]):
    """Result of a remote call that may not have ended: a ray.ObjectRef."""

    def __await__(self) -> Generator[None, None, T_co]: ...


@dataclass(eq=False)
class ProcessCalls:
    """Calls to any process of a run (roles.base.RunProcess)."""

    handle: ActorHandle

    @property
    def actor_id(self) -> object:
        """Ray's id of the process."""
        return self.handle._actor_id

    def watch(self) -> Ref[None]:
        return self.handle.watch.remote()

    def where(self) -> Ref[tuple[Host, int]]:
        return self.handle.where.remote()

    def seconds_stuck(self) -> Ref[float]:
        return self.handle.seconds_stuck.remote()

    def host_facts(self, question: Question) -> Ref[HostFacts]:
        return self.handle.host_facts.remote(question)

    def other_users(self) -> Ref[list[str]]:
        return self.handle.other_users.remote()

    def pending_collectives(self) -> Ref[list[Collective]]:
        return self.handle.pending_collectives.remote()

    def free_address(self) -> Ref[str]:
        return self.handle.free_address.remote()

    def drain_spans(self) -> Ref[list[Span]]:
        return self.handle.drain_spans.remote()

    def fetch(self, request: FetchRequest) -> tuple[Ref[None], Ref[TrajectoryBuffers]]:
        arrived, trajectories = self.handle.fetch.remote(request)
        return arrived, trajectories
