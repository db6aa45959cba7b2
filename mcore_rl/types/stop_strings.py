"""Search for the stop string that ends a response."""

from __future__ import annotations

from collections.abc import Sequence


def first_stop(text: str, stops: Sequence[str], searched: int = 0) -> tuple[int, int] | None:
    """Return start and end of the stop string that ends first in `text`, the longest of several with the same end, or
    None. Matches that end within the first `searched` characters are ignored."""
    best: tuple[int, int] | None = None
    for stop in stops:
        # A match that ends after `searched` characters cannot start earlier than this.
        start = text.find(stop, max(0, searched - len(stop) + 1))
        if start >= 0 and (best is None or (start + len(stop), start) < (best[1], best[0])):
            best = start, start + len(stop)
    return best
