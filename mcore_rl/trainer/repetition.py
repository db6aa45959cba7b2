"""Repetition of a step's update from the weights before it, for `mcore-rl debug train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.algorithms.entropy_controller import EntropyController
from mcore_rl.config.schema import Config
from mcore_rl.errors import CheckpointError
from mcore_rl.ports import Actor, Critic, Teacher
from mcore_rl.trainer.checkpoints import Checkpoints, split_files
from mcore_rl.trainer.reference import CONTROLLERS, Reference
from mcore_rl.trainer.run import GROUPS, Stateful, load_actor_and_critic
from mcore_rl.trainer.update import update_models
from mcore_rl.types import Batch, Groups, Metric


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Parts of a run that an update needs (update.UpdateParts).

    controllers: states that a checkpoint contains and the update uses, by name. recorded: metrics of the
    parts, which the update does not return.
    """

    config: Config
    actor: Actor
    critic: Critic | None
    reference: Reference | None
    teacher: Teacher | None
    entropy: EntropyController | None
    batch_of: Callable[[Groups, int, int], Batch]
    estimates_tokens: bool
    controllers: Mapping[str, Stateful]
    recorded: dict[str, Metric]

    def load(self, checkpoint: Path) -> None:
        """Restore models, optimizers, random state and controllers.

        Raises: DamagedCheckpointError; CheckpointError if the checkpoint does not fit the configuration.
        """
        state, files = Checkpoints.read(checkpoint)
        # Responses of later steps, which an asynchronous run had in flight.
        own, _ = split_files(files, GROUPS)
        if missing := self.controllers.keys() - state["positions"].keys():
            keys = ", ".join(CONTROLLERS[name][1] for name in sorted(missing))
            raise CheckpointError(f"{checkpoint} has no {', '.join(missing)}; restore {keys}")
        load_actor_and_critic(self.actor, self.critic, checkpoint, own)
        for name, controller in self.controllers.items():
            controller.load_state_dict(state["positions"][name])

    def repeat(self, groups: Groups, step: int, version: int) -> dict[str, float]:
        """Repeat the update. Returns its metrics."""
        found = update_models(self, groups, step, version)
        return {name: metric.value for name, metric in (self.recorded | found).items()}
