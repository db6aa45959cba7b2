"""Rows of other libraries' environments and suites, and the Protocol of a suite that a program plays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from mcore_rl.errors import DataError
from mcore_rl.rollout.connectors.client import Endpoint
from mcore_rl.types.json import JsonObject, JsonValue

CONNECTOR = "connector"
"""Entry of extra_info that describes the row to its connector."""
TRAIN, EVAL = "train", "eval"
SPLITS = (TRAIN, EVAL)


@dataclass(frozen=True)
class RowRequest:
    """Arguments of `mcore-rl rows`.

    name: environment, task or URL. arguments: keyword arguments of the environment or task.
    limit: maximum number of rows; None: all. prompt: instruction in place of the connector's.
    actions: names of a discrete environment's actions, in order.
    """

    name: str
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    split: str = TRAIN
    limit: int | None = None
    prompt: str | None = None
    actions: Sequence[str] = ()


class Rows(Protocol):
    """Source of rows."""

    def rows(self, request: RowRequest) -> Iterator[JsonObject]:
        """Yield the rows of a training or validation file.

        Raises: ConfigError if the library has no such environment or task, or it needs an unsupported feature.
        """


class Suite(Rows, Protocol):
    """Environments or tasks that use the model through the gateway."""

    async def run(self, part: JsonObject, endpoint: Endpoint) -> dict[str, object]:
        """Play the row that `part` describes. Returns its `score`, `metrics` and further values for graders."""


def row_of(
    kind: str, name: str, messages: Sequence[Mapping[str, JsonValue]], part: Mapping[str, JsonValue], answer: str = ""
) -> JsonObject:
    """Return a row of a data file. name: its data_source, whose accuracy is a metric in validation."""
    return {
        "prompt": list(messages),
        "data_source": name,
        "reward_model": {"ground_truth": answer},
        "extra_info": {CONNECTOR: {"kind": kind, **part}},
    }


def part_of(extra_info: Mapping[str, object], kind: str) -> JsonObject:
    """Return the connector's part of a row.

    Raises: DataError if the row was not written for this connector.
    """
    part = extra_info.get(CONNECTOR)
    if not isinstance(part, dict) or part.get("kind") != kind:
        raise DataError(f"the row has no extra_info.{CONNECTOR} of {kind}; write the rows with `mcore-rl rows {kind}`")
    return cast(JsonObject, part)
