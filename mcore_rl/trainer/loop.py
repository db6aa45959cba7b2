"""Reinforcement learning loop."""

from __future__ import annotations

from mcore_rl.trainer.run import Run, end_profile, load_latest, resume, save, saves_settled, steps_left
from mcore_rl.trainer.update import update_models
from mcore_rl.trainer.validation import describe_validation
from mcore_rl.types import RolloutScalars, Total


def train(run: Run) -> bool:
    """Run until trainer.steps, starting from the newest checkpoint of the run directory if there is one. Returns False
    if the run was stopped earlier on request, after saving a checkpoint.

    Every call returns only after all processes have finished it, so an error appears at the call that caused it.
    """
    resumed = resume(run)
    version = run.publisher.publish(run.state.version)
    if run.logp_gap is not None and run.state.step < run.config.trainer.steps:
        run.logp_gap.check(version)
    if not resumed and run.config.trainer.validate_before:
        validate(run)
        run.journal.finish_step(0)
    with run.checkpoints.copied(), saves_settled(run):
        for step in steps_left(run):
            groups = run.collector.collect(step)
            update = update_models(run, groups, step, version)  # raises before a step with non-finite values
            if run.reference is not None:
                run.reference.refresh(run.actor, step)
            version = run.publisher.publish(version + 1)  # returns after every engine has acknowledged
            run.state = run.state.finished(step, version)
            run.journal.record(run.describe(groups) | update)
            # The version at the start of the step, not the one that was just published.
            run.journal.record({"rollout/version": Total(version - 1)})
            if finish(run) and step < run.config.trainer.steps:
                return False
    return True


def finish(run: Run) -> bool:
    """Verify weights, validate and save a checkpoint if they are due after this step; write its metrics and profile.
    Returns True if a stop was requested; a checkpoint is then saved in any case."""
    step, trainer = run.state.step, run.config.trainer
    end_profile(run)
    last = step == trainer.steps
    if _due(step, run.config.weights.verify_every):
        run.journal.record({"weights/tensors_verified": Total(run.publisher.verify())})
    accuracy = validate(run) if last or _due(step, trainer.validate_every_steps) else None
    run.journal.finish_step(step)
    run.checkpoints.poll()
    stopping = run.stops.requested()
    if last or stopping or _due(step, run.config.checkpoint.every_steps):
        save(run, accuracy)
    return stopping


def validate(run: Run) -> float | None:
    """Validate and record the metrics. Returns the mean accuracy of all responses; None without validation prompts."""
    if run.validator is None:
        return None
    result = run.validator.validate(run.state.step)
    run.journal.record(describe_validation(result, run.validation_parts))
    return float(result.accuracies.mean())


def evaluate(run: Run) -> RolloutScalars:
    """Generate and grade responses to every validation prompt with the newest checkpoint, or with the initial model if
    there is none; no metrics are recorded."""
    load_latest(run)
    run.publisher.publish(run.state.version)
    assert run.validator is not None
    return run.validator.validate(run.state.step)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
