"""Writing of report.html."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mcore_rl.errors import ConfigError
from mcore_rl.observe.report.alerts import alerts_of, differences
from mcore_rl.observe.report.page import render
from mcore_rl.observe.report.pages import Blocks
from mcore_rl.observe.report.responses import add_responses
from mcore_rl.observe.report.run_files import RunFiles, read_run
from mcore_rl.observe.report.series import series_of
from mcore_rl.observe.report.step_spans import add_spans
from mcore_rl.observe.report.token_pieces import Pieces
from mcore_rl.observe.summary import summary_table
from model_converters.durable_files import durable_write

REPORT = "report.html"


def write_report(run_dirs: Sequence[Path], path: Path | None = None) -> Path:
    """Write a report about all runs to `path`, by default report.html in the first run directory. Returns the path.

    The runs may be in progress: the file is replaced atomically.

    Raises: ConfigError if one of them is not a run directory, or if the file cannot be written there.
    """
    runs = [read_run(directory) for directory in run_dirs]
    blocks = Blocks()
    described = [
        _describe(blocks, run, f"run{number}.", len(runs), name)
        for number, (run, name) in enumerate(zip(runs, _names(run_dirs), strict=True))
    ]
    summary: dict[str, object] = {
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "runs": described,
        "differences": differences([run.config for run in runs]) if len(runs) > 1 else [],
    }
    # Not for report.html: a link in a shared run directory must not choose another file.
    target = run_dirs[0] / REPORT if path is None else path.resolve()
    path = target if path is None else path
    page = render(blocks, summary).encode()
    try:
        with durable_write(target) as file:
            file.write(page)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file with --out FILE") from None
    return path


def _describe(blocks: Blocks, run: RunFiles, prefix: str, num_runs: int, name: str) -> dict[str, object]:
    """Add the blocks of a run. Returns its entry in the summary."""
    pieces = Pieces.of_run(run.config, run.notes)
    responses = add_responses(blocks, run, prefix, num_runs, pieces)
    timeline = add_spans(blocks, run, prefix, num_runs)
    steps = list(run.records)
    return {
        "name": name,
        "prefix": prefix,
        "directory": str(run.directory.absolute()),
        "last_step": steps[-1] if steps else None,
        "total_steps": run.total_steps,
        "table": summary_table(run.known_records()),
        "series": asdict(series_of(run.records, num_runs)),
        "responses": asdict(responses),
        "timeline": timeline,
        "config": {key: str(value) for key, value in run.config.items()},
        # After the other parts, which add notes.
        "alerts": [asdict(alert) for alert in alerts_of(run)],
    }


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, as many as make them unique."""
    paths = [path.absolute().parts for path in run_dirs]
    for count in range(1, max(map(len, paths))):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(parts[-2:])} ({number})" for number, parts in enumerate(paths, start=1)]
