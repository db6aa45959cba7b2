"""Libraries that scripts/setup_connectors.sh has installed, and sessions of a scripted engine."""

from __future__ import annotations

import sys

import pytest

from mcore_rl.rollout.connectors import client
from tests.readme import ROOT
from tests.unit.rollout.episodes.conftest import stage
from tests.unit.rollout.gateway.test_programs import play, server

__all__ = ["play", "server", "stage"]

INSTALLED = ROOT / ".peers" / "connectors"
if INSTALLED.is_dir():
    # Last, so that shared packages are those of .venv.
    sys.path.append(str(INSTALLED))


@pytest.fixture(autouse=True)
def new_client() -> None:
    """Forget the client of an earlier test, whose connections belong to a closed event loop."""
    client._client.cache_clear()
