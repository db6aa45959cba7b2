"""Trackers by name: package, login and constructor. Nothing here imports a tracker's package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mcore_rl.observe.trackers import mlflow, swanlab, tensorboard, trackio, wandb
from mcore_rl.observe.trackers.interface import RunFacts, Tracker


def _no_login() -> str | None:
    return None


@dataclass(frozen=True)
class TrackerKind:
    """One tracker.

    distributions: packages of the index that provide `module`; the first one is recommended.
    minimum: oldest supported version.
    open: opens the run, or continues it under the id of an earlier start. It may block or raise.
    login_problem: returns what to set if the tracker cannot send to its server; None if it can. It sends nothing.
    """

    distributions: tuple[str, ...]
    module: str
    minimum: str
    open: Callable[[RunFacts], Tracker]
    login_problem: Callable[[], str | None] = _no_login


TRACKERS: Mapping[str, TrackerKind] = {
    "tensorboard": TrackerKind(("tensorboard",), "tensorboard", "2.20", tensorboard.TensorBoardLog),
    "wandb": TrackerKind(("wandb",), "wandb", "0.31", wandb.WandbRun, wandb.login_problem),
    "mlflow": TrackerKind(("mlflow-skinny", "mlflow"), "mlflow", "3.17", mlflow.MlflowRun, mlflow.login_problem),
    "trackio": TrackerKind(("trackio",), "trackio", "0.43", trackio.TrackioRun, trackio.login_problem),
    "swanlab": TrackerKind(("swanlab",), "swanlab", "0.10", swanlab.SwanlabRun, swanlab.login_problem),
}
