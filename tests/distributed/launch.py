"""Runs a function on n processes that share a process group; a rank that fails or hangs ends them all.

On the CPU they share a gloo group, see no GPU, and fork from one server that has imported megatron.core already, so a
launch costs milliseconds, not seconds. A process that has asked for CUDA devices must not fork: ranks on GPUs start
anew, each with a GPU of its own, and share an NCCL group.
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
"""The environment's variable with which ranks have TransformerEngine, simulated."""
SIMULATED = bool(os.environ.get(SIMULATION))
SIMULATED_ENGINE = "tests.te.everywhere"
_context.set_forkserver_preload([*([SIMULATED_ENGINE] if SIMULATED else []), "pytest", "tests.distributed.preloaded"])


_spawning = multiprocessing.get_context("spawn")


class RankFailedError(AssertionError):
    """A rank raised, died or hung; the message is its traceback."""


@dataclass(frozen=True)
class _Rank:
    """One process of the group that meets in the file `store`."""

    index: int
    num_ranks: int
    store: str
    timeout_seconds: float
    device: str


def launch(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 300.0, device: str = "cpu"
) -> list[Any]:
    """Calls function(rank, *args) on every rank, in a group of num_ranks, and returns what each returned. `device` is
    cpu, or cuda: then rank i has GPU i.

    The function must be importable (top level of a module), arguments and results picklable (send numpy or lists
    rather than tensors). The group is destroyed whatever happens.

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
                # The whole session: a checkpoint being written has helper processes of its own.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
                connection.close()


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
    """While a process starts that inherits it; the fork server does with the first rank, and finds what it preloads by
    the environment alone (Python 3.11)."""
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
    if SIMULATED:  # the fork server passes over what it cannot import
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
        connection.send((True, function(place.index, *args)))
        # A rank that leaves while another still reads from it would break that one's last collective.
        if dist.is_initialized():
            dist.barrier()
    except BaseException:
        connection.send((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        connection.close()
