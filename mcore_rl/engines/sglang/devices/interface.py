"""Parts of a rank that depend on its device (runs in SGLang's environment)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs

    from mcore_rl.engines.rank_memory import RankMemory
    from mcore_rl.engines.sglang.devices.memory import SleepMemory


class Device(Protocol):
    """A rank's device.

    gpu_id: SGLang's number of the device.
    torch_device: device of the rank's parameters.
    """

    gpu_id: int
    torch_device: torch.device

    def import_sglang(self) -> None:
        """Import SGLang's scheduler, before any other module of SGLang is imported."""

    def complete(self, arguments: ServerArgs) -> None:
        """Set the server arguments that depend on the model."""

    def adapt(self, scheduler: Scheduler) -> None:
        """Change a new scheduler, whose event loop is never run."""

    def settle(self) -> None:
        """Wait until the device has finished the work of the start, which used another stream than later calls."""

    def stream(self, scheduler: Scheduler) -> AbstractContextManager[object]:
        """Return a context for all calls of a rank after its start: the device runs their work in order."""

    def memory(self, scheduler: Scheduler, rank: RankMemory) -> SleepMemory:
        """Return the memory that the rank releases during sleep."""
