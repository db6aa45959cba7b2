"""New weights for engines that generate all the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mcore_rl.ports import Publisher


class Submitter(Protocol):
    """A StreamingCollector."""

    def settle(self) -> None: ...

    def rest(self) -> None: ...

    def published(self, version: int) -> None: ...


@dataclass(frozen=True)
class SwappingPublisher:
    """A Publisher that tells the collector of new weights. With `finish` responses in progress end before, without they
    go on with them."""

    publisher: Publisher
    collector: Submitter
    finish: bool

    def publish(self, version: int) -> int:
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
