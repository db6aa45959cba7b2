"""Processes beside the trainer ranks and the rollout engines: what `launch` must know to place and set them up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.schema import Config
from mcore_rl.runtime.groups import CriticGroup, RankMap
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.placement import Guests, Slot
from mcore_rl.runtime.processes import CriticProcess
from mcore_rl.types import Batch


@dataclass(frozen=True)
class Surroundings:
    """What set-ups share: `prompts` are references of the prompt sets, by name."""

    config: Config
    prompts: Mapping[str, Any]
    watch: Watch


SetUp = Callable[[Surroundings, list[Any], Sequence[Slot]], list[Any]]


@dataclass(frozen=True)
class Role:
    """Processes of the Ray actor class `process`, in whose messages each is `name` and its number.

    `set_up` starts the set-up of all and returns references of its end; by then they have left the device if they are
    to leave it at all. `group` makes of the handles what the run knows them by.
    """

    name: str
    process: Any
    guests: Guests
    set_up: SetUp
    group: Callable[[list[Any], Watch], Any]


def set_up_ranks(around: Surroundings, handles: list[Any], slots: Sequence[Slot], *more: Any) -> list[Any]:
    """Ranks of one process group, which meet where the first of them is; `more` is what their set-up takes besides."""
    address = around.watch.get([handles[0].free_address.remote()])[0]
    return [
        handle.setup.remote(around.config, rank, len(handles), address, slot.devices, *more)
        for rank, (handle, slot) in enumerate(zip(handles, slots, strict=True))
    ]


def critic_role(ranks: RankMap, own_batch: Callable[[Batch], Batch]) -> Role:
    """`own_batch` as in CriticGroup."""
    return Role(
        name="critic rank",
        process=CriticProcess,
        guests=Guests("critic", len(ranks.dp_rank_of)),
        set_up=set_up_ranks,
        group=lambda handles, watch: CriticGroup(handles, ranks, watch, own_batch),
    )
