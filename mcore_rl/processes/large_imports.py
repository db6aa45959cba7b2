"""Imports of large frameworks without collections of reference cycles.

An engine's imports create a million objects that live as long as the process. Python searches them for cycles while
they are created, and again in each complete collection: a quarter of an engine's start.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_import(package: str) -> Iterator[None]:
    """Suspend collections in the block, which imports `package`, and exempt its objects from later ones.

    Does nothing if the package was imported before: cycles that have become garbage since then must stay collectable.
    """
    if package in sys.modules:
        yield
        return
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
