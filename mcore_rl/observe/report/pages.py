"""Compressed blocks of the page, and the division of its size."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_BYTES = 20_000_000
"""Size limit of a report. A browser opens a page of this size within 2 s."""
RESPONSE_BYTES, TOKEN_BYTES, TIMELINE_BYTES, GROUP_BYTES = 9_000_000, 3_000_000, 3_000_000, 1_000_000
"""Shares of responses, of their per-token values, of the timeline and of the groups, in bytes of base64. The rest is
for metrics, which have a limit of their own (series.py), and for the page itself."""


def encode(value: object) -> str:
    """Encode as base64 of zlib of JSON. No character of it has a meaning in HTML.

    ensure_ascii: JSON escapes half surrogate pairs, which UTF-8 cannot represent.
    """
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode("ascii"))).decode("ascii")


def decode(block: str) -> object:
    """Invert `encode`."""
    return json.loads(zlib.decompress(base64.b64decode(block)))


def fit(items: Sequence[object], num_bytes: int) -> tuple[str, int]:
    """Encode a list of as many of the first `items` as fit in `num_bytes`. Returns the block and their number."""
    count = len(items)
    while True:
        block = encode(items[:count])
        if len(block) <= num_bytes or not count:
            return block, count
        # Compression makes the size uneven: aim below the limit, and drop at least one item per attempt.
        count = min(count - 1, int(0.95 * count * num_bytes / len(block)))


@dataclass
class Blocks:
    """Named blocks of one page."""

    encoded: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: object) -> None:
        self.encoded[name] = encode(value)

    def add_fitting(self, name: str, items: Sequence[object], num_bytes: int) -> int:
        """Add a list of as many of the first `items` as fit; nothing if none fits. Returns their number."""
        block, count = fit(items, num_bytes)
        if count:
            self.encoded[name] = block
        return count

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.encoded.values()))


def evenly(numbers: Sequence[int], most: int) -> list[int]:
    """Choose at most `most` numbers at equal distances, including the first and the last."""
    if len(numbers) <= most:
        return list(numbers)
    if most < 2:
        return list(numbers[-most:]) if most else []
    return [numbers[round(place * (len(numbers) - 1) / (most - 1))] for place in range(most)]
