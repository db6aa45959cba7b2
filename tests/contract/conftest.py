"""Engines that tests of several models use one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.engines import FamilyEngine


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> Iterator[FamilyEngine]:
    """Engines of the kind given as the parameter."""
    engines = FamilyEngine(request.param)
    yield engines
    if engines.engine is not None:
        engines.engine.shutdown()
