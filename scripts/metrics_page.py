"""Generate docs/metrics.md from the guide to the metrics, which also has the warnings of the log and of the report.

python scripts/metrics_page.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from mcore_rl.observe.guide.entries import Counted, MetricEntry, Remedy, Warned
from mcore_rl.observe.guide.table import GUIDE

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
HEADER = """\
# Metrics

After reading this page you can judge a run by its main metrics: healthy ranges, signs of problems, and actions.

    mcore-rl report runs/demo     # curves of all metrics, and a table of the warnings

`metrics.jsonl` has one object per step with all metrics ([run directory](run-directory.md)). Fractions are between 0
and 1, log-probabilities and KL in nats, times in seconds. Healthy ranges and thresholds are experience, not limits:
they never stop a run.

A condition in bold is checked at every step. When it holds for the first time, the log has a warning with the actions
that apply to the run's configuration, and the report lists it. Counts marked "in the report" are listed only there.
The first value and the median are from the steps since the last start or resume.

This page is generated from `mcore_rl/observe/guide/` by `python scripts/metrics_page.py`.
"""
_NAME = re.compile(r"\b[a-z_]+[./][\w./<>=]*")
"""Metrics, keys and files, which are set as code."""
HEAD = ("metric", "healthy range", "warning signs", "action")


def page() -> str:
    """Render the page: one table per section."""
    lines = [HEADER]
    for section, entries in GUIDE.items():
        lines += [f"## {section}", "", _row(HEAD), f"|{'---|' * len(HEAD)}", *map(_entry, entries), ""]
    return "\n".join(lines).rstrip() + "\n"


def _entry(entry: MetricEntry) -> str:
    signs = [*_alert(entry), *([entry.signs] if entry.signs else [])]
    texts = entry.healthy, "; ".join(signs), "; ".join(map(_remedy, entry.remedies))
    return _row((f"`{entry.name}`", *(_NAME.sub(r"`\g<0>`", text) for text in texts)))


def _alert(entry: MetricEntry) -> Iterator[str]:
    match entry.alert:
        case Warned(condition, _, after_step):
            yield f"**{condition.describe()}**" + (f" after step {after_step}" if after_step else "")
        case Counted():
            yield "**above 0** (in the report)"


def _remedy(remedy: Remedy) -> str:
    return f"{remedy.text} ({remedy.when})" if remedy.when else remedy.text


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
