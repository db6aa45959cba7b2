"""Messages between an engine's process and those of its tools: pickled objects, each behind its length.

Over asyncio streams, not multiprocessing's connections: a tool process that neither reads nor answers must not hold up
the loop on the other side. Both ends are processes of ours; nothing that a model wrote is unpickled as such.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")


def write(writer: asyncio.StreamWriter, message: Any) -> None:
    """Queues a message; whatever of it the other end has not read is held in memory.

    Raises: what pickle raises for a message that it cannot take.
    """
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    writer.write(_LENGTH.pack(len(content)) + content)


async def read(reader: asyncio.StreamReader) -> Any:
    """Raises: EOFError, at the end or in a message that is cut off; ConnectionError."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        raise EOFError from error
