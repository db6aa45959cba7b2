"""Supervised training with the same actor: the warm start before reinforcement learning."""

from __future__ import annotations

from mcore_rl.trainer.run import SupervisedRun, end_profile, resume, save, saves_settled, steps_left


def train_supervised(run: SupervisedRun) -> bool:
    """Run up to trainer.steps, starting from the newest checkpoint of the run directory if there is one. Returns False
    if the run was stopped earlier on request, after saving."""
    resume(run)
    every = run.config.checkpoint.every_steps
    with run.checkpoints.copied(), saves_settled(run):
        for step in steps_left(run):
            update = run.actor.update(run.actor.recompute_logp(run.next_batch()))
            run.state = run.state.finished(step, 0)
            end_profile(run)
            run.journal.record(update)
            run.journal.finish_step(step)
            run.checkpoints.poll()
            # A stop request in the last step is ignored: the run is finished anyway.
            last, stopping = step == run.config.trainer.steps, run.stops.requested()
            if last or stopping or (every and step % every == 0):
                save(run)
            if stopping and not last:
                return False
    return True
