"""Profiles of chosen trainer ranks in chosen steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.runtime.calls import ProcessHandle
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.roles.trainer import TrainerProcess

FOLDER = "profile"
"""Folder of run.dir with the profiles."""


@dataclass(frozen=True)
class StepProfiler:
    """Implements trainer.run.Profiler.

    processes: all trainer ranks.
    note: function that prints a line.
    """

    processes: Sequence[ProcessHandle[TrainerProcess]]
    watch: Watch
    run_dir: Path
    steps: Collection[int]
    ranks: Collection[int]
    note: Callable[[str], None]

    def begin(self, step: int) -> None:
        """Start the profiles if `step` is to be profiled."""
        if step in self.steps:
            self.watch.get([self.processes[rank].call(TrainerProcess.start_profile) for rank in set(self.ranks)])

    def end(self, step: int) -> None:
        """Stop and write the profiles of `step`, if there are any."""
        if step not in self.steps:
            return
        directory = self.run_dir / FOLDER
        paths = {rank: str(directory / f"step_{step}_rank_{rank}") for rank in self.ranks}
        calls = [self.processes[rank].call(TrainerProcess.write_profile, path) for rank, path in paths.items()]
        self.watch.get(calls)
        self.note(
            f"profiles of step {step}: {directory}/step_{step}_rank_*.json.gz; open them in https://ui.perfetto.dev"
        )
