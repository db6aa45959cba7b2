"""Messages over asyncio streams: pickled objects, each preceded by its length.

Processes without an event loop use multiprocessing's connections instead, whose `send` blocks while the peer does not
read. Both ends are processes of this project; text that a model wrote is never unpickled.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")


def write(writer: asyncio.StreamWriter, message: object) -> None:
    """Queue a message. Messages that the peer has not read stay in memory.

    Raises: the error of pickle for an object that it does not support.
    """
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    writer.write(_LENGTH.pack(len(content)) + content)


async def read(reader: asyncio.StreamReader) -> Any:
    """Read the next message.

    Raises: EOFError at the end of the stream or inside a message; ConnectionError.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    # Also raised inside a message, if the peer has died while it wrote.
    except asyncio.IncompleteReadError as error:
        raise EOFError from error
