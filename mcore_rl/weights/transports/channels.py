"""Channels of a process: gloo for control messages and host memory, NCCL for messages between GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.weights.transports.interface import Channel
from mcore_rl.weights.transports.link import Link


@dataclass(frozen=True)
class Channels:
    """Channels to all peers. Weights for the staging buffers in `gpu_buffers` use `gpu`, everything else `link`."""

    link: Link
    gpu: Channel | None = None
    gpu_buffers: frozenset[int] = frozenset()

    @property
    def all(self) -> list[Channel]:
        return [self.link] if self.gpu is None else [self.link, self.gpu]

    def of(self, buffer: int) -> Channel:
        """Return the channel for messages to staging buffer number `buffer`."""
        return self.gpu if self.gpu is not None and buffer in self.gpu_buffers else self.link
