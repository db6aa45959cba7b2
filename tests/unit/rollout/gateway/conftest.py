"""Sessions of the gateway on the episodes' scripted engine, and a server with scripted sessions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.rollout.episodes.conftest import stage
from tests.unit.rollout.gateway.scripted import ScriptedSessions, serving

__all__ = ["stage"]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, ScriptedSessions]]:
    sessions = ScriptedSessions()
    with serving(sessions) as address:
        yield address, sessions


@pytest.fixture
def sessions(served: tuple[str, ScriptedSessions]) -> ScriptedSessions:
    """Sessions of the module's server, as new."""
    sessions = served[1]
    vars(sessions).update(vars(ScriptedSessions()))
    return sessions


@pytest.fixture
def address(served: tuple[str, ScriptedSessions], sessions: ScriptedSessions) -> str:
    return served[0]
