"""Launches ranks under the simulated TransformerEngine from tests whose own process has none: `launch_simulated` is
tests.dist.launch.launch in a process whose ranks have it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.readme import ROOT

FLAG = "MCORE_RL_TE"


def launch_simulated(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 300
) -> list[Any]:
    """What launch(function, num_ranks, *args) returns."""
    with tempfile.TemporaryDirectory() as directory:
        asked, answered = Path(directory, "asked"), Path(directory, "answered")
        asked.write_bytes(pickle.dumps((function, num_ranks, args, timeout_seconds)))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.te.ranks", str(asked), str(answered)],
            cwd=ROOT,
            env={**os.environ, FLAG: "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        results: list[Any] = pickle.loads(answered.read_bytes())
        return results


def main(asked: str, answered: str) -> None:
    from tests.dist.launch import launch

    function, num_ranks, args, timeout_seconds = pickle.loads(Path(asked).read_bytes())
    results = launch(function, num_ranks, *args, timeout_seconds=timeout_seconds)
    Path(answered).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
