"""Settings of property tests, and a bucket in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from fsspec.implementations.memory import MemoryFileSystem

# No test fails because the machine is slow.
settings.register_profile("no time limits", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no time limits")


@pytest.fixture
def bucket() -> Iterator[MemoryFileSystem]:
    """Yield a file system in memory whose directory /bucket is removed after the test."""
    from fsspec.implementations.memory import MemoryFileSystem

    system = MemoryFileSystem()
    yield system
    if system.exists("/bucket"):
        system.rm("/bucket", recursive=True)
