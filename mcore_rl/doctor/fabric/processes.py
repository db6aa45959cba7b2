"""The processes of one node's ranks: started together, watched, and killed at the end whatever happened."""

from __future__ import annotations

import multiprocessing
import signal
import time
from multiprocessing.context import SpawnProcess

from mcore_rl.doctor.fabric.board import Board
from mcore_rl.doctor.fabric.plan import Fabric
from mcore_rl.doctor.fabric.rank import Hinder, Seat, run_rank

SECONDS_TO_GO = 10.0
"""How long a killed process may take."""


class Ranks:
    """The processes of this node's ranks, which are killed when the block ends."""

    def __init__(self, board: Board, node: int, fabric: Fabric, timeout_seconds: float, hinder: Hinder) -> None:
        context = multiprocessing.get_context("spawn")
        self._board, self._dead = board, set[int]()
        self._processes: dict[int, SpawnProcess] = {}
        for rank in fabric.ranks_of(node):
            seat = Seat(rank, fabric, board.address, timeout_seconds)
            self._processes[rank] = context.Process(target=run_rank, args=(seat, hinder), daemon=True)

    def __enter__(self) -> Ranks:
        for process in self._processes.values():
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        started = [process for process in self._processes.values() if process.pid is not None]
        for process in started:
            process.kill()
        deadline = time.monotonic() + SECONDS_TO_GO
        for process in started:  # one that hangs in a driver cannot be killed
            process.join(max(0.0, deadline - time.monotonic()))

    def post_deaths(self) -> None:
        """Puts every rank that has ended, and how, on the board."""
        for rank, process in self._processes.items():
            if rank not in self._dead and process.exitcode is not None:
                self._dead.add(rank)
                self._board.post(f"death {rank}", _cause(process.exitcode))


def _cause(exit_code: int) -> str:
    if exit_code >= 0:
        return f"its process ended with exit code {exit_code}"
    return f"its process died of {signal.Signals(-exit_code).name}"
