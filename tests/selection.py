"""Selection of the tests that always run. The others run on demand, with MCORE_RL_EVERY_TEST=1."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TypeVar

import pytest

EVERY_TEST = bool(os.environ.get("MCORE_RL_EVERY_TEST"))
T = TypeVar("T")


def on_demand_unless(usual: bool) -> list[pytest.MarkDecorator]:
    """Return the marks of a case that is always tested, or only on demand."""
    return [] if usual else [pytest.mark.on_demand]


def usual_cases(cases: Mapping[int, Mapping[str, T]], on_demand: Collection[str]) -> dict[int, dict[str, T]]:
    """Return cases by number of ranks and name, without those of `on_demand` unless every test runs.

    A mark would not do here: all cases with the same number of ranks run in one launch.
    """
    names = {name for of_size in cases.values() for name in of_size}
    assert names.issuperset(on_demand), f"not a case: {set(on_demand) - names}"
    left_out = () if EVERY_TEST else on_demand
    return {
        size: {name: case for name, case in of_size.items() if name not in left_out} for size, of_size in cases.items()
    }
