"""TensorBoard event files, written without torch and without TensorFlow."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.observe.metrics import TENSORBOARD
from mcore_rl.observe.report.series import CHARTS, Chart
from mcore_rl.observe.trackers.interface import RunFacts, SampledResponse, by_set

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

_FORMAT = "brain.Event:2"
"""Version of the event file format; readers expect it in the first event."""


class TensorBoardLog:
    """Writes scalars and texts to a new event file in run.dir/tensorboard.

    Events are written by the calling thread to a file that stays open. TensorBoard's own `EventFileWriter` opens the
    file by name in a background thread, which prints a traceback if the run directory was deleted.

    When a run is resumed, TensorBoard hides events of earlier files from its first step on.
    """

    def __init__(self, facts: RunFacts) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_class = Event
        directory = Path(facts.directory) / TENSORBOARD
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard finds files by "tfevents". Time, host and process make the name unique for each start.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("ab")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version=_FORMAT))
        # Readers drop older events from this step on when they find a session that starts at it.
        start = SessionLog(status=SessionLog.START)
        self._write(Event(step=facts.first_step, wall_time=time.time(), session_log=start))
        self._add(facts.first_step, [_panels(CHARTS), _text("run", _facts_table(facts.described()))])
        self._file.flush()

    def append(self, step: int, metrics: Mapping[str, float], responses: Sequence[SampledResponse]) -> None:
        """Write one event with all metrics and responses, and flush the file."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        values += [_text(name, "\n\n".join(map(_shown, chosen))) for name, chosen in by_set(responses)]
        if values:
            self._add(step, values)
        self._file.flush()

    def close(self, *, failed: bool) -> None:
        """Close the file; event files have no state for `failed`."""
        self._file.close()

    def _add(self, step: int, values: Sequence[Summary.Value]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(self._event_class(step=step, wall_time=time.time(), summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


def _text(tag: str, markdown: str) -> Summary.Value:
    """Return a text for the Text tab."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.metadata import create_summary_metadata

    metadata = create_summary_metadata(display_name=None, description=None)
    return Summary.Value(tag=tag, metadata=metadata, tensor=_string_tensor(markdown.encode("utf-8")))


def _panels(charts: Sequence[Chart]) -> Summary.Value:
    """Return the layout of the Custom Scalars tab: the charts of the report."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    layout = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title="mcore-rl",
                chart=[
                    layout_pb2.Chart(
                        title=f"{chart.title} ({chart.unit})" if chart.unit else chart.title,
                        multiline=layout_pb2.MultilineChartContent(tag=[_tags(name) for name in chart.patterns]),
                    )
                    for chart in charts
                ],
            )
        ]
    )
    tensor = _string_tensor(layout.SerializeToString())
    return Summary.Value(tag=metadata.CONFIG_SUMMARY_TAG, metadata=metadata.create_summary_metadata(), tensor=tensor)


def _tags(name: str) -> str:
    """Return a chart's pattern as a regular expression; TensorBoard matches it from the start of a tag."""
    return re.escape(name.removesuffix("*")) + (".*" if name.endswith("*") else "$")


def _string_tensor(content: bytes) -> object:
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    return TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto(), string_val=[content])


def _facts_table(facts: Mapping[str, object]) -> str:
    return "\n".join(f"    {name}: {' '.join(str(value).split())}" for name, value in facts.items())


def _shown(response: SampledResponse) -> str:
    """Format a response in Markdown. Its texts are indented by four spaces, so that they stay literal: no line of them
    can end the block."""
    return f"{response.caption()}\n\n{_literal(response.prompt)}\n\n**Response**\n\n{_literal(response.response)}"


def _literal(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
