"""Program of sessions for rows of other libraries: rollout.harness=mcore_rl.rollout.connectors.program:solve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from mcore_rl.errors import DataError
from mcore_rl.rollout.connectors.client import Endpoint, reply
from mcore_rl.rollout.connectors.interface import CONNECTOR, part_of
from mcore_rl.rollout.connectors.libraries import SUITES
from mcore_rl.rollout.connectors.registry import load_suite
from mcore_rl.types.chat import ChatMessage


async def solve(row: Mapping[str, object], base_url: str, api_key: str) -> dict[str, object] | None:
    """Play a row with the library that wrote it. A row without a connector gets one reply, which graders evaluate.

    Raises: DataError for a row of an unknown connector; errors of the library.
    """
    endpoint = Endpoint(f"{base_url}/v1", api_key)
    extra_info = cast("Mapping[str, object]", row["extra_info"])
    if CONNECTOR not in extra_info:
        await reply(endpoint, cast("list[ChatMessage]", row["messages"]))
        return None
    kind = kind_of(extra_info)
    return await load_suite(kind).run(part_of(extra_info, kind), endpoint)


def kind_of(extra_info: Mapping[str, object]) -> str:
    """Return the kind of a row's connector.

    Raises: DataError if this program cannot play it.
    """
    part = extra_info[CONNECTOR]
    kind = part.get("kind") if isinstance(part, Mapping) else None
    if kind not in SUITES:
        raise DataError(
            f"extra_info.{CONNECTOR} has the kind {kind!r}, and the program of rollout.harness plays "
            f"{', '.join(SUITES)}; set rollout.environment for rows of gymnasium and openenv"
        )
    return str(kind)
