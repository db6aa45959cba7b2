"""A repeated step starts from the state before it, and makes the calls of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import pytest

from mcore_rl.algorithms.kl_controller import KLController
from mcore_rl.config.schema import Config
from mcore_rl.errors import CheckpointError
from mcore_rl.trainer.checkpoints import Checkpoints
from mcore_rl.trainer.reference import KL_CONTROLLER
from mcore_rl.trainer.repetition import Repetition
from mcore_rl.types import BatchHandle, Metric, SavedFile, SavedState, Total


@dataclass
class Part:
    """Fake actor and critic. Records loaded files and updates."""

    loaded: list[tuple[str, list[str]]] = field(default_factory=list)
    updated: list[object] = field(default_factory=list)

    def load(self, directory: str, files: Sequence[SavedFile]) -> None:
        self.loaded.append((Path(directory).name, sorted(file.name for file in files)))

    def recompute_logp(self, batch: object) -> BatchHandle:
        return BatchHandle(batch, key=1, metrics={"of/pass": Total(1)})  # type: ignore[arg-type]

    def update(self, handle: BatchHandle) -> dict[str, Metric]:
        self.updated.append(handle.batch)
        return {"actor/loss": Total(2)}


@dataclass
class Save:
    """Save that has written one file of each part of a checkpoint."""

    directory: Path
    names: tuple[str, ...]

    def done(self) -> bool:
        return True

    def result(self) -> SavedState:
        for name in self.names:
            (self.directory / name).parent.mkdir(exist_ok=True)
            (self.directory / name).write_text(name)
        return SavedState(tuple(SavedFile(name, len(name), crc32(name.encode())) for name in self.names), {})


def saved(tmp_path: Path, *names: str, positions: dict[str, object] | None = None) -> Path:
    """Save a checkpoint of step 2 with the files `names`."""
    state = {"step": 2, "version": 2, "accuracy": None, "positions": positions or {}}
    Checkpoints(tmp_path, 1).save(2, state, lambda path: Save(Path(path), names))  # type: ignore[arg-type]
    return tmp_path / "step_2"


def repetition(part: Part, *, critic: bool, controller: KLController | None = None) -> Repetition:
    config, recorded = Config(), dict[str, Metric]()

    def batch_of(groups: object, step: int, version: int) -> object:
        recorded["actor/balance"] = Total(3)
        return groups, step, version

    return Repetition(
        config=config,
        actor=part,  # type: ignore[arg-type]
        critic=part if critic else None,  # type: ignore[arg-type]
        reference=None,
        teacher=None,
        entropy=None,
        batch_of=batch_of,  # type: ignore[arg-type]
        estimates_tokens=False,
        controllers={KL_CONTROLLER: controller} if controller else {},
        recorded=recorded,
    )


def test_load_restores_models_and_controllers_without_groups_in_flight(tmp_path: Path) -> None:
    controller, part = KLController(0.1, target=0.5), Part()
    position = {KL_CONTROLLER: {"coefficient": 0.25}, "sampler": {"epoch": 3}, "collector": {}}
    path = saved(tmp_path, "policy", "critic/values", "rollouts/groups.json", positions=position)
    repetition(part, critic=True, controller=controller).load(path)
    assert part.loaded == [("step_2", ["policy", "state.json"]), ("critic", ["values"])]
    assert controller.coefficient == 0.25


def test_load_of_a_checkpoint_of_another_kind_loads_nothing(tmp_path: Path) -> None:
    part, path = Part(), saved(tmp_path, "policy")
    with pytest.raises(CheckpointError, match=r"no critic, but this run has one"):
        repetition(part, critic=True).load(path)
    with pytest.raises(CheckpointError, match=r"no kl_controller; restore algorithm\.kl\.controller"):
        repetition(part, critic=False, controller=KLController(0.1)).load(path)
    assert part.loaded == []


@pytest.mark.parametrize("warmup", [0, 3])
def test_repeat_trains_the_policy_only_after_the_warmup_of_the_critic(warmup: int) -> None:
    part = Part()
    made = repetition(part, critic=False)
    made.config.trainer.critic_warmup_steps = warmup
    expected = {"actor/balance": 3, "of/pass": 1} | ({} if warmup else {"actor/loss": 2})
    assert made.repeat("groups", 3, 2) == expected  # type: ignore[arg-type]
    assert part.updated == ([] if warmup else [("groups", 3, 2)])
