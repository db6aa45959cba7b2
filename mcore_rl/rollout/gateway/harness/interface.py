"""Protocol of programs that work on sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from mcore_rl.rollout.gateway.exchange import OpenedSession


@dataclass(frozen=True)
class Finished:
    """Result of a program. reward: None: graders compute it. extra: for graders, as extra_info.harness. error: the
    program could not be run, so that nothing of the session is trained."""

    reward: float | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None


class Harness(Protocol):
    """A program that is run for each session."""

    async def run(self, session: OpenedSession, base_url: str) -> Finished:
        """Work on a session, whose interfaces are below `base_url`. A cancelled call ends the program."""
