"""timeline.json: spans of all processes in Chrome's trace format, for ui.perfetto.dev or chrome://tracing.

The file is a JSON array with one event per line, valid after every append. Every process has its own track. Spans of a
process that overlap without nesting go to additional lanes of its track.

Source: "Trace Event Format", complete ("X") and metadata ("M") events; times in microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from mcore_rl.types import Span
from model_converters.durable_files import durable_write

STEP_SPAN = "step "
"""Name of the span that encloses a step of the driver, before its number. Readers divide the timeline by it."""
_HEAD = b"[\n"
_TAIL = b"\n]\n"


class TraceEvent(TypedDict, total=False):
    """One event. `ts` and `dur` belong to complete events, `args` to metadata events."""

    name: str
    ph: str
    ts: int
    dur: int
    pid: int
    tid: int
    args: dict[str, str | int]


class Timeline:
    """Appends spans to a trace file; continues the file of an earlier start."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        events = read_timeline(self.path)
        self._pids = {
            str(event["args"]["name"]): event["pid"] for event in events if event.get("name") == "process_name"
        }
        self._lanes: dict[int, list[_Lane]] = {}
        self._empty = not events
        # Also repairs a file whose last write was interrupted: `append` expects _TAIL at the end.
        with durable_write(self.path) as file:
            file.write(_HEAD + _lines(events) + _TAIL)

    def append(self, spans: Iterable[Span]) -> None:
        """Append spans, and metadata of new processes."""
        events: list[TraceEvent] = []
        # An enclosing span comes before the spans that it encloses.
        for span in sorted(spans, key=lambda span: (span.start, -span.end)):
            if span.process not in self._pids:
                events += self._process_events(span.process)
            events.append(self._complete_event(span))
        if not events:
            return
        body = _lines(events) if self._empty else b",\n" + _lines(events)
        self._empty = False
        with self.path.open("r+b") as file:
            # Overwrite the closing bracket, so that the file is valid JSON after every append.
            file.seek(-len(_TAIL), os.SEEK_END)
            file.write(body + _TAIL)

    def _process_events(self, process: str) -> list[TraceEvent]:
        pid = self._pids[process] = max(self._pids.values(), default=0) + 1
        return [
            {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": process}},
            {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
        ]

    def _complete_event(self, span: Span) -> TraceEvent:
        pid = self._pids[span.process]
        start, end = round(span.start * 1e6), round(span.end * 1e6)
        lane = _lane_of(self._lanes.setdefault(pid, []), start, end)
        return {"name": span.name, "ph": "X", "ts": start, "dur": end - start, "pid": pid, "tid": lane}


def read_timeline(path: str | Path) -> list[TraceEvent]:
    """Read the events of a timeline. Skips a partly written line; returns [] if the file does not exist."""
    path = Path(path)
    if not path.is_file():
        return []
    events = []
    for line in path.read_bytes().splitlines():
        try:
            event: TraceEvent = json.loads(line.rstrip(b","))
        except ValueError:  # a bracket, or an incomplete line
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def _lines(events: list[TraceEvent]) -> bytes:
    return b",\n".join(json.dumps(event).encode() for event in events)


@dataclass
class _Lane:
    """One row of a process's track. `open_ends`: ends of the spans that may enclose the next one, outermost first.
    Units: microseconds."""

    last_start: int
    open_ends: list[int]

    def takes(self, start: int, end: int) -> bool:
        """Add [start, end] if it follows or nests in the spans of this lane; viewers misplace spans that cross.

        A span that starts before the lane's last one is not added, because the lane does not keep closed spans.
        """
        if start < self.last_start:
            return False
        # Close the spans that ended before this one starts.
        while self.open_ends and self.open_ends[-1] <= start:
            self.open_ends.pop()
        if self.open_ends and end > self.open_ends[-1]:
            return False
        self.last_start = start
        self.open_ends.append(end)
        return True


def _lane_of(lanes: list[_Lane], start: int, end: int) -> int:
    """Return the first lane that takes the span, or a new one."""
    for number, lane in enumerate(lanes):
        if lane.takes(start, end):
            return number
    lanes.append(_Lane(start, [end]))
    return len(lanes) - 1
