"""Selection of the tests that always run. The others run on demand, with MCORE_RL_EVERY_TEST=1."""

from __future__ import annotations

import os
from collections.abc import Set
from importlib.util import find_spec
from typing import TypeVar

import pytest

Case = TypeVar("Case")
EVERY_TEST = bool(os.environ.get("MCORE_RL_EVERY_TEST"))


def on_demand_unless(usual: bool) -> list[pytest.MarkDecorator]:
    """Return the marks of a case that is always tested, or only on demand."""
    return [] if usual else [pytest.mark.on_demand]


def usual_cases(cases: dict[int, dict[str, Case]], names: Set[str]) -> dict[int, dict[str, Case]]:
    """Return the cases of a grid that are always tested, `names`, by number of ranks; the others run on demand."""
    assert not names - {name for of_size in cases.values() for name in of_size}
    if EVERY_TEST:
        return cases
    chosen = {size: {name: case for name, case in of_size.items() if name in names} for size, of_size in cases.items()}
    return {size: of_size for size, of_size in chosen.items() if of_size}


def needs_package(name: str, command: str) -> pytest.MarkDecorator:
    """Skip tests without a package. Unlike pytest.importorskip, it imports nothing: every test process collects every
    module, and some packages need seconds."""
    return pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed: {command}")
