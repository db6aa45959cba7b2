"""Run a function on n processes that share a process group; if a rank fails or hangs, all are killed.

On the CPU, ranks share a gloo group, see no GPU, and fork from a server that has already imported megatron.core, so
that a launch takes milliseconds instead of seconds. A process that has initialized CUDA must not fork: ranks on GPUs
are spawned, each with its own GPU, and share an NCCL group.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_context = multiprocessing.get_context("forkserver")
SIMULATION = "MCORE_RL_TE"
"""Environment variable that makes ranks simulate TransformerEngine."""
SIMULATED = bool(os.environ.get(SIMULATION))
SIMULATED_ENGINE = "tests.te.everywhere"
_context.set_forkserver_preload([*([SIMULATED_ENGINE] if SIMULATED else []), "pytest", "tests.distributed.preloaded"])


_spawning = multiprocessing.get_context("spawn")


class RankFailedError(AssertionError):
    """A rank raised an exception, died or hung; the message contains its traceback."""


@dataclass(frozen=True)
class _Rank:
    """One process of the group, which meets the others through the file `store`."""

    index: int
    num_ranks: int
    store: str
    timeout_seconds: float
    device: str


def launch(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 300.0, device: str = "cpu"
) -> list[Any]:
    """Call function(rank, *args) on every rank of a new process group and return the results in the order of ranks.
    device: cpu, or cuda (rank i uses GPU i).

    The function must be importable (top level of a module), arguments and results picklable (numpy or lists rather than
    tensors). The group is always destroyed.

    Raises: RankFailedError with the traceback of the first rank that failed; the others are killed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        places = [_Rank(index, num_ranks, store, timeout_seconds, device) for index in range(num_ranks)]
        ranks = [_start(function, place, args) for place in places]
        try:
            return _collect(ranks, time.monotonic() + timeout_seconds)
        finally:
            for process, connection in ranks:
                # Kill the whole session: writing a checkpoint starts helper processes.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
                connection.close()


def fork_children() -> None:
    """Let a rank start its own children as forks, for any start method that its code requests: forks need not import
    torch again."""
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda *_: fork  # type: ignore[assignment]


def _start(function: Callable[..., Any], place: _Rank, args: tuple[Any, ...]) -> tuple[Any, Connection]:
    context: Any = _context if place.device == "cpu" else _spawning
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, function, place, args))
    with _environment_of(place.device):
        process.start()
    theirs.close()
    return process, ours


@contextmanager
def _environment_of(device: str) -> Iterator[None]:
    """Context that sets the environment inherited by a started process. The fork server inherits it from the first
    start and needs PYTHONPATH to find its preloaded modules (Python 3.11)."""
    wanted = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    if device == "cpu":
        wanted["CUDA_VISIBLE_DEVICES"] = ""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(ranks: list[tuple[Any, Connection]], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailedError(f"ranks {sorted(waiting.values())} did not finish in time")
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                succeeded, value = connection.recv()
            except EOFError:
                process = ranks[rank][0]
                process.join(5)
                raise RankFailedError(f"rank {rank} died with exit code {process.exitcode}") from None
            if not succeeded:
                ranks[rank][0].join(5)
                raise RankFailedError(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ranks))]


def _run(connection: Connection, function: Callable[..., Any], place: _Rank, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    os.setsid()
    torch.set_num_threads(1)
    if SIMULATED:  # the fork server ignores modules that it cannot import
        importlib.import_module(SIMULATED_ENGINE)
    try:
        if place.device == "cuda":
            torch.cuda.set_device(place.index)
        dist.init_process_group(
            "gloo" if place.device == "cpu" else "nccl",
            init_method=f"file://{place.store}",
            rank=place.index,
            world_size=place.num_ranks,
            timeout=timedelta(seconds=place.timeout_seconds),
        )
        # The function may destroy the group at once, while another rank still connects to this one.
        dist.barrier()
        connection.send((True, function(place.index, *args)))
        # A rank that exits early could break the last collective of another rank that still reads from it.
        if dist.is_initialized():
            dist.barrier()
    except BaseException:
        connection.send((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        connection.close()
