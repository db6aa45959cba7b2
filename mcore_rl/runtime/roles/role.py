"""Roles besides trainer ranks and rollout engines: judge, reward model and critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from mcore_rl.resolved.placement import Guests
from mcore_rl.runtime.calls import ProcessHandle, Ref
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.roles.base import RunProcess, SetUpContext
from mcore_rl.types import Span

if TYPE_CHECKING:
    from ray.actor import ActorClass
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class ActorOptions(TypedDict, total=False):
    """Options of Ray for a process."""

    num_cpus: float
    num_gpus: float
    scheduling_strategy: PlacementGroupSchedulingStrategy


class RoleGroup(Protocol):
    """Processes of a role, from the driver's side."""

    @property
    def processes(self) -> Sequence[ProcessHandle[RunProcess]]: ...

    def set_up(self, context: SetUpContext, visible: Sequence[str | None]) -> list[Ref[None]]:
        """Begin the set-up of all processes, each with the GPUs that it may see. Returns references that are ready
        when the set-ups have ended. If the processes take turns on a device, they have freed it by then."""

    def spans(self) -> list[Span]: ...


@dataclass(frozen=True)
class Role:
    """Processes of the Ray actor class `actor`; messages name each by `name` and its number. `group` builds the
    driver's group from the processes, the node of each, and the watch."""

    name: str
    actor: ActorClass
    guests: Guests
    group: Callable[[Sequence[ProcessHandle[Any]], Sequence[int], Watch], RoleGroup]
