"""Hints of training rows: text or chat messages that the teacher reads and the policy does not (data.hint_key)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from mcore_rl.config.schema import DataConfig
from mcore_rl.data.chat.messages import chat_messages, text_of
from mcore_rl.data.json_text import parse_json, to_plain
from mcore_rl.data.templates import with_system
from mcore_rl.errors import DataError
from mcore_rl.types.chat import ChatMessage

PROMPT, HINT = "{prompt}", "{hint}"
"""Placeholders of data.hint_template."""


def hint_column(data_config: DataConfig) -> str | None:
    """Return the column of data.hint_key: the part before the first dot; None without hints."""
    return None if data_config.hint_key is None else data_config.hint_key.partition(".")[0]


def hinted_messages(
    hint: object,
    messages: Sequence[ChatMessage],
    data_config: DataConfig,
    where: str,
    *,
    struct_nulls: bool = False,
) -> list[ChatMessage]:
    """Return the messages of a row's prompt with its hint, normalized; [] for a row without a hint.

    A text is put into the last user message by data.hint_template. Chat messages replace the prompt. `where` starts
    error messages; struct_nulls: see chat_messages.

    Raises: DataError for a hint of another type, or for a text without a user message.
    """
    if isinstance(hint, str):
        # A template around blanks would change the teacher's prompt and tell it nothing.
        hint = hint if hint.strip() else None
    if hint is None or hint in ([], ()) or hint != hint:  # NaN differs from itself
        return []
    where = f"{where}: hint {data_config.hint_key!r}"
    if isinstance(hint, list | tuple):
        return with_system(
            chat_messages(to_plain(list(hint)), where, struct_nulls=struct_nulls), data_config.system_prompt
        )
    if isinstance(hint, bool) or not isinstance(hint, str | int | float):
        raise DataError(f"{where} is {type(hint).__name__}, not a text or a list of chat messages")
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        raise DataError(
            f"{where} is a text, and the prompt has no user message that it could be added to; write the hint as chat "
            "messages, which replace the prompt"
        )
    last = messages[places[-1]]
    # The hint first: a prompt may contain the text of a placeholder.
    before, _, after = data_config.hint_template.partition(PROMPT)
    text = text_of(last).join((before.replace(HINT, str(hint)), after.replace(HINT, str(hint))))
    return [*messages[: places[-1]], {**last, "content": text}, *messages[places[-1] + 1 :]]


def read_hint(row: Mapping[str, object], data_config: DataConfig, where: str) -> object:
    """Return the value of data.hint_key: a column, or a field such as extra_info.solution; None if the row lacks it.

    Raises: DataError for a column with fields that is damaged JSON text.
    """
    key, found = str(data_config.hint_key), cast("object", row)
    for name in key.split("."):
        if isinstance(found, str) and found.lstrip().startswith("{"):  # an object in a CSV file
            found = parse_json(found, f"{where}: {key}")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
