"""Rows with a prompt, a chosen and a rejected response, in the formats of TRL's preference data sets.

The responses are texts, or lists of messages. Without a prompt, the messages that both lists begin with are the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mcore_rl.data.columns import PROMPT_COLUMNS, Columns, Row, is_empty, listing
from mcore_rl.data.supervised.cells import read_response
from mcore_rl.data.supervised.encoder import Response, TextRow
from mcore_rl.errors import DataError
from mcore_rl.types import Prompt
from mcore_rl.types.chat import ChatMessage

CHOSEN_COLUMN, REJECTED_COLUMN = "chosen", "rejected"
RESPONSE_COLUMNS = (CHOSEN_COLUMN, REJECTED_COLUMN)
MARGIN_COLUMN = "margin"


def read_scored_pair(columns: Columns, place: str, row: Row, struct_nulls: bool) -> TextRow:
    """Extract a pair like read_pair, with its margin; a row without one has margin 0."""
    pair, value = read_pair(columns, place, row, struct_nulls), row.get(MARGIN_COLUMN)
    if is_empty(value):
        return pair
    try:
        # A CSV file has texts.
        margin = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise DataError(
            f"{columns.key}: {place}: {MARGIN_COLUMN} is {value!r}, not a finite number; correct the row, or leave the "
            "column out"
        )
    return pair._replace(margin=margin)


def read_pair(columns: Columns, place: str, row: Row, struct_nulls: bool) -> TextRow:
    """Extract the prompt of a row, and its chosen and rejected response: texts, or the messages after the prompt's.
    struct_nulls: see chat_messages.

    Raises: DataError naming the row and the missing part.
    """
    where = f"{columns.key}: {place}"
    given = tuple(_response(columns, row, column, where, struct_nulls=struct_nulls) for column in RESPONSE_COLUMNS)
    if isinstance(given[0], str) != isinstance(given[1], str):
        raise DataError(
            f"{where}: one of chosen and rejected is a text and the other a list of messages; "
            "write both in the same form"
        )
    shared = 0
    if not _has_prompt(columns, row):
        shared = _common(given, where)
        row = {**row, PROMPT_COLUMNS[0]: given[0][:shared]}
    prompt = columns.read(place, row)
    responses = tuple(
        each if isinstance(each, str) else _after_prompt(each[shared:], prompt, f"{where}: {column}")
        for each, column in zip(given, RESPONSE_COLUMNS, strict=True)
    )
    if responses[0] == responses[1]:
        raise DataError(f"{where}: chosen and rejected are equal; remove the row")
    return TextRow(prompt, responses)


def _has_prompt(columns: Columns, row: Row) -> bool:
    wanted = columns.data_config.prompt_key
    # A key that is set names a column that must exist: Columns reports it.
    return wanted is not None or any(row.get(column) is not None for column in PROMPT_COLUMNS)


def _response(columns: Columns, row: Row, column: str, where: str, *, struct_nulls: bool) -> Response:
    response = read_response(columns, row, column, where, struct_nulls=struct_nulls)
    if response is not None:
        return response
    raise DataError(
        f"{where} has no response in column {column!r} (its columns are {listing(row, column)}): a pair has the "
        "columns chosen and rejected, texts or lists of messages"
    )


def _common(given: Sequence[Response], where: str) -> int:
    """Return the number of messages that both responses begin with."""
    first, second = given
    if isinstance(first, str) or isinstance(second, str):
        raise DataError(
            f"{where} has texts as chosen and rejected, but no prompt; add a column prompt, or set data.prompt_key"
        )
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    # Equal lists: _after_prompt reports the empty response.
    if not count:
        raise DataError(
            f"{where} has no prompt: chosen and rejected begin with different messages; add a column prompt, or set "
            "data.prompt_key"
        )
    return count


def _after_prompt(messages: list[ChatMessage], prompt: Prompt, where: str) -> list[ChatMessage]:
    """Return the messages after the prompt. Some data sets repeat the prompt in their responses."""
    asked = [message for message in prompt.messages if message["role"] not in ("system", "developer")]
    given = [message for message in messages if message["role"] not in ("system", "developer")]
    if asked and given[: len(asked)] == asked:
        messages = given[len(asked) :]
    if not messages or messages[0]["role"] != "assistant":
        role = messages[0]["role"] if messages else None
        raise DataError(
            f"{where} must begin with a message of the assistant after the prompt, "
            + (f"not of {role!r}" if role else "but it has no message of its own")
        )
    return messages
