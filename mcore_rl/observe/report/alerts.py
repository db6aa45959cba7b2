"""Table of warnings: signs of collapse in the metrics, failures that the metrics count, and unreadable files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.config import load_config
from mcore_rl.errors import ConfigError
from mcore_rl.observe.guide.table import COUNTED
from mcore_rl.observe.report.run_files import CONFIG, RunFiles
from mcore_rl.observe.signs import CollapseSigns, Sign, signs_for


@dataclass(frozen=True)
class Alert:
    """One warning; `step` None: it concerns the whole run."""

    step: int | None
    text: str


def alerts_of(run: RunFiles, signs: Sequence[Sign] | None = None) -> list[Alert]:
    """Return all warnings of a run in the order of their steps. `signs`: signs of collapse to look for; None: read the
    run's configuration for them.

    Signs of collapse are evaluated again: the log of a run may be lost, and a resumed run starts a new comparison.
    """
    found = [*_signs(run, signs), *_counted(run), *_not_finite(run)]
    if run.failure is not None:
        found.append(Alert(None, f"the run failed: {run.failure}"))
    if run.num_earlier:
        found.append(Alert(None, f"the run was resumed: repeated steps are in earlier/ ({run.num_earlier} folders)"))
    # dict.fromkeys removes equal notes of several files.
    notes = [Alert(None, note) for note in dict.fromkeys(run.notes)]
    return sorted(found, key=lambda alert: -1 if alert.step is None else alert.step) + notes


def _signs(run: RunFiles, signs: Sequence[Sign] | None) -> Iterator[Alert]:
    check = CollapseSigns(_signs_of_run(run) if signs is None else signs)
    for step, values in run.records.items():
        for text in check.check(step, values):
            yield Alert(step, text.removeprefix(f"step {step}: "))


def _signs_of_run(run: RunFiles) -> list[Sign]:
    """Return the signs with remedies for the run's configuration; only the gradient is checked if this version cannot
    read the configuration."""
    path = run.directory / CONFIG
    if not path.exists():
        return []
    try:
        return signs_for(load_config(path, needs_data=False))
    except ConfigError as error:
        run.notes.append(f"this version cannot read {CONFIG}, so only the gradient norm is checked: {error}")
        return []


def _counted(run: RunFiles) -> Iterator[Alert]:
    """Count each kind of failure once, at its first step."""
    for name, counted in COUNTED.items():
        counts = {step: value for step, values in run.records.items() if (value := values.get(name))}
        if counts:
            steps = f" (in {len(counts)} steps)" if len(counts) > 1 else ""
            yield Alert(next(iter(counts)), f"{name}: {sum(counts.values()):.6g} {counted.text}{steps}")


def _not_finite(run: RunFiles) -> Iterator[Alert]:
    """Name the metrics whose first value that is not finite is in a step."""
    seen: set[str] = set()
    for step, values in run.records.items():
        names = [name for name, value in values.items() if value is None and name not in seen]
        seen.update(names)
        if names:
            yield Alert(step, f"not finite: {', '.join(names)}")


def differences(configs: list[Mapping[str, object]]) -> list[tuple[str, list[object]]]:
    """Return (key, value in each configuration) of the keys that differ; None for a key that is missing."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, [config.get(key) for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]
