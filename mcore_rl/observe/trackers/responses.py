"""A few responses of a step for the tables of trackers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.observe.metrics import ROLLOUTS
from mcore_rl.observe.report.run_files import finite
from mcore_rl.observe.report.sample import shortened
from mcore_rl.observe.trackers.interface import SampledResponse
from mcore_rl.types.json import JsonObject

MAX_CHARACTERS = 4000
"""Characters of a prompt or response; longer texts are cut in the middle."""


def sample_responses(run_dir: Path, step: int, count: int) -> list[SampledResponse]:
    """Read up to `count` responses of the step and as many of its validation, at equal distances in the files.

    A file that does not exist, or was deleted, has no responses.

    Raises: OSError, ValueError for a file that cannot be read.
    """
    return [
        _sampled(record, step, is_validation)
        for name, is_validation in ((f"step_{step}.jsonl", False), (f"val_step_{step}.jsonl", True))
        for record in _records(run_dir / ROLLOUTS / name, count)
    ]


def _records(path: Path, count: int) -> Iterator[JsonObject]:
    """Yield the records of `count` lines. Files have up to gigabytes, so only these lines are read."""
    if count == 0 or not path.is_file():
        return
    with path.open("rb") as file:
        size, last = path.stat().st_size, -1
        for part in range(count):
            place = part * size // count
            file.seek(max(place - 1, 0))
            if place:
                # The rest of the line before. It is only a newline if a line begins at `place`.
                file.readline()
            start, line = file.tell(), file.readline()
            # In a file with fewer or unequal lines, two places can lead to one line.
            if line.strip() and start > last:
                last = start
                yield json.loads(line)


def _sampled(record: JsonObject, step: int, is_validation: bool) -> SampledResponse:
    return SampledResponse(
        step,
        is_validation,
        int(_number(record.get("group"))),
        _number(record.get("reward")),
        _number(record.get("accuracy")),
        int(_number(record.get("tokens"))),
        _text(record.get("finish_reason")),
        _text(record.get("prompt")),
        _text(record.get("response")),
    )


def _number(value: object) -> float:
    return finite(value) or 0.0


def _text(value: object) -> str:
    """Cut a text. Half of a surrogate pair, which UTF-8 cannot encode, becomes an escape."""
    text = shortened(value, MAX_CHARACTERS) if isinstance(value, str) else ""
    return str(text).encode("utf-8", "backslashreplace").decode("utf-8")
