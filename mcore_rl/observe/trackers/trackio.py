"""Trackio: files on this machine, a Hugging Face Space or a self-hosted server."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence

from mcore_rl.observe.trackers.interface import COLUMNS, RunFacts, SampledResponse, by_set

SERVERS = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
DIRECTORY = "TRACKIO_DIR"


class TrackioRun:
    """One run of Trackio. Offline, it is in run.dir/trackers/trackio; `TRACKIO_DIR=... trackio show` shows it.

    Trackio finds a run by its name, so the name ends with a random part that is stored as the run's id. Trackio itself
    counts no failures: it prints a warning, and keeps data for an unreachable server on disk.
    """

    def __init__(self, facts: RunFacts) -> None:
        if facts.offline:
            # Trackio reads the variables when it is imported; nothing else in the driver imports it.
            os.environ[DIRECTORY] = str(facts.files / "trackio")
            for name in SERVERS:
                os.environ.pop(name, None)
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            project=facts.project,
            name=facts.ids.get_or_make("trackio", lambda: f"{facts.name}-{secrets.token_hex(3)}"),
            resume="allow",
            config=facts.described(),
            embed=False,
            # Its monitors would be further threads of the driver.
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def append(self, step: int, metrics: Mapping[str, float], responses: Sequence[SampledResponse]) -> None:
        """Log one row of metrics, with a table of the responses."""
        row: dict[str, object] = dict(metrics)
        for name, chosen in by_set(responses):
            row[name] = self._trackio.Table(columns=list(COLUMNS), data=[each.row() for each in chosen])
        self._run.log(row, step=step)

    def close(self, *, failed: bool) -> None:
        """Write or send the rest; runs of Trackio have no state for `failed`."""
        self._run.finish()


def login_problem() -> str | None:
    """Return what to set if TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names a server without a token for it; without
    both, Trackio writes files on this machine."""
    space, server = (os.environ.get(name) for name in SERVERS)
    if space:
        from huggingface_hub import get_token

        return None if get_token() else "set HF_TOKEN or run `hf auth login`"
    if server and "write_token=" not in server and not os.environ.get("TRACKIO_WRITE_TOKEN"):
        return "set TRACKIO_WRITE_TOKEN"
    return None
