"""Spans of the timeline, divided into steps."""

from __future__ import annotations

import heapq
import json
import re
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from mcore_rl.observe.metrics import TIMELINE
from mcore_rl.observe.report.pages import TIMELINE_BYTES, Blocks, evenly
from mcore_rl.observe.report.run_files import RunFiles
from mcore_rl.observe.timeline import STEP_SPAN, TraceEvent

BYTES_PER_SPAN = 8
"""Lower bound of a span's part of a block; spans that cannot fit are not kept in memory."""
_Row = tuple[int, int, str, int, int]
"""Process, lane, name, start and duration of a span. Units: us."""
MAX_PROCESSES = 32
"""Processes that are shown: the driver, and some of each kind."""
MAX_STEPS = 1000
"""Steps whose spans are shown, at equal distances."""
MAX_SPANS = 1000
"""Spans that are shown of a step, the longest ones."""
MAX_INTEGER = 2**53
"""Larger integers are not exact in a browser; times in us stay below for 285 years."""
_STEP = re.compile(rf"{STEP_SPAN}(\d{{1,15}})")
_NUMBER = re.compile(r"\d{1,9}")


def add_spans(blocks: Blocks, run: RunFiles, prefix: str, num_runs: int) -> list[int]:
    """Add a block with the spans of each step. Returns the steps that have one.

    Block: [[start, end] of the step, [process, ...], [[process, lane, name, start, duration], ...]], the longest span
    first; `process` is an index. Units: ms since the start of the step.
    """
    path = run.directory / TIMELINE
    names, steps = _processes_and_steps(path)
    if not steps or not names:
        return []
    chosen, shown = _chosen_processes(names), evenly(sorted(steps), MAX_STEPS)
    share = TIMELINE_BYTES // (len(shown) * num_runs)
    most = min(MAX_SPANS, share // BYTES_PER_SPAN)
    spans = _spans_by_step(path, {step: steps[step] for step in shown}, chosen, most)
    if len(chosen) < len(names):
        run.notes.append(f"{len(chosen)} of {len(names)} processes are in the report; {TIMELINE} has all")
    processes = [names[pid] for pid in chosen]
    place = {pid: number for number, pid in enumerate(chosen)}
    added = []
    for step in shown:
        start, end = steps[step]
        head: list[object] = [[0, _ms(end - start)], processes]
        rows = [[place[pid], lane, name, _ms(ts - start), _ms(dur)] for pid, lane, name, ts, dur in spans[step]]
        # The first two items describe the others.
        if blocks.add_fitting(f"{prefix}spans{step}", [*head, *rows], share) > len(head):
            added.append(step)
    return added


def _processes_and_steps(path: Path) -> tuple[dict[int, str], dict[int, tuple[int, int]]]:
    """Return the names of the processes by id, and start and end of each step in us."""
    names, steps = {}, {}
    for event in _events(path, (b'"process_name"', f'"{STEP_SPAN}'.encode())):
        if event.get("name") == "process_name":
            names[event["pid"]] = str(event["args"]["name"])
        elif event["ph"] == "X" and (match := _STEP.fullmatch(event["name"])):
            # A repeated step replaces the one before the resume.
            steps[int(match[1])] = event["ts"], event["ts"] + event["dur"]
    return names, steps


def _chosen_processes(names: dict[int, str]) -> list[int]:
    """Choose an equal number of processes of each kind (`trainer rank 3` without its number), in their order."""
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for pid, name in names.items():
        kinds[_NUMBER.sub("", name)].append(pid)
    each = max(1, MAX_PROCESSES // len(kinds))
    chosen = {pid for members in kinds.values() for pid in evenly(members, each)}
    # The driver comes first, then the kinds in the order of their first spans.
    order = {pid: place for place, members in enumerate(kinds.values()) for pid in members}
    return sorted(chosen, key=lambda pid: (names[pid] != "driver", order[pid], _numbers(names[pid])))


def _numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


def _spans_by_step(
    path: Path, steps: dict[int, tuple[int, int]], chosen: Sequence[int], most: int
) -> defaultdict[int, list[_Row]]:
    """Return the `most` longest spans of the chosen processes that overlap with each step, longest first."""
    order = sorted(steps, key=lambda step: steps[step])
    starts, ends = [steps[step][0] for step in order], [steps[step][1] for step in order]
    heaps: defaultdict[int, list[tuple[int, int, _Row]]] = defaultdict(list)
    for number, event in enumerate(_events(path, (b'"X"',))):
        if event["pid"] not in chosen or event["name"].startswith(STEP_SPAN):
            continue
        first, last = bisect_right(ends, event["ts"]), bisect_left(starts, event["ts"] + event["dur"])
        # Names repeat, so one copy of each is kept.
        row = (event["pid"], event.get("tid", 0), sys.intern(event["name"]), event["ts"], event["dur"])
        for step in order[first:last]:
            heap = heaps[step]
            # The number breaks ties between spans of equal length.
            heapq.heappush(heap, (event["dur"], number, row))
            if len(heap) > most:
                heapq.heappop(heap)
    return defaultdict(list, {step: [row for *_, row in sorted(h, reverse=True)] for step, h in heaps.items()})


def _events(path: Path, markers: Sequence[bytes]) -> Iterator[TraceEvent]:
    """Yield the valid events whose line contains one of `markers`. Reads line by line: the file of a large run does not
    fit in memory."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for line in file:
            if any(marker in line for marker in markers) and (event := _parsed(line)) is not None:
                yield event


def _parsed(line: bytes) -> TraceEvent | None:
    """Return the event of a line; None for events of another form than the project's Timeline writes."""
    try:
        event: TraceEvent = json.loads(line.rstrip(b",\r\n"))
        times = (event["ts"], event["dur"]) if event["ph"] == "X" else ()
        text = event["args"]["name"] if event["name"] == "process_name" else event["name"]
        numbers = (*times, event["pid"], event.get("tid", 0))
        integers = all(isinstance(each, int) and abs(each) <= MAX_INTEGER for each in numbers)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return event if integers and isinstance(text, str) else None


def _ms(microseconds: int) -> float:
    return round(microseconds / 1000, 2)
