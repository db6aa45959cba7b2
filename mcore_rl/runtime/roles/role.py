"""Roles besides trainer ranks and rollout engines: judge, reward model and critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict

from mcore_rl.config.schema import Config
from mcore_rl.data.transcripts import PromptSource
from mcore_rl.resolved.placement import Guests
from mcore_rl.runtime.calls import ProcessCalls, Ref
from mcore_rl.runtime.health import Watch
from mcore_rl.types import Span

if TYPE_CHECKING:
    from ray.actor import ActorClass
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class ActorOptions(TypedDict, total=False):
    """Options of Ray for a process."""

    num_cpus: float
    num_gpus: float
    scheduling_strategy: PlacementGroupSchedulingStrategy


@dataclass(frozen=True)
class SetUpContext:
    """Common arguments of set-ups."""

    config: Config
    prompts: Mapping[str, Ref[PromptSource]]
    watch: Watch

    def rendezvous(self, processes: Sequence[ProcessCalls]) -> str:
        """Return the rendezvous address of a process group, on the host of its first process."""
        return self.watch.get([processes[0].free_address()])[0]


class Group(Protocol):
    """Processes of a role, from the driver's side."""

    def spans(self) -> list[Span]: ...


@dataclass(frozen=True)
class Role:
    """Processes of the Ray actor class `actor`; messages name each by `name` and its number.

    `set_up` begins the set-up of all processes, each with the GPUs that it may see (`see_only`), and returns references
    that are ready when the set-ups have ended. If the processes take turns on a device, they have freed it by then.
    `group` builds the driver's group from the processes, the node of each, and the watch.
    """

    name: str
    actor: ActorClass
    guests: Guests
    set_up: Callable[[SetUpContext, Sequence[ProcessCalls], Sequence[str | None]], list[Ref[None]]]
    group: Callable[[Sequence[ProcessCalls], Sequence[int], Watch], Group]
