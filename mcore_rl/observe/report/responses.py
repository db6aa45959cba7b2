"""Statistics of all responses, and a bounded sample of them for the report's browser."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mcore_rl.observe.report.pages import GROUP_BYTES, RESPONSE_BYTES, TOKEN_BYTES, Blocks, evenly
from mcore_rl.observe.report.run_files import RolloutFile, RunFiles, json_lines
from mcore_rl.observe.report.statistics import EDGES, StepStatistics, is_right
from mcore_rl.observe.report.token_pieces import Pieces
from mcore_rl.observe.report.token_values import read_token_values, shown_values, spans_of_zeros
from mcore_rl.types.json import JsonObject, JsonValue

MAX_FILES = 2000
"""Number of rollout files that are read; runs with more are sampled at equal distances."""
MAX_RESPONSES = 100_000
"""Responses in a report, whose facts the page keeps in memory."""
LIMITS = (20_000, 4_000, 500)
"""Characters of a text; a smaller limit is used if not one response of a step fits with a larger one."""
MAX_ITEMS = 1000
"""Items of a list in a record, such as the messages of an episode."""
NUM_ERRORS = 4
"""Responses with an error that are shown of each step before others."""
TOKEN_PAGE_BYTES = 60_000
"""Size of the per-token values of a step; with many steps, some have none."""
RAW_FACTOR = 12
"""Characters of JSON per byte of a block that are compressed at most; texts rarely compress better."""
TRUNCATED = ("length", "turns", "tool_calls", "seconds")
"""Finish reasons of responses that a limit ended."""


@dataclass
class ResponseSummary:
    """Small facts about the responses of a run, which the page needs at once; parallel lists have one entry per step.

    steps, rates, lengths: training steps, StepStatistics.solve_rates and .lengths of each.
    pages: [name of the block, step, is_validation, responses in the block, responses of the step].
    index: columns with one entry per response in the blocks, in their order, for the filters.
    """

    steps: list[int] = field(default_factory=list)
    rates: list[list[int]] = field(default_factory=list)
    lengths: list[tuple[list[int], list[int]]] = field(default_factory=list)
    pages: list[list[object]] = field(default_factory=list)
    index: dict[str, list[object]] = field(default_factory=dict)
    edges: tuple[int, ...] = EDGES


def add_responses(blocks: Blocks, run: RunFiles, prefix: str, num_runs: int, pieces: Pieces) -> ResponseSummary:
    """Read the responses of a run, and add blocks with a sample of each step.

    `prefix` starts the names of the run's blocks; each of `num_runs` runs has an equal share of the page.
    """
    summary = ResponseSummary()
    files = [run.rollouts[place] for place in evenly(range(len(run.rollouts)), MAX_FILES)]
    if len(files) < len(run.rollouts):
        run.notes.append(f"{len(files)} of {len(run.rollouts)} files with responses are read, at equal distances")
    training = [file.step for file in files if not file.is_validation]
    with_tokens = set(evenly(training, max(1, TOKEN_BYTES // (TOKEN_PAGE_BYTES * num_runs))))
    # Shares of one file and one step.
    parts, token_parts = max(len(files), 1) * num_runs, max(len(with_tokens), 1) * num_runs
    token_bytes = min(TOKEN_PAGE_BYTES, TOKEN_BYTES // token_parts)
    for file in files:
        tokens = _add_tokens(blocks, run, file, prefix, pieces, token_bytes) if file.step in with_tokens else set()
        name, sample = f"{prefix}responses{len(summary.pages)}", _Sample(file.step, tokens, parts)
        for line, record in enumerate(json_lines(file.path, run.notes)):
            sample.add(line, record)
        shown = sample.add_fitting(blocks, name)
        if not file.is_validation:
            summary.steps.append(file.step)
            summary.rates.append(sample.statistics.solve_rates())
            summary.lengths.append(sample.statistics.lengths)
            rates = [[group, *counts] for group, counts in sorted(sample.statistics.groups.items())]
            blocks.add_fitting(f"{prefix}groups{file.step}", rates, GROUP_BYTES // parts)
        summary.pages.append([name, file.step, file.is_validation, len(shown), sample.statistics.num_responses])
        for fact, value in itertools.chain.from_iterable(_facts(record, tokens).items() for record in shown):
            summary.index.setdefault(fact, []).append(value)
    return summary


def _add_tokens(
    blocks: Blocks, run: RunFiles, file: RolloutFile, prefix: str, pieces: Pieces, num_bytes: int
) -> set[int]:
    """Add the per-token values of a step; returns the digests of the responses that have some."""
    if file.is_validation:
        return set()
    values = read_token_values(run.directory, file.step, run.notes)
    shown = [shown_values(each, pieces) for each in values]
    count = blocks.add_fitting(f"{prefix}tokens{file.step}", shown, num_bytes)
    return {each.digest for each in values[:count]}


class _Sample:
    """Statistics of one step, and the records that the report prefers: responses with per-token values, a few with an
    error, then whole groups in a random, repeatable order.

    Only the first records in this order are kept, up to RAW_FACTOR times the bytes of the step's block, which is one of
    `parts` of the report's responses.
    """

    def __init__(self, step: int, with_tokens: set[int], parts: int) -> None:
        self.statistics = StepStatistics()
        self._step, self._with_tokens = step, with_tokens
        self._num_bytes, self._most = RESPONSE_BYTES // parts, max(1, MAX_RESPONSES // parts)
        self._errors, self._total = 0, 0
        self._kept: list[tuple[tuple[int, int, int], int, JsonObject]] = []

    def add(self, line: int, record: JsonObject) -> None:
        """Count a record, and keep it if it may be shown. `line`: its line in the file, from 0."""
        self.statistics.count(record)
        rank = 2
        if _is_in(record, self._with_tokens):
            rank = 0
        elif record.get("error") is not None and self._errors < NUM_ERRORS:
            self._errors += 1
            rank = 1
        place = zlib.crc32(f"{self._step}.{record.get('group')}".encode("utf-8", "backslashreplace"))
        key, limit = (rank, place, line), RAW_FACTOR * self._num_bytes
        is_full = self._total > limit or len(self._kept) == self._most
        if is_full and key > self._kept[-1][0]:
            return
        shown = _shortened(_compact(record), LIMITS[0])
        assert isinstance(shown, dict)
        size = len(json.dumps(shown))
        bisect.insort(self._kept, (key, size, shown | {"line": line}), key=lambda kept: kept[0])
        self._total += size
        while self._total - self._kept[-1][1] > limit or len(self._kept) > self._most:
            self._total -= self._kept.pop()[1]

    def add_fitting(self, blocks: Blocks, name: str) -> list[JsonObject]:
        """Add the block of the step. Returns its records."""
        records = [record for _, _, record in self._kept]
        for limit in LIMITS:
            shown = records if limit == LIMITS[0] else [_shortened(record, limit) for record in records[:1]]
            count = blocks.add_fitting(name, shown, self._num_bytes)
            if count or not records:
                return [record for record in shown[:count] if isinstance(record, dict)]
        return []


def _facts(record: JsonObject, with_tokens: set[int]) -> dict[str, object]:
    """Return the numbers by which the page filters and sorts a response."""
    return {
        "group": record.get("group"),
        "reward": record.get("reward"),
        "tokens": record.get("tokens"),
        "right": int(is_right(record)),
        "truncated": int(record.get("finish_reason") in TRUNCATED),
        "error": int(record.get("error") is not None),
        "tools": int(bool(record.get("tool_calls"))),
        "tokens_recorded": int(_is_in(record, with_tokens)),
    }


def _is_in(record: JsonObject, digests: set[int]) -> bool:
    digest = record.get("digest")
    return isinstance(digest, int) and digest in digests


def _compact(record: JsonObject) -> JsonObject:
    """Replace the mask by the spans of its zeros, [first, end] each."""
    mask = record.get("mask")
    if not isinstance(mask, list):
        return record
    kept: JsonObject = {name: value for name, value in record.items() if name != "mask"}
    return kept | {"masked": spans_of_zeros(mask)}


def _shortened(value: JsonValue, limit: int, depth: int = 8) -> JsonValue:
    """Cut long texts in the middle, long lists at the end, and deep nesting."""
    if isinstance(value, str):
        if len(value) <= limit:
            return value
        cut = len(value) - limit
        return f"{value[: limit * 2 // 3]}\n[... {cut} characters are left out ...]\n{value[-limit // 3 :]}"
    # JSON has no NaN, but Python's writers of it do.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping | list) and not depth:
        return "..."
    if isinstance(value, list):
        return [_shortened(each, limit, depth - 1) for each in value[:MAX_ITEMS]]
    if isinstance(value, Mapping):
        items: Iterator[tuple[str, JsonValue]] = itertools.islice(value.items(), MAX_ITEMS)
        return {name[:limit]: _shortened(each, limit, depth - 1) for name, each in items}
    return value
