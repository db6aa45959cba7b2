"""Validation only: the weights of the newest checkpoint, or those that the model came with."""

from __future__ import annotations

from mcore_rl.trainer.run import Run, load_latest
from mcore_rl.types import RolloutScalars


def evaluate(run: Run) -> RolloutScalars:
    """Responses to every validation prompt; the run's figures stay as they are."""
    load_latest(run)
    run.publisher.publish(run.state.version)
    assert run.validator is not None
    return run.validator.validate(run.state.step)
