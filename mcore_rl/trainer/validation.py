"""Validation metrics: overall, per entry of data.val, and per data_source."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.trainer.diagnostics import describe_columns
from mcore_rl.types import Mean, Metric, RolloutScalars, Total

UNKNOWN = "unknown"
"""data_source of rows without one."""
_NOT_IN_A_NAME = re.compile(r"[\x00-\x20\x7f-\xa0\u2028\u2029]+")
_MAX_NAME_CHARACTERS = 100


@dataclass(frozen=True)
class ValidationParts:
    """Subsets of the validation prompts that have separate metrics.

    rows: name of the subset, which ends the metric name -> positions among all validation prompts, int64 [n].
    notes: printed at the start of a run.
    """

    rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def validation_parts(sets: Mapping[str, Sequence[str]]) -> ValidationParts:
    """Divide validation sets into parts. `sets` holds the data_source of each prompt by the name of the set ("":
    unnamed).

    Names are assigned in this order: sets; sources, across all sets; `<set>/<source>` for sets with several sources. A
    name that is already taken is skipped, with a note if its rows differ. Sources are omitted if no row names one.
    """
    rows: dict[str, np.ndarray] = {}
    notes: list[str] = []
    sources = [source for of_set in sets.values() for source in of_set]
    names = _source_names(sources, notes)
    edges = np.cumsum([0, *map(len, sets.values())])
    # Rows of each set among all validation prompts.
    places = {name: np.arange(*edge) for name, *edge in zip(sets, edges[:-1], edges[1:], strict=True)}
    rows.update({name: of_set for name, of_set in places.items() if name})
    labels = np.array([names.get(source, "") for source in sources], object)
    candidates = [(label, np.flatnonzero(labels == label)) for label in dict.fromkeys(names.values())]
    for name, of_set in places.items():
        # Unlike a set, a dict keeps the order of the first appearance.
        inside = dict.fromkeys(labels[of_set]) if name else {}
        if len(inside) > 1:
            candidates += [(f"{name}/{label}", of_set[labels[of_set] == label]) for label in inside]
    # setdefault keeps the first subset with a name. A second subset with the same rows needs no separate metric.
    for name, found in candidates:
        if not np.array_equal(rows.setdefault(name, found), found):
            notes.append(
                f"data.val: val/accuracy/{name} is the metric of a set or of another data_source; the data_source with "
                "the same name has different rows and gets no metric over all sets: rename the set"
            )
    return ValidationParts(rows, tuple(notes))


def describe_validation(result: RolloutScalars, parts: ValidationParts) -> dict[str, Metric]:
    """Compute the metrics of a validation; `val/<metric>/<part>` for each part."""
    metrics = _means(result, np.ones(len(result.accuracies), bool), "")
    for name, rows in parts.rows.items():
        metrics |= _means(result, np.isin(result.group_ids, rows), f"/{name}")
    return {**metrics, **describe_columns([result.parts], "val/"), "val/errors": Total(len(result.errors))}


def part_accuracies(result: RolloutScalars, parts: ValidationParts) -> dict[str, float]:
    """Compute the mean accuracy of each part."""
    return {name: float(result.accuracies[np.isin(result.group_ids, rows)].mean()) for name, rows in parts.rows.items()}


def _means(result: RolloutScalars, chosen: np.ndarray, suffix: str) -> dict[str, Metric]:
    columns = {
        "accuracy": result.accuracies,
        "reward": result.rewards,
        "response_tokens": result.response_tokens,
        **result.scores,
        **(result.parts if suffix else {}),
    }
    metrics: dict[str, Metric] = {}
    for name, values in columns.items():
        # NaN marks responses without this value.
        there = values[chosen & ~np.isnan(values)]
        if len(there):
            metrics[f"val/{name}{suffix}"] = Mean(float(there.sum()), len(there))
    return metrics


def _source_names(sources: Sequence[str], notes: list[str]) -> dict[str, str]:
    """Return the metric name component of each data_source: blanks and control characters become `_`; a second source
    with the same name gets a number."""
    names: dict[str, str] = {}
    distinct = list(dict.fromkeys(sources))
    if distinct == [UNKNOWN]:
        return {}
    for source in distinct:
        cleaned = _NOT_IN_A_NAME.sub("_", source).strip("/")[:_MAX_NAME_CHARACTERS] or "_"
        name, number = cleaned, 1
        while name in names.values():
            number += 1
            name = f"{cleaned}~{number}"
        if name != source:
            notes.append(f"data.val: data_source {source!r} has the metric val/accuracy/{name}")
        names[source] = name
    return names
