"""Launches ranks under the simulated TransformerEngine from tests whose own process has none: `launch_simulated` is
tests.distributed.launch.launch in a process whose ranks have it."""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed.launch import SIMULATION, launch
from tests.te.processes import run_python


def launch_simulated(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 300
) -> list[Any]:
    """What launch(function, num_ranks, *args) returns."""
    with tempfile.TemporaryDirectory() as directory:
        asked, answered = Path(directory, "asked"), Path(directory, "answered")
        asked.write_bytes(pickle.dumps((function, num_ranks, args, timeout_seconds)))
        run_python("-m", "tests.te.ranks", str(asked), str(answered), **{SIMULATION: "1"})
        results: list[Any] = pickle.loads(answered.read_bytes())
        return results


def main(asked: str, answered: str) -> None:
    function, num_ranks, args, timeout_seconds = pickle.loads(Path(asked).read_bytes())
    results = launch(function, num_ranks, *args, timeout_seconds=timeout_seconds)
    Path(answered).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
