"""Protocol of programs that work on sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from mcore_rl.rollout.gateway.exchange import OpenedSession

ROW = "row.json"
"""File with the fields of the row, in the working directory of a command."""


@dataclass(frozen=True)
class Finished:
    """Result of a program.

    reward: None: graders compute it. rewards: of single replies, by their ids.
    extra: for graders, as extra_info.harness.
    error: the program could not be run, so that nothing of the session is trained.
    """

    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None


class Harness(Protocol):
    """A program that is run for each session."""

    async def run(self, session: OpenedSession, base_url: str) -> Finished:
        """Work on a session, whose interfaces are below `base_url`. A cancelled call ends the program."""


def variables(base_url: str, key: str) -> dict[str, str]:
    """Return the environment variables of a command, from which the official clients take address and key."""
    return {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": key,
        "MCORE_RL_SESSION_URL": base_url,
    }
