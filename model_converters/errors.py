"""Errors of the converters. Both are ValueErrors: the remedy is a change of the caller's input."""

from __future__ import annotations

from collections.abc import Sequence

_LISTED = 12


class ConversionError(ValueError):
    """A checkpoint, configuration or tensor cannot be converted; the message names it and the reason."""


class LayoutError(ConversionError):
    """Parallel sizes do not divide each other or the model; the message names both numbers."""


def listing(items: Sequence[str]) -> str:
    """Join the first 12 items for a message and append the number of the others."""
    shown = ", ".join(items[:_LISTED])
    return f"{shown} and {len(items) - _LISTED} more" if len(items) > _LISTED else shown
