"""Publication of weights to engines that generate continuously."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mcore_rl.ports import Publisher


class Submitter(Protocol):
    """Collector that submits groups ahead of training; see StreamingCollector."""

    def settle(self) -> None: ...

    def rest(self) -> None: ...

    def published(self, version: int) -> None: ...


@dataclass(frozen=True)
class SwappingPublisher:
    """Publisher that notifies the collector of new weights. With `finish`, running responses finish first; otherwise
    they continue with the new weights."""

    publisher: Publisher
    collector: Submitter
    finish: bool

    def publish(self, version: int) -> int:
        # Engines update between two steps, so running responses need no pause here unless they must finish first.
        if self.finish:
            self.collector.settle()
        self.collector.rest()
        version = self.publisher.publish(version)
        self.collector.published(version)
        return version

    def verify(self) -> int:
        return self.publisher.verify()


if TYPE_CHECKING:
    _port: type[Publisher] = SwappingPublisher
