"""Wraps an object so that chosen methods are spans; the loops stay free of timers."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Recorder(Protocol):
    def span(self, name: str) -> AbstractContextManager[None]: ...


class Timed:
    """Passes everything through to `target`; methods named in `phases` run inside a span of that name."""

    def __init__(self, target: Any, recorder: Recorder, **phases: str) -> None:
        self._target, self._recorder, self._phases = target, recorder, phases

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        phase = self._phases.get(name)
        if phase is None:
            return value

        @functools.wraps(value)
        def within_span(*args: Any, **kwargs: Any) -> Any:
            with self._recorder.span(phase):
                return value(*args, **kwargs)

        return within_span
