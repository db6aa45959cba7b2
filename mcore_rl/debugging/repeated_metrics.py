"""Metrics of a repeated step beside the recorded ones: comparison, table and file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcore_rl.observe.metrics import FILE_NAME, read_metrics
from model_converters.durable_files import write_json


@dataclass(frozen=True)
class RepeatedMetric:
    """Value of the repeated update, and the recorded value; None if it was not recorded or not finite."""

    name: str
    recorded: float | None
    repeated: float

    @property
    def difference(self) -> float | None:
        return None if self.recorded is None else self.repeated - self.recorded


def recorded_metrics(run_dir: Path, step: int) -> dict[str, float] | None:
    """Return the metrics of a step from metrics.jsonl; None if the step is not there.

    Raises: DataError with the line of an invalid record.
    """
    records = [record for record in read_metrics(run_dir / FILE_NAME) if record["step"] == step]
    return records[-1] if records else None


def compare(recorded: Mapping[str, float] | None, repeated: Mapping[str, float]) -> list[RepeatedMetric]:
    """Return the metrics of the repeated update, in order of name."""
    recorded = recorded or {}
    return [RepeatedMetric(name, recorded.get(name), value) for name, value in sorted(repeated.items())]


def write_metrics(directory: Path, step: int, overrides: Sequence[str], metrics: Sequence[RepeatedMetric]) -> Path:
    """Write step_<n>.json with all digits; numbers that are not finite are null. Returns its path."""
    path = directory / f"step_{step}.json"
    values = {
        each.name: {
            "recorded": each.recorded,
            "repeated": each.repeated if math.isfinite(each.repeated) else None,
        }
        for each in metrics
    }
    write_json(path, {"step": step, "overrides": list(overrides), "metrics": values})
    return path


def show_metrics(step: int, metrics: Sequence[RepeatedMetric], console: Console) -> None:
    """Print the table, and the number of metrics that differ."""
    table = Table(title=f"Step {step}")
    table.add_column("metric")
    for column in ("recorded", "repeated", "difference"):
        table.add_column(column, justify="right")
    for each in metrics:
        cells = (each.name, _value(each.recorded), _value(each.repeated), _difference(each.difference))
        # Text, since rich would interpret brackets in a string as markup.
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    console.print(_summary(step, metrics), soft_wrap=True)


def _summary(step: int, metrics: Sequence[RepeatedMetric]) -> str:
    known = [each for each in metrics if each.recorded is not None]
    if not known:
        return f"{FILE_NAME} has no metrics of step {step} to compare with: the run did not finish it"
    different = sum(each.difference != 0 for each in known)
    if not different:
        return f"all {len(known)} metrics are equal to the recorded ones"
    return f"{different} of {len(known)} metrics differ from the recorded ones"


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"


def _difference(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:+.3g}" if value else "0"
