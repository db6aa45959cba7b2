"""Version numbers, to compare and to print."""

from __future__ import annotations

import re


def release(version: str | None) -> tuple[int, ...]:
    """The numbers that it begins with; none of nothing."""
    numbers = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


def dotted(version: tuple[int, ...]) -> str:
    """12.9 of (12, 9)."""
    return ".".join(map(str, version))
