"""Values of the columns with responses and conversations: texts, and lists of messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from mcore_rl.data.chat.messages import normalized
from mcore_rl.data.columns import MESSAGES_AS_TEXT, PARSED_NOTE, Columns, Row, has_binary, messages_of_text
from mcore_rl.data.json_text import to_plain
from mcore_rl.errors import DataError
from mcore_rl.types.chat import ChatMessage
from mcore_rl.types.json import JsonValue


class Cell(NamedTuple):
    """Value of a column in JSON types. struct_nulls: see chat_messages."""

    value: JsonValue
    struct_nulls: bool


def read_cell(
    columns: Columns, value: object, where: str, *, struct_nulls: bool, as_text: re.Pattern[str] = MESSAGES_AS_TEXT
) -> Cell:
    """Convert a value like prompts: chat messages that are written as JSON text are parsed, and noted.

    where: start of error messages, with the column. as_text: beginning of such a text.

    Raises: DataError for binary data, a value such as a time that would silently become text, and invalid JSON.
    """
    # to_plain would convert such bytes to base64 text, which must not be trained.
    if has_binary(value):
        raise DataError(f"{where} has binary data that is not UTF-8; store it as text")
    _check_text(value, where)
    plain = to_plain(value)
    if isinstance(plain, str) and as_text.match(plain):
        columns.notes[PARSED_NOTE] += 1
        return Cell(messages_of_text(plain, where), struct_nulls=False)
    return Cell(plain, struct_nulls)


def read_response(
    columns: Columns, row: Row, column: str, where: str, *, struct_nulls: bool
) -> str | list[ChatMessage] | None:
    """Read a response, a text or a list of messages; None if the column is absent or empty, or has another type.

    where: place of the row. struct_nulls: see chat_messages.

    Raises: DataError as read_cell, and for invalid messages.
    """
    where = f"{where}: {column}"
    value, struct_nulls = read_cell(columns, row.get(column), where, struct_nulls=struct_nulls)
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return normalized(value, where, struct_nulls=struct_nulls)
    return None


def _check_text(value: object, where: str) -> None:
    """Reject values that are no text, but that to_plain converts to text."""
    if isinstance(value, list | tuple):
        for number, message in enumerate(value, start=1):
            if isinstance(message, Mapping):
                for name in ("content", "value"):
                    _check_text(message.get(name), f"{where}: message {number}: {name}")
    elif not isinstance(value, str | bytes) and isinstance(to_plain(value), str):
        raise DataError(f"{where} is {type(value).__name__}, not a text or a list of messages; store it as text")
