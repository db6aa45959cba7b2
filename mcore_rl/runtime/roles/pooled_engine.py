"""One engine of a pool: its processes, and whether it is up and has weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Start(Protocol):
    """An EngineStart."""

    @property
    def name(self) -> str: ...

    @property
    def handles(self) -> list[Any]: ...

    @property
    def journal(self) -> str | None: ...

    def kill(self) -> None: ...

    def again(self) -> Any: ...


@dataclass
class PooledEngine:
    """`starting`: the end of its set-up, while it starts again, which is to come by `deadline`; `has_weights`: those
    that the others have."""

    start: Start
    incarnation: int = 0
    starting: Any = None
    deadline: float = 0.0
    has_weights: bool = True
    busy_seconds: float = 0.0
    """As it said last."""

    @property
    def handle(self) -> Any:
        return self.start.handles[0]

    @property
    def serves(self) -> bool:
        return self.starting is None and self.has_weights

    @property
    def maker(self) -> str:
        """Of trajectories: a name that no other process has had."""
        return f"{self.start.name} (started {self.incarnation + 1} times)" if self.incarnation else self.start.name
