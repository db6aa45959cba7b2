"""Runs a function on n processes that share a gloo group; a rank that fails or hangs ends them all.

Processes fork from one server that has imported megatron.core already, so a launch costs milliseconds, not seconds.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
SIMULATED_ENGINE = "tests.te.everywhere"
_preloaded_first = [SIMULATED_ENGINE] if os.environ.get("MCORE_RL_TE") else []
_context.set_forkserver_preload(
    [
        *_preloaded_first,
        "pytest",
        "mcore_rl.megatron.build.model",
        "megatron.core.dist_checkpointing",
        "megatron.core.optimizer",
        "torch._dynamo",  # the first optimizer step imports it
    ]
)


class RankFailedError(AssertionError):
    """A rank raised, died or hung; the message is its traceback."""


def launch(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 90.0) -> list[Any]:
    """Calls function(rank, *args) on every rank, in a gloo group of num_ranks, and returns what each returned.

    The function must be importable (top level of a module), arguments and results picklable (send numpy or lists
    rather than tensors). The group is destroyed whatever happens.

    Raises: RankFailedError with the traceback of the first rank that failed; the others are killed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        ranks = [_start(function, rank, num_ranks, store, args, timeout_seconds) for rank in range(num_ranks)]
        try:
            return _collect(ranks, time.monotonic() + timeout_seconds)
        finally:
            for process, connection in ranks:
                # The whole session: a checkpoint being written has helper processes of its own.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
                connection.close()


def _start(
    function: Callable[..., Any], rank: int, num_ranks: int, store: str, args: tuple[Any, ...], timeout_seconds: float
) -> tuple[Any, Connection]:
    ours, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_run, args=(theirs, function, rank, num_ranks, store, args, timeout_seconds))
    process.start()
    theirs.close()
    return process, ours


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


def _run(
    connection: Connection,
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    store: str,
    args: tuple[Any, ...],
    timeout_seconds: float,
) -> None:
    import torch
    import torch.distributed as dist

    os.setsid()
    torch.set_num_threads(1)
    if _preloaded_first:  # the fork server passes over what it cannot import
        importlib.import_module(SIMULATED_ENGINE)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_seconds),
        )
        connection.send((True, function(rank, *args)))
        # A rank that leaves while another still reads from it would break that one's last collective.
        if dist.is_initialized():
            dist.barrier()
    except BaseException:
        connection.send((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        connection.close()
