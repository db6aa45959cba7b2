"""The last responses of a run, read from the end of its newest rollout file."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mcore_rl.observe.report.run_files import RolloutFile, RunFiles, json_lines
from mcore_rl.types.json import JsonObject

NUM_RESPONSES = 3
TAIL_BYTES = 4_000_000
"""Bytes that are read at the end of a rollout file: files of large steps have gigabytes."""
NUM_FILES = 3
"""Newest files in which responses are searched: the last one may be empty while its step is in progress."""


@dataclass(frozen=True)
class LastResponses:
    """Records of the newest rollout file that has some, in the order of the file; `file` None: there is none."""

    file: RolloutFile | None = None
    records: list[JsonObject] = field(default_factory=list)


def last_responses(run: RunFiles) -> LastResponses:
    """Read the last responses. A note is added to `run` if the newest response is larger than TAIL_BYTES."""
    for file in reversed(run.rollouts[-NUM_FILES:]):
        records = deque(json_lines(file.path, run.notes, last_bytes=TAIL_BYTES), maxlen=NUM_RESPONSES)
        if records:
            return LastResponses(file, list(records))
        if _size(file) > TAIL_BYTES:
            run.notes.append(f"rollouts/{file.path.name}: the last response is larger than {TAIL_BYTES:,} bytes")
    return LastResponses()


def _size(file: RolloutFile) -> int:
    try:
        return file.path.stat().st_size
    # Moved to earlier/ by a resumed run.
    except OSError:
        return 0
