"""Rows for supervised training: conversations of several turns, or a prompt with a target.

A conversation is a list of messages in OpenAI's format (`messages`) or ShareGPT's (`conversations`, with `from` and
`value`). The messages before the first trained turn are its prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mcore_rl.data.chat.messages import normalized
from mcore_rl.data.columns import ANSWER_COLUMNS, PROMPT_COLUMNS, Columns, Row, listing
from mcore_rl.data.supervised.cells import read_cell, read_response
from mcore_rl.data.supervised.encoder import Response, TextRow, is_trained
from mcore_rl.errors import DataError
from mcore_rl.types.chat import ChatMessage

MESSAGES_COLUMNS = ("messages", "conversations")
COMPLETION_COLUMNS = ("completion", ANSWER_COLUMNS[0])
CONVERSATION_COLUMNS = (*MESSAGES_COLUMNS, *COMPLETION_COLUMNS)
_LIST_AS_TEXT = re.compile(r"\s*\[\s*\{")
"""Beginning of a list of messages that was written as JSON text; these columns have no other texts."""
_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


def read_conversation(columns: Columns, place: str, row: Row, struct_nulls: bool) -> TextRow:
    """Extract the prompt of a row and its target, a text or messages. struct_nulls: see chat_messages.

    Raises: DataError naming the row and the missing part.
    """
    where = f"{columns.key}: {place}"
    column = next((name for name in MESSAGES_COLUMNS if row.get(name) is not None), None)
    if column is None:
        completion = _completion(columns, row, where, struct_nulls=struct_nulls)
        return TextRow(columns.read(place, row), (completion,))
    messages = _messages(columns, row, column, where, struct_nulls=struct_nulls)
    first = next((n for n, each in enumerate(messages) if is_trained(each, f"{where}: message {n + 1}")), None)
    if not first:
        problem = "has no turn of the assistant that is trained" if first is None else "begins with a trained turn"
        raise DataError(f"{where}: {column} {problem}; remove the row, or add messages")
    name = columns.data_config.prompt_key or PROMPT_COLUMNS[0]
    return TextRow(columns.read(place, {**row, name: messages[:first]}), (messages[first:],))


def _messages(columns: Columns, row: Row, column: str, where: str, *, struct_nulls: bool) -> list[ChatMessage]:
    cell = read_cell(columns, row[column], f"{where}: {column}", struct_nulls=struct_nulls, as_text=_LIST_AS_TEXT)
    value: object = cell.value
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {column} is not a list of chat messages")
    if all(isinstance(each, Mapping) and "from" in each and "role" not in each for each in value):
        value = [_from_sharegpt(each, f"{where}: message {n}") for n, each in enumerate(value, start=1)]
    return normalized(value, f"{where}: {column}", struct_nulls=cell.struct_nulls)


def _from_sharegpt(message: object, where: str) -> dict[str, object]:
    assert isinstance(message, Mapping)
    role = _SHAREGPT_ROLES.get(str(message["from"]))
    if role is None:
        raise DataError(
            f"{where} is from {message['from']!r}, but ShareGPT's known names are {', '.join(_SHAREGPT_ROLES)}; write "
            "the conversation as messages with role and content"
        )
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    return {**others, "role": role, "content": message.get("value")}


def _completion(columns: Columns, row: Row, where: str, *, struct_nulls: bool) -> Response:
    wanted = columns.data_config.answer_key
    names = COMPLETION_COLUMNS if wanted is None else (wanted,)
    name = next((name for name in names if row.get(name) is not None), names[0])
    response = read_response(columns, row, name, where, struct_nulls=struct_nulls)
    if response is not None:
        return response
    raise DataError(
        f"{where} has neither messages nor a target text in column {' or '.join(map(repr, names))} (its columns are "
        f"{listing(row)}); set data.answer_key to the column of target texts"
    )
