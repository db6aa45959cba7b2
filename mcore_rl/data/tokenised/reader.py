"""Blocks of rows, tokenised by several processes: block k by process k modulo their number, so that results are taken
in the order of the rows without being sorted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe

from mcore_rl.data.tokenised.blocks import Block, BlockTokeniser, RawBlock
from mcore_rl.errors import DataError, WorkerDiedError
from mcore_rl.processes.tree import kill_tree, marked, new_mark

_MODULE = "mcore_rl.data.tokenised.process"
_SECONDS_TO_EXIT = 5.0
"""Of a process whose connection is closed already."""


def tokenise_in_processes(raw: Iterator[RawBlock], tokeniser: BlockTokeniser) -> Iterator[Block]:
    """The blocks, in their order; the processes are gone when this ends, however it does.

    Raises: DataError for the first malformed row, the same as one process would find; WorkerDiedError.
    """
    processes: list[_Process] = []
    reading = _Reading(raw)
    try:
        for _ in range(tokeniser.data_config.workers):
            processes.append(_Process())  # one by one: what has started is closed, whichever fails
        for process in processes:  # after all have started, as they import for seconds before they read
            process.send(tokeniser)
        waiting: list[_Process] = []
        for number, block in enumerate(reading):
            process = processes[number % len(processes)]
            # One block at a time each: a process that still sends a result reads nothing, and neither would go on.
            if process in waiting:
                waiting.remove(process)
                yield process.result()
            process.send(block)
            waiting.append(process)
        for process in waiting:
            yield process.result()
        reading.check()
    finally:
        for process in processes:
            process.close()


class _Reading:
    """Reads ahead of what has been tokenised: an error of reading is told when everything before it has been."""

    def __init__(self, raw: Iterator[RawBlock]) -> None:
        self._raw = raw
        self._error: DataError | None = None

    def __iter__(self) -> Iterator[RawBlock]:
        try:
            yield from self._raw
        except DataError as error:
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            raise self._error


class _Process:
    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._mark = new_mark()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(descriptor), str(os.getpid())],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env=marked(_environment(), self._mark),
                process_group=0,
            )

    def send(self, message: BlockTokeniser | RawBlock) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._died() from error

    def result(self) -> Block:
        try:
            answer: Block | DataError = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(answer, DataError):
            raise answer
        return answer

    def close(self) -> None:
        self._connection.close()
        kill_tree(self._process, self._mark)

    def _died(self) -> WorkerDiedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_EXIT)
        code = self._process.poll()
        return WorkerDiedError(
            f"a tokenising process (data.workers) ended with exit code {code}; what it wrote is above. With "
            "data.workers=1 this process does its work"
        )


def _environment() -> dict[str, str]:
    """Finds what this process finds."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # The processes are the parallelism: threads in each of them would only get into each other's way.
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
