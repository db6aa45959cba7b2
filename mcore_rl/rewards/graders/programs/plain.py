"""Values without handles or records on the wire: the arguments of one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.rewards.graders.programs.wire import WireError


class PlainOwner:
    """Refuses every object that is not plain data."""

    def fields_of(self, value: Any) -> tuple[str, Mapping[str, Any]] | None:
        return None

    def new_record(self, name: str) -> Any:
        raise WireError(f"unknown class {name}")

    def export(self, value: Any) -> list[Any]:
        raise WireError(f"a value of type {type(value).__name__} is no data")

    def resolve(self, node: list[Any]) -> Any:
        raise WireError(f"unknown node {node[0]!r}")
