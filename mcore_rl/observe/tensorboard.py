"""Scalars for TensorBoard, through its own writer: no torch and no TensorFlow needed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class TensorBoardLog:
    """Writes scalars to `directory`. On resume, `purge_step` hides what an earlier process wrote from that step on."""

    def __init__(self, directory: str | Path, *, purge_step: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event_class = Event
        self._writer = EventFileWriter(str(directory))
        if purge_step is not None:
            # Readers drop older events from this step on when they meet a session that starts at it.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=purge_step, wall_time=time.time(), session_log=start))
        self._writer.flush()

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """One event with every finite number among `values`, flushed."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [
            Summary.Value(tag=key, simple_value=float(value)) for key, value in values.items() if _is_finite(value)
        ]
        if scalars:
            event = self._event_class(step=step, wall_time=time.time(), summary=Summary(value=scalars))
            self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_finite(value: Any) -> bool:
    value = value.item() if hasattr(value, "item") else value
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
