"""`make test` runs every test file: no folder of tests has a name that pytest passes over."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_every_folder_of_tests_is_collected(request: pytest.FixtureRequest) -> None:
    passed_over = request.config.getini("norecursedirs")
    folders = {part for file in TESTS.rglob("test_*.py") for part in file.relative_to(TESTS).parent.parts}
    assert "dist" in folders
    assert {name: pattern for name in folders for pattern in passed_over if fnmatch(name, pattern)} == {}
    assert request.config.getini("testpaths") == [TESTS.name]
