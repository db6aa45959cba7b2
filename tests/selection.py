"""Selection of the tests that always run. The others run on demand, with MCORE_RL_EVERY_TEST=1."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

EVERY_TEST = bool(os.environ.get("MCORE_RL_EVERY_TEST"))


def on_demand_unless(usual: bool) -> list[pytest.MarkDecorator]:
    """Return the marks of a case that is always tested, or only on demand."""
    return [] if usual else [pytest.mark.on_demand]


def needs_package(name: str, command: str) -> pytest.MarkDecorator:
    """Skip tests without a package. Unlike pytest.importorskip, it imports nothing: every test process collects every
    module, and some packages need seconds."""
    return pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed: {command}")
