"""Extraction of prompt, ground truth and options from the rows of a file, in verl's columns or plain ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path

import numpy as np

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.chat.messages import chat_messages
from mcore_rl.data.files import read_rows
from mcore_rl.data.json_text import parse_json, to_plain
from mcore_rl.data.sources.hints import hint_column, hinted_messages, read_hint
from mcore_rl.data.sources.paths import Names, find_files, format_files
from mcore_rl.data.sources.row_options import SELECTION, TOOLS, RowTools, check_sampling, check_turns
from mcore_rl.data.templates import with_system
from mcore_rl.errors import DataError
from mcore_rl.types import ImageSource, Prompt
from mcore_rl.types.chat import ChatMessage, ToolSchema
from mcore_rl.types.json import JsonValue
from mcore_rl.vision.placeholders import marked
from mcore_rl.vision.sources import image_sources

_MEDIA = re.compile(
    r"(image|picture|video|audio)s?(_(url|path|file|bytes|data)s?)?|pixel_values|multi_?modal_(data|inputs)|mm_data",
    re.IGNORECASE,
)
"""Names of columns with images, videos or audio."""


def is_empty(value: object) -> bool:
    """Return whether a value is empty: null, NaN, an empty text or list, or a struct of empty fields."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    # NaN differs from itself.
    return value is None or value in ("", b"") or value != value


PROMPT_COLUMNS = ("prompt", "question")
ANSWER_COLUMNS = ("answer", "ground_truth")
_TOOL_COLUMNS = ("need_tools_kwargs", "tools_kwargs", "interaction_kwargs")
_TEMPLATE_KWARGS = "chat_template_kwargs"
_SINGLE_TURN = "single_turn_agent"
"""verl's agent name for episodes without tools."""
_WITH_TOOLS = "tool_agent"
"""verl's agent name for episodes with tools."""
_KNOWN = frozenset(
    [
        *("reward_model", "data_source", "extra_info", "sampling", "max_turns", "agent_name"),
        *(_TEMPLATE_KWARGS, *_TOOL_COLUMNS, TOOLS, SELECTION),
    ]
)
"""Columns that are read or have a note of their own; they are never reported as ignored."""
MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
"""Beginning of a list of chat messages that was written as text, for example in a CSV file."""
PARSED_NOTE = "have chat messages as JSON text, which was parsed"
_NAME_CHARACTERS = 40
_NO_TOKENS = np.empty(0, np.int32)

Row = Mapping[str, object]


@dataclass
class Columns:
    """Reader of the rows of one file. Files of a run may have different columns.

    key: configuration key of the file, for messages.
    runs_tools: whether rows may require episodes with tools.
    trained: whether responses are trained on, which restricts their sampling options.
    graded: whether rows have a ground truth.
    image_text: text of an image in prompts; None: the model reads text only.
    notes: notes for the user, with the number of rows.
    ignored: columns that are not empty and not used.
    """

    data_config: DataConfig
    rollout_config: RolloutConfig
    key: str
    path: Path
    runs_tools: bool = False
    trained: bool = False
    tools: Sequence[ToolSchema] = ()
    graded: bool = True
    image_text: str | None = None
    notes: Counter[str] = field(default_factory=Counter)
    ignored: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._struct_nulls = self.path.suffix not in (".jsonl", ".csv")
        """True for Arrow files: their structs contain a null for every field that only other rows use."""
        self._names = "its columns, which line 1 names, are" if self.path.suffix == ".csv" else "its columns are"
        self._tools = RowTools(self.tools, executes=self.runs_tools)
        self._read: set[str] = set()
        """Columns of the current row that are used."""

    def read(self, place: str, row: Row) -> Prompt:
        """Extract the values of a row; `row`, `token_ids` and `text` of the result are not set yet.

        Raises: DataError for a row that lacks a column or requires an unsupported option.
        """
        where = f"{self.key}: {place}"
        # NaN marks a missing value, except in max_turns, where check_turns rejects it.
        row = {name: value for name, value in row.items() if value == value or name == "max_turns"}
        self._check_media(row, where)
        self._read = {*_KNOWN, self.data_config.image_key, *filter(None, [hint_column(self.data_config)])}
        extra_info = _object(row, "extra_info", where)
        self._check_tools(row, extra_info, where)
        self._check_template_kwargs(row, where)
        messages, images = self._messages(row, where)
        prompt = Prompt(
            row=-1,
            token_ids=_NO_TOKENS,
            text="",
            messages=messages,
            data_source=_data_source(row, where),
            ground_truth=to_plain(self._ground_truth(row, where)) if self.graded else None,
            extra_info=extra_info,
            sampling=check_sampling(
                _object(_source_of("sampling", row, extra_info, where), "sampling", where),
                where,
                trained=self.trained,
                max_response_tokens=self.rollout_config.max_response_tokens,
                keeps_mask=self.rollout_config.keep_sampling_mask,
            ),
            max_turns=check_turns(_source_of("max_turns", row, extra_info, where).get("max_turns"), where),
            tools=self._row_tools(row, extra_info, where),
            images=tuple(images),
        )
        self.ignored |= {name: None for name in row if name not in self._read and not is_empty(row[name])}
        return prompt

    def hinted(self, place: str, row: Row, prompt: Prompt) -> list[ChatMessage]:
        """Return the messages of a row with its hint, [] without one. prompt: the result of `read`.

        Raises: DataError.
        """
        where, struct_nulls = f"{self.key}: {place}", self._struct_nulls
        hint = read_hint(row, self.data_config, where)
        if isinstance(hint, str) and MESSAGES_AS_TEXT.match(hint):
            hint, struct_nulls = messages_of_text(hint, f"{where}: the hint"), False
        return hinted_messages(hint, prompt.messages, self.data_config, where, struct_nulls=struct_nulls)

    def _check_media(self, row: Row, where: str) -> None:
        """Reject columns with media that the model does not read."""
        column = None if self.image_text is None else self.data_config.image_key
        media = [name for name in row if _MEDIA.fullmatch(name) and name != column and not is_empty(row[name])]
        if not media:
            return
        if self.image_text is None:
            raise DataError(
                f"{where} has {media[0]}, but prompts are text only, and the model would be trained without it; set"
                f" {self.key} to a file without such rows, or without the column if the text suffices"
            )
        raise DataError(
            f"{where} has {media[0]}, but prompts have text, and images in column {column!r} only; set data.image_key"
            " if this is the column of images, or remove the column or the row"
        )

    def _messages(self, row: Row, where: str) -> tuple[list[ChatMessage], list[ImageSource]]:
        """Return the messages and images of a row."""
        prompt, struct_nulls, images = self._prompt(row, where), self._struct_nulls, list[ImageSource]()
        if self.image_text is not None:
            column = row.get(self.data_config.image_key)
            given = [] if is_empty(column) else column if isinstance(column, list | tuple) else [column]
            places = marked(prompt, given, self.image_text, where)
            prompt, images = places.prompt, image_sources(places.images, where, self.path.parent)
        if isinstance(prompt, list):
            # to_plain would convert such bytes to base64 text, which must not become a prompt.
            if has_binary(prompt):
                raise DataError(f"{where}: the prompt has binary data that is not UTF-8; store it as text")
            prompt = to_plain(prompt)
        if isinstance(prompt, str) and MESSAGES_AS_TEXT.match(prompt):
            prompt, struct_nulls = messages_of_text(prompt, f"{where}: the prompt"), False
            self.notes[PARSED_NOTE] += 1
        messages = chat_messages(prompt, where, struct_nulls=struct_nulls)
        return with_system(messages, self.data_config.system_prompt), images

    def _prompt(self, row: Row, where: str) -> object:
        wanted = self.data_config.prompt_key
        for column in PROMPT_COLUMNS if wanted is None else (wanted,):
            if row.get(column) is not None:
                self._read.add(column)
                return row[column]
        if wanted is None:
            names = listing(row)
            raise DataError(f"{where} has no prompt: {self._names} {names}; set data.prompt_key to one of them")
        if _is_verl_row(row):
            self.notes[f"have no column {wanted!r}: verl's column prompt is used"] += 1
            self._read.add("prompt")
            return row["prompt"]
        raise DataError(f"{where} has no prompt in column {wanted!r}: {_remedy('data.prompt_key', wanted, row)}")

    def _ground_truth(self, row: Row, where: str) -> object:
        wanted = self.data_config.answer_key
        if wanted is not None and row.get(wanted) is not None:
            self._read.add(wanted)
            return row[wanted]
        truth = _object(row, "reward_model", where).get("ground_truth")
        # NaN marks a missing value and is no ground truth.
        if truth is not None and truth == truth:
            if wanted is not None:
                self.notes[f"have no column {wanted!r}: verl's reward_model.ground_truth is used"] += 1
            return truth
        if wanted is not None:
            raise DataError(
                f"{where} has no ground truth in column {wanted!r}: {_remedy('data.answer_key', wanted, row)}"
            )
        for column in ANSWER_COLUMNS:
            if row.get(column) is not None:
                self._read.add(column)
                return row[column]
        raise DataError(
            f"{where} has no ground truth: neither reward_model.ground_truth nor column "
            f"{' or '.join(map(repr, ANSWER_COLUMNS))} ({self._names} {listing(row)}); set data.answer_key to one of"
            " them"
        )

    def _row_tools(self, row: Row, extra_info: Row, where: str) -> list[ToolSchema] | None:
        given, selection = row.get(TOOLS), _source_of(SELECTION, row, extra_info, where).get(SELECTION)
        if not self._tools.executes:
            if not is_empty(selection) and given is None:
                self.notes[f"have {SELECTION}, which is ignored: rollout.tools is empty"] += 1
                selection = None
            if not is_empty(given):
                self.notes[f"have {TOOLS}, shown in prompts: calls are text for the reward, nothing is executed"] += 1
        unknown = self._tools.unknown(extra_info.get("tools_kwargs"))
        if unknown and self._tools.executes:
            self.notes[f"have tools_kwargs of {', '.join(unknown)}, which rollout.tools does not have"] += 1
        return self._tools.of(given, selection, where, struct_nulls=self._struct_nulls)

    def _check_tools(self, row: Row, extra_info: Row, where: str) -> None:
        """Note agent and tool columns that the run ignores; reject verl rows with a tool agent if it has no tools."""
        agent = row.get("agent_name")
        if self.runs_tools:
            if agent not in (None, _SINGLE_TURN, _WITH_TOOLS):
                self.notes[f"have agent_name {agent!r}, which is ignored: rollout.episode selects the episode"] += 1
            if columns := [name for name in _TOOL_COLUMNS if row.get(name)]:
                self.notes[f"have columns {', '.join(columns)}, which are ignored: move them into extra_info"] += 1
            return
        if agent is not None and agent != _SINGLE_TURN:
            # In verl's format the column requests an episode with tools, and training single turns instead would go
            # unnoticed. In other files the column may have another meaning.
            if _is_verl_row(row):
                raise DataError(
                    f"{where} has agent_name {agent!r}, but prompts are answered in a single turn without tools; set"
                    f" {self.key} to a file without such rows, or without the column if single turns are intended"
                )
            self.notes["have agent_name, which is ignored: responses are single turns"] += 1
        if unused := [name for name in _TOOL_COLUMNS if extra_info.get(name) or row.get(name)]:
            self.notes[f"have {', '.join(unused)}, which are ignored: responses are single turns without tools"] += 1

    def _check_template_kwargs(self, row: Row, where: str) -> None:
        """Reject template arguments (a column of TRL) unless they equal data.template_kwargs, used for later turns."""
        given = _object(row, _TEMPLATE_KWARGS, where)
        given = {name: value for name, value in given.items() if not (self._struct_nulls and value is None)}
        if different := [name for name, value in given.items() if self.data_config.template_kwargs.get(name) != value]:
            raise DataError(
                f"{where} has {_TEMPLATE_KWARGS}.{different[0]}={given[different[0]]!r}, but arguments of the chat "
                f"template are the same for all rows; set data.template_kwargs.{different[0]}, or remove the column"
            )


def format_notes(noted: Mapping[str, int], ignored: Collection[str] = ()) -> tuple[str, ...]:
    """Format the notes of Columns as lines; the last line lists ignored columns."""
    lines = [f"{count} rows {text}" for text, count in noted.items()]
    if ignored:
        names = listing(dict.fromkeys(ignored))
        lines.append(f"ignored columns: {names} (reward functions and tools receive extra_info)")
    return tuple(lines)


def check_keys(data_config: DataConfig, paths: Mapping[str, Names]) -> None:
    """Check that data.prompt_key, data.answer_key and data.hint_key, if set, name a column of at least one file.

    One file may lack the column, because rows in verl's format do not need it. Reads the first row of each file.
    `paths` maps configuration keys to their values.

    Raises: DataError.
    """
    wanted = {
        "data.prompt_key": data_config.prompt_key,
        "data.answer_key": data_config.answer_key,
        "data.hint_key": hint_column(data_config),
    }
    if not any(wanted.values()):
        return
    columns: dict[str, None] = {}
    found = {key: find_files(names, key) for key, names in paths.items()}
    for key, files in found.items():
        for path in files:
            # Reading whole files would take as long as loading them.
            for _, row in islice(read_rows(path, key), 1):
                columns |= dict.fromkeys(row)
    for key, column in wanted.items():
        # If all files are empty, the loader reports that instead.
        if columns and column is not None and column not in columns:
            where = " and ".join(f"{name} ({format_files(files)})" for name, files in found.items())
            raise DataError(f"{key}: there is no column {column!r} in {where}: {_remedy(key, column, columns)}")


def listing(columns: Row, nearest: str | None = None) -> str:
    """Join the names of columns, the most similar to `nearest` first."""
    names = list(columns)
    if nearest is not None:
        names.sort(key=lambda name: -SequenceMatcher(None, name.lower(), nearest.lower()).ratio())
    return ", ".join(n if len(n) <= _NAME_CHARACTERS else f"{n[:_NAME_CHARACTERS]}..." for n in names) or "none"


def _remedy(key: str, wanted: str, row: Row) -> str:
    without = "no hints" if key == "data.hint_key" else "the default columns"
    return f"the columns are {listing(row, wanted)}; set {key} to one of them, or to null for {without}"


def _is_verl_row(row: Row) -> bool:
    return row.get("prompt") is not None and row.get("reward_model") is not None


def has_binary(value: object) -> bool:
    """Return True if a value holds bytes that are not UTF-8."""
    if isinstance(value, str):  # almost all values
        return False
    if isinstance(value, dict):
        return any(map(has_binary, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_binary, value))
    return isinstance(value, bytes) and value.decode(errors="ignore").encode() != value


def messages_of_text(text: str, where: str) -> JsonValue:
    """Parse chat messages that are written as JSON text. Raises: DataError for invalid JSON."""
    try:
        return parse_json(text, where)
    except DataError as error:
        raise DataError(
            f"{error} (it looks like a list of chat messages; write them as JSON, or wrap the text in a chat message"
            " if it is not one)"
        ) from None


def _object(row: Row, column: str, where: str) -> dict[str, object]:
    """Return the object in a column, parsed if it is JSON text (CSV); {} if the row has none."""
    value = row.get(column)
    if value is None:
        return {}
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = parse_json(value, f"{where}: {column}")
    if not isinstance(value, dict):
        example = " with ground_truth" if column == "reward_model" else ""
        raise DataError(f"{where}: {column} is {type(value).__name__}, not an object{example}")
    return value


def _source_of(name: str, row: Row, extra_info: Row, where: str) -> Row:
    """Return the row or its extra_info, whichever has the option `name`.

    Raises: DataError if both have it.
    """
    if row.get(name) is not None and extra_info.get(name) is not None:
        raise DataError(f"{where} has {name} both as a column and in extra_info; remove one of them")
    return row if row.get(name) is not None else extra_info


def _data_source(row: Row, where: str) -> str:
    source = row.get("data_source")
    if source is not None and not isinstance(source, str):
        raise DataError(f"{where}: data_source is {type(source).__name__}, not a string")
    return source or "unknown"
