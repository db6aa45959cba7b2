"""TensorBoard event files with scalars, written without torch and without TensorFlow."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

_FORMAT = "brain.Event:2"
"""Version of the event file format; readers expect it in the first event."""


class TensorBoardLog:
    """Write scalars to a new event file in `directory`.

    Events are written by the calling thread to a file that stays open. TensorBoard's own `EventFileWriter` opens the
    file by name in a background thread, which prints a traceback if the run directory was deleted.

    `purge_step` (on resume): TensorBoard hides events of earlier files from this step on.
    """

    def __init__(self, directory: str | Path, *, purge_step: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_class = Event
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard finds files by "tfevents". Time, host and process make the name unique for each start.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("ab")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version=_FORMAT))
        if purge_step is not None:
            # Readers drop older events from this step on when they find a session that starts at it.
            start = SessionLog(status=SessionLog.START)
            self._write(Event(step=purge_step, wall_time=time.time(), session_log=start))
        self._file.flush()

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Write one event with every finite number of `values`, and flush the file."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        finite = {key: float(value) for key, value in values.items() if math.isfinite(value)}
        scalars = [Summary.Value(tag=key, simple_value=value) for key, value in finite.items()]
        if scalars:
            self._write(self._event_class(step=step, wall_time=time.time(), summary=Summary(value=scalars)))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
