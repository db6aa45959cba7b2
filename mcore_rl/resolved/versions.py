"""Version numbers for comparison and display."""

from __future__ import annotations

import re


def release(version: str | None) -> tuple[int, ...]:
    """Return the leading numbers of a version; () for None."""
    numbers = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


def dotted(version: tuple[int, ...]) -> str:
    """Format (12, 9) as 12.9."""
    return ".".join(map(str, version))
