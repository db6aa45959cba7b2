"""Weights & Biases."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence

from mcore_rl.observe.trackers.interface import COLUMNS, RunFacts, SampledResponse, by_set

SUMMARIES = {"val/accuracy": "max,last", "reward/mean": "max,last", "actor/grad_norm": "max,last"}
"""Values in the table of runs; other metrics show their last value."""
INIT_SECONDS = 15.0
"""Time of an attempt to reach the server. The next step tries again."""
FINISH_SECONDS = 20.0
"""Time to send the rest at the end. Unsent data stays on disk for `wandb sync`."""
OFFLINE_MODES = ("offline", "disabled", "dryrun")


class WandbRun:
    """One run of wandb. Files are in run.dir/trackers/wandb; `wandb sync` sends an offline run later.

    Metrics have `step` as their x axis and not wandb's own counter, which must increase: a resumed run can repeat
    steps.
    """

    def __init__(self, facts: RunFacts) -> None:
        # Its service process would otherwise report its own errors to wandb, also offline.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # Weave would record calls of openai and mcp in the driver; wandb prints advice about it even if it is silent.
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        import wandb

        facts.files.mkdir(exist_ok=True)
        # wandb must not touch the driver: no capture of its output, no calls of git, no copies of its code.
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            init_timeout=INIT_SECONDS,
            # Its metadata contains the command line, which may have secrets of slurm.environment.
            x_disable_meta=True,
            # Otherwise wandb waits for its server at the end, and again in an atexit hook, without a limit.
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        )
        self._wandb = wandb
        self._run = wandb.init(
            project=facts.project,
            name=facts.name,
            id=facts.ids.get_or_make("wandb", lambda: secrets.token_hex(8)),
            resume="allow",
            # null leaves the choice to WANDB_MODE.
            mode="offline" if facts.offline else None,
            dir=facts.files,
            config=facts.described(),
            settings=settings,
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        for name, summary in SUMMARIES.items():
            self._run.define_metric(name, step_metric="step", summary=summary)

    def append(self, step: int, metrics: Mapping[str, float], responses: Sequence[SampledResponse]) -> None:
        """Log one row of metrics, with a table of the responses."""
        row: dict[str, object] = {**metrics, "step": step}
        for name, chosen in by_set(responses):
            row[name] = self._wandb.Table(columns=list(COLUMNS), data=[each.row() for each in chosen])
        self._run.log(row)

    def close(self, *, failed: bool) -> None:
        """Send the rest, mark the run as failed or finished, and stop wandb's service process."""
        self._run.finish(exit_code=1 if failed else 0)
        self._wandb.teardown()


def login_problem() -> str | None:
    """Return what to set if wandb has no API key for its server."""
    if os.environ.get("WANDB_MODE") in OFFLINE_MODES:
        return None
    import wandb

    settings = wandb.setup().settings
    # It has started wandb's service process, which would otherwise stay until the end of the command.
    wandb.teardown()
    if settings.api_key or settings.identity_token_file:
        return None
    # wandb's own reader of the file in which `wandb login` stores keys: hosted servers have several names.
    from wandb.errors import AuthenticationError
    from wandb.sdk.lib.wbauth import read_netrc_auth

    remedy = f"set WANDB_API_KEY or run `wandb login` for {settings.base_url}"
    try:
        return None if read_netrc_auth(host=settings.base_url) else remedy
    except AuthenticationError as error:
        return f"its key for {settings.base_url} is invalid ({error}); {remedy}"
