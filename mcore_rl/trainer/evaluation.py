"""Validation only: evaluates the newest checkpoint, or the initial model if there is none."""

from __future__ import annotations

from mcore_rl.trainer.run import Run, load_latest
from mcore_rl.types import RolloutScalars


def evaluate(run: Run) -> RolloutScalars:
    """Generate and grade responses to every validation prompt; no metrics are recorded."""
    load_latest(run)
    run.publisher.publish(run.state.version)
    assert run.validator is not None
    return run.validator.validate(run.state.step)
