"""All that a process of a weight sync has to speak by."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.weights.transports.interface import Wire
from mcore_rl.weights.transports.link import Link


@dataclass(frozen=True)
class Wires:
    """Words go by `link`; so does what is packed, but for windows of `gpu_windows`, to which it goes by `gpu`."""

    link: Link
    gpu: Wire | None = None
    gpu_windows: frozenset[int] = frozenset()

    @property
    def all(self) -> list[Wire]:
        return [self.link] if self.gpu is None else [self.link, self.gpu]

    def of(self, window: int) -> Wire:
        return self.gpu if self.gpu is not None and window in self.gpu_windows else self.link
