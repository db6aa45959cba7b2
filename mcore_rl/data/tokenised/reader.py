"""Read files and tokenise their rows, in this process or in data.workers child processes.

`python -m mcore_rl.data.tokenised.reader` is a child process: it receives the BlockTokeniser, then RawBlocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

from mcore_rl.data.files import read_rows
from mcore_rl.data.tokenised.blocks import Block, BlockTokeniser, RawBlock
from mcore_rl.data.tokenised.progress import with_progress
from mcore_rl.errors import DataError
from mcore_rl.processes import served
from mcore_rl.processes.pool import map_in_order, started

_ROWS_PER_BLOCK = 1024
"""Tokenizers are fast on blocks of rows."""
_NAME = "a tokenising process (set data.workers=1 to do without)"


def tokenised_blocks(files: Sequence[Path], tokeniser: BlockTokeniser) -> Iterator[Block]:
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


def tokenise_in_processes(raw: Iterator[RawBlock], tokeniser: BlockTokeniser) -> Iterator[Block]:
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
    tokeniser: BlockTokeniser = connection.recv()
    served.serve_calls(connection, tokeniser.tokenise)


if __name__ == "__main__":
    served.run(_serve)
