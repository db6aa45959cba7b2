"""SwanLab."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from mcore_rl.observe.report.series import CHARTS
from mcore_rl.observe.trackers.interface import RunFacts, SampledResponse, by_set

OFFLINE_MODES = ("offline", "local", "disabled")


class SwanlabRun:
    """One run of SwanLab. Offline, it is in run.dir/trackers/swanlab; `swanlab sync` sends it later.

    SwanLab has no tables: each response is a text whose caption has the facts of its row. SwanLab itself counts no
    failures after the run has begun: it prints them.
    """

    def __init__(self, facts: RunFacts) -> None:
        import swanlab

        directory = facts.files / "swanlab"
        directory.mkdir(parents=True, exist_ok=True)
        settings = swanlab.Settings(
            interactive=False,
            terminal={"proxy_type": "none"},
            # The run's facts have the revision and the versions. Its own record of the process has the command line,
            # which may contain secrets of slurm.environment.
            probe={"git": False, "requirements": False, "runtime": False},
        )
        self._swanlab = swanlab
        self._run = swanlab.init(
            project=facts.project,
            name=facts.name,
            id=facts.ids.get_or_make("swanlab", lambda: secrets.token_hex(10)),
            resume="allow",
            # null leaves the choice to SWANLAB_MODE.
            mode="offline" if facts.offline else None,
            log_dir=str(directory),
            config=facts.described(),
            settings=settings,
        )
        # SwanLab draws one chart per metric; its sections are the charts of the report. Like there, a name goes before
        # a pattern with *. A project keeps the section of its first run that has the metric.
        for chart in CHARTS:
            for pattern in chart.patterns:
                self._run.define_metric(pattern, section_name=chart.title)

    def append(self, step: int, metrics: Mapping[str, float], responses: Sequence[SampledResponse]) -> None:
        """Log the metrics and the responses of a step."""
        row: dict[str, object] = dict(metrics)
        for name, chosen in by_set(responses):
            row[name] = [self._text(each) for each in chosen]
        self._run.log(row, step=step)

    def _text(self, response: SampledResponse) -> object:
        return self._swanlab.Text(f"{response.prompt}\n\n{response.response}", caption=response.caption())

    def close(self, *, failed: bool) -> None:
        """Send the rest and mark the run as crashed or finished."""
        if failed:
            self._run.finish(state="crashed", error="the training ended with an error or a signal")
        else:
            self._run.finish()


def login_problem() -> str | None:
    """Return what to set if SwanLab has no API key for its server."""
    import swanlab

    settings = swanlab.Settings()
    if settings.mode in OFFLINE_MODES or settings.api_key:
        return None
    return f"set SWANLAB_API_KEY or run `swanlab login` for {settings.api_host}"
