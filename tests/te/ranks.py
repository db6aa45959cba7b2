"""Launch of ranks with simulated TransformerEngine from a process without it. `launch_simulated` runs
tests.distributed.launch.launch in a child process."""

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
    """Return the result of launch(function, num_ranks, *args)."""
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
