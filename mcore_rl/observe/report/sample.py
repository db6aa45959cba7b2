"""Bounded sample of the responses of one step."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import zlib
from collections.abc import Iterator, Mapping

from mcore_rl.observe.report.pages import RESPONSE_BYTES, Blocks
from mcore_rl.observe.report.statistics import StepStatistics
from mcore_rl.observe.report.token_values import spans_of_zeros
from mcore_rl.types.json import JsonObject, JsonValue

MAX_RESPONSES = 60_000
"""Responses in a report, whose facts the page keeps in memory."""
LIMITS = (20_000, 4_000, 500)
"""Characters of a text; a smaller limit is used if not one response of a step fits with a larger one."""
MAX_ITEMS = 1000
"""Items of a list in a record, such as the messages of an episode."""
NUM_ERRORS = 4
"""Responses with an error that are shown of each step before others."""
RAW_FACTOR = 12
"""Characters of JSON per byte of a block that are compressed at most; texts rarely compress better."""


class ResponseSample:
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
        if has_digest(record, self._with_tokens):
            rank = 0
        elif record.get("error") is not None and self._errors < NUM_ERRORS:
            self._errors += 1
            rank = 1
        place = zlib.crc32(f"{self._step}.{record.get('group')}".encode("utf-8", "backslashreplace"))
        key, limit = (rank, place, line), RAW_FACTOR * self._num_bytes
        is_full = self._total > limit or len(self._kept) == self._most
        if is_full and key > self._kept[-1][0]:
            return
        shown = shortened(_compact(record), LIMITS[0])
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
            shown = records if limit == LIMITS[0] else [shortened(record, limit) for record in records[:1]]
            count = blocks.add_fitting(name, shown, self._num_bytes)
            if count or not records:
                return [record for record in shown[:count] if isinstance(record, dict)]
        return []


def has_digest(record: JsonObject, digests: set[int]) -> bool:
    """Return True if the tokens of the record have one of the digests."""
    digest = record.get("digest")
    return isinstance(digest, int) and digest in digests


def _compact(record: JsonObject) -> JsonObject:
    """Replace the mask by the spans of its zeros, [first, end] each."""
    mask = record.get("mask")
    if not isinstance(mask, list):
        return record
    kept: JsonObject = {name: value for name, value in record.items() if name != "mask"}
    return kept | {"masked": spans_of_zeros(mask)}


def shortened(value: JsonValue, limit: int, depth: int = 8) -> JsonValue:
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
        return [shortened(each, limit, depth - 1) for each in value[:MAX_ITEMS]]
    if isinstance(value, Mapping):
        items: Iterator[tuple[str, JsonValue]] = itertools.islice(value.items(), MAX_ITEMS)
        return {name[:limit]: shortened(each, limit, depth - 1) for name, each in items}
    return value
