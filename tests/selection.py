"""Selection of the tests that always run. The others run on demand, with MCORE_RL_EVERY_TEST=1."""

from __future__ import annotations

import os

import pytest

EVERY_TEST = bool(os.environ.get("MCORE_RL_EVERY_TEST"))


def on_demand_unless(usual: bool) -> list[pytest.MarkDecorator]:
    """Return the marks of a case that is always tested, or only on demand."""
    return [] if usual else [pytest.mark.on_demand]
