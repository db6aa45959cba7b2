"""Collections of reference cycles around a large import."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from mcore_rl.processes.large_imports import first_import


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def frozen_objects_return() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_first_import_suspends_collections_and_exempts_its_objects() -> None:
    before = gc.get_freeze_count()
    with first_import("no_such_package"):
        assert not gc.isenabled()
        created = Node()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    seen = weakref.ref(created)
    del created
    gc.collect()
    assert seen() is not None


def test_first_import_failing_restores_collections() -> None:
    with pytest.raises(ImportError), first_import("no_such_package"):
        raise ImportError
    assert gc.isenabled()


def test_first_import_of_imported_package_keeps_garbage_collectable() -> None:
    assert "pytest" in sys.modules
    with first_import("pytest"):
        assert gc.isenabled()
        garbage = Node()
    seen = weakref.ref(garbage)
    del garbage
    gc.collect()
    assert seen() is None
