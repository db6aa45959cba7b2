"""Facts and responses of a small run, and a tracker whose behaviour a test chooses."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_rl.observe.trackers.interface import RunFacts, SampledResponse
from mcore_rl.observe.trackers.run_ids import RunIds

HOSTILE = "</script>\n```\n# heading\x85| a | b |\u202e"


def facts(directory: Path, *, first_step: int = 0, lr: float = 1e-6) -> RunFacts:
    directory.mkdir(exist_ok=True)
    ids = RunIds(directory / "trackers")
    config = {"actor.optimizer.lr": lr, "run.dir": str(directory), "data.val": None, "data.train": ["a.jsonl"]}
    return RunFacts(directory, "project", "name", True, first_step, ids, config, "abc-dirty", {"python": "3.11"})


def response(step: int = 1, *, is_validation: bool = False, text: str = HOSTILE) -> SampledResponse:
    return SampledResponse(step, is_validation, 3, 0.5, 1.0, 7, "stop", "1+1=?", text)


class FakeTracker:
    """Tracker that records its calls, and raises `error` in `append` for the steps of `fails_at`."""

    def __init__(self, fails_at: Sequence[int] = (), error: BaseException | None = None) -> None:
        self.fails_at, self.error = fails_at, error or RuntimeError("the server\nis gone")
        self.steps: list[int] = []
        self.closed: list[bool] = []
        self.threads: set[int] = set()

    def append(self, step: int, metrics: Mapping[str, float], responses: Sequence[SampledResponse]) -> None:
        self.threads.add(threading.get_ident())
        if step in self.fails_at:
            raise self.error
        self.steps.append(step)

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)
