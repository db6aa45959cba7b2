"""Read files and tokenise their rows, in this process or in data.workers child processes.

`python -m mcore_rl.data.tokenised.reader` is a child process: it receives the Tokeniser, then RawBlocks.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, TextIO, TypeVar

from mcore_rl.config.schema import DataConfig
from mcore_rl.data.files import read_rows
from mcore_rl.data.tokenised.blocks import Block, RawBlock
from mcore_rl.errors import DataError
from mcore_rl.processes import served
from mcore_rl.processes.pool import map_in_order, started

QUIET_SECONDS = 2.0
"""Reading that takes less time shows nothing."""
_TERMINAL_SECONDS, _LOG_SECONDS = 0.2, 30.0
"""Time between two updates."""


B = TypeVar("B", bound=Block)
B_co = TypeVar("B_co", bound=Block, covariant=True)


class Tokeniser(Protocol[B_co]):
    """Converter of blocks of rows, which child processes receive as a copy. `key`: configuration key of the files."""

    @property
    def key(self) -> str: ...

    @property
    def data_config(self) -> DataConfig: ...

    def tokenise(self, block: RawBlock) -> B_co: ...


def with_progress(blocks: Iterable[B], key: str, files: Sequence[Path], stream: TextIO | None = None) -> Iterator[B]:
    """Yield `blocks` and show how many rows have passed on `stream`, by default stderr: stdout is for results."""
    stream = stream or sys.stderr
    on_terminal, rows, started = stream.isatty(), 0, time.monotonic()
    next_update = started + QUIET_SECONDS
    with ExitStack() as stack:
        show = None
        for block in blocks:
            rows += len(block.prompts)
            now = time.monotonic()
            if now >= next_update:
                show = show or _display(stream, stack, on_terminal)
                position = f"file {block.file + 1} of {len(files)}, " if len(files) > 1 else ""
                speed = f"{rows / (now - started):,.0f} rows/s"
                show(f"{key}: {rows:,} rows tokenised ({position}{files[block.file]})  {speed}")
                next_update = now + (_TERMINAL_SECONDS if on_terminal else _LOG_SECONDS)
            yield block


def _display(stream: TextIO, stack: ExitStack, on_terminal: bool) -> Callable[[str], None]:
    if not on_terminal:
        return lambda line: print(line, file=stream, flush=True)
    # Most reads end before anything is shown, so importing rich early would cost more than it helps.
    from rich.console import Console
    from rich.text import Text

    status = stack.enter_context(Console(file=stream).status(""))
    return lambda line: status.update(Text(line))


_ROWS_PER_BLOCK = 1024
"""Tokenizers are fast on blocks of rows."""
_NAME = "a tokenising process (set data.workers=1 to do without)"


def tokenised_blocks(files: Sequence[Path], tokeniser: Tokeniser[B]) -> Iterator[B]:
    """Return all rows of the files as blocks, in the order of the files; shows progress after a few seconds.

    Raises: DataError for the first malformed row in this order; WorkerDiedError.
    """
    raw = _raw_blocks(files, tokeniser.key)
    first = list(islice(raw, 2))
    raw = itertools.chain(first, raw)
    # With one block, starting a process takes longer than tokenising.
    in_processes = tokeniser.data_config.workers > 1 and len(first) > 1
    blocks = tokenise_in_processes(raw, tokeniser) if in_processes else map(tokeniser.tokenise, raw)
    return with_progress(blocks, tokeniser.key, files)


def tokenise_in_processes(raw: Iterator[RawBlock], tokeniser: Tokeniser[B]) -> Iterator[B]:
    """Yield the blocks in their order. The processes have ended when the iterator is closed.

    Raises: DataError for the first malformed row, the same as in one process; WorkerDiedError.
    """
    errors: list[DataError] = []

    def blocks() -> Iterator[RawBlock]:
        """Yield blocks until reading fails: errors of earlier rows, which are still being tokenised, come first."""
        try:
            yield from raw
        except DataError as error:
            errors.append(error)

    environment = {"TOKENIZERS_PARALLELISM": "false"}  # the processes are the parallelism
    with started(__name__, _NAME, tokeniser.data_config.workers, environment) as workers:
        for worker in workers:  # after all have started, because they import for seconds before they read
            worker.send(tokeniser)
        yield from map_in_order(workers, blocks(), "tokenise")
    if errors:
        raise errors[0]


def _raw_blocks(files: Sequence[Path], key: str) -> Iterator[RawBlock]:
    for index, path in enumerate(files):
        rows = read_rows(path, key)
        while block := list(islice(rows, _ROWS_PER_BLOCK)):
            yield RawBlock(index, path, block)


def _serve(connection: Connection) -> None:
    tokeniser: Tokeniser[Block] = connection.recv()
    served.serve_calls(connection, tokeniser.tokenise)


if __name__ == "__main__":
    served.run(_serve)
