"""Typed errors of the converters. Both are ValueErrors: the caller's input is what must change."""

from __future__ import annotations

from collections.abc import Sequence

_LISTED = 12


class ConversionError(ValueError):
    """A checkpoint, configuration or tensor that cannot be converted; the message says which and why."""


class LayoutError(ConversionError):
    """Parallel sizes that do not divide each other or the model; the message names both numbers."""


def listing(items: Sequence[str]) -> str:
    """The items joined for a message; a long list is cut and says how many more there are."""
    shown = ", ".join(items[:_LISTED])
    return f"{shown} and {len(items) - _LISTED} more" if len(items) > _LISTED else shown
