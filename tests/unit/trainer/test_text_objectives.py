"""Training on texts: the weights that ranks receive, the metrics of a step and of a validation, and the loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.objectives import PreferenceConfig
from mcore_rl.config.schema import Config
from mcore_rl.data.packing import SequenceCost
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.data.supervised.targets import Target, Targets, TextSet
from mcore_rl.preparation.prepare import RunData
from mcore_rl.text_objectives import mean_over_pairs, text_objective
from mcore_rl.trainer.checkpoints import Checkpoints
from mcore_rl.trainer.preference import PairBatch, PairObjective
from mcore_rl.trainer.run import SupervisedRun
from mcore_rl.trainer.supervised import TargetObjective, train_supervised
from mcore_rl.trainer.validation import ValidationParts
from mcore_rl.types import Batch, BatchHandle, Mean, Metric, SequenceLogp, Total
from tests.unit.trainer.test_loop import Recorder

POLICY = np.array([-4.0, -6.0, -3.0, -2.0])
REFERENCE = np.array([-5.0, -5.0, -4.0, -4.0])


def batch(trained_tokens: list[int], offset: int = 0) -> Batch:
    count = len(trained_tokens)
    numbers = np.arange(count)
    return Batch(
        chunks=(),
        chunk_ids=np.zeros(count, np.int32),
        rows=numbers + offset,
        group_ids=numbers // 2,
        total_tokens=np.array(trained_tokens, np.int32) + 3,
        trained_tokens=np.array(trained_tokens, np.int32),
        rewards=np.zeros(count, np.float32),
        advantages=np.zeros(count, np.float32),
        loss_weights=mean_over_pairs(numbers),
        dp_ranks=np.zeros(count, np.int32),
        updates=(numbers,),
    )


class FakeActor:
    """Actor whose sums of log-probabilities are given by the row of each response."""

    def __init__(self, *, reference: bool = True) -> None:
        self.reference, self.updates = reference, list[Batch]()

    def sequence_logp(self, of: Batch) -> SequenceLogp:
        return SequenceLogp(POLICY[of.rows], REFERENCE[of.rows] if self.reference else None)

    def recompute_logp(self, of: Batch) -> BatchHandle:
        return BatchHandle(of, key=1)

    def update(self, handle: BatchHandle) -> dict[str, Metric]:
        self.updates.append(handle.batch)
        return {"actor/loss": Mean(99.0, 1), "actor/grad_norm": Total(1)}


def on_pairs(section: PreferenceConfig, *, trains_scores: bool = False) -> PairObjective:
    pairs = PairBatch(batch([2, 4, 3, 1]), np.array([0.5, 0.0]))
    return PairObjective(next_batch=lambda step: pairs, section=section, trains_scores=trains_scores)


def test_pair_objective_of_scores_uses_margins_and_no_reference() -> None:
    actor = FakeActor(reference=False)
    objective = on_pairs(PreferenceConfig(center_rewards_coefficient=0.1), trains_scores=True)
    metrics = objective.train(actor, 1)  # type: ignore[arg-type]
    # Scores: -4 and -6 with margin 0.5; -3 and -2.
    h, total = np.array([1.5, -1.0]), np.array([-10.0, -5.0])
    slope = 1 / (1 + np.exp(h))
    expected = [sign * slope[pair] - 0.2 * total[pair] for pair in (0, 1) for sign in (1, -1)]
    assert actor.updates[0].advantages == pytest.approx(expected, rel=1e-6)
    assert metrics["actor/loss"].value == pytest.approx((np.log(1 + np.exp(-h)) + 0.1 * total**2).mean())
    assert metrics["preference/margin"].value == pytest.approx((2 - 1) / 2)
    assert metrics["preference/chosen_reward"].value == -3.5
    assert not [name for name in metrics if name.endswith("_logp")]


def test_pair_objective_sends_weights_of_each_response() -> None:
    actor = FakeActor()
    metrics = on_pairs(PreferenceConfig(beta=0.5)).train(actor, 1)  # type: ignore[arg-type]
    # Rewards: 0.5 and -0.5; 0.5 and 1.
    h = np.array([1.0, -0.5])
    slope = 0.5 / (1 + np.exp(h))
    (sent,) = actor.updates
    assert sent.advantages == pytest.approx([slope[0], -slope[0], slope[1], -slope[1]], rel=1e-6)
    assert sent.loss_weights == pytest.approx([0.5] * 4)
    assert metrics["actor/loss"].value == pytest.approx(np.log(1 + np.exp(-h)).mean())
    assert metrics["preference/accuracy"].value == 0.5
    assert metrics["preference/margin"].value == pytest.approx(0.25)
    assert metrics["actor/grad_norm"].value == 1


def test_pair_objective_normalizes_by_trained_tokens() -> None:
    actor = FakeActor(reference=False)
    section = PreferenceConfig(beta=2.0, length_normalized=True, reference_free=True)
    on_pairs(section).train(actor, 1)  # type: ignore[arg-type]
    h = 2 * np.array([-4 / 2 + 6 / 4, -3 / 3 + 2 / 1])
    slope = 2 / (1 + np.exp(h))
    expected = [slope[0] / 2, -slope[0] / 4, slope[1] / 3, -slope[1] / 1]
    assert actor.updates[0].advantages == pytest.approx(expected, rel=1e-6)


def test_pair_validation_covers_all_batches_and_parts() -> None:
    def validation() -> Iterator[PairBatch]:
        yield PairBatch(batch([2, 4]), np.zeros(1))
        yield PairBatch(batch([3, 1], offset=2), np.zeros(1))

    parts = {"first": np.array([0]), "second": np.array([1])}
    objective = replace(on_pairs(PreferenceConfig(beta=0.5)), validation=validation, parts=parts)
    metrics = {name: metric.value for name, metric in objective.validate(FakeActor()).items()}  # type: ignore[arg-type]
    assert (metrics["val/margin/first"], metrics["val/margin/second"]) == (1.0, -0.5)
    assert metrics["val/margin"] == 0.25
    assert (metrics["val/accuracy"], metrics["val/accuracy/first"], metrics["val/accuracy/second"]) == (0.5, 1.0, 0.0)
    assert metrics["val/loss/second"] == pytest.approx(np.log(1 + np.exp(0.5)))


def test_target_validation_is_a_mean_over_tokens() -> None:
    def validation() -> Iterator[Batch]:
        yield batch([2, 4])
        yield batch([3, 1], offset=2)

    parts = {"last": np.array([2, 3])}
    objective = TargetObjective(next_batch=lambda step: batch([]), validation=validation, parts=parts)
    metrics = objective.validate(FakeActor())  # type: ignore[arg-type]
    assert metrics["val/loss"].value == pytest.approx(15 / 10)
    assert metrics["val/loss/last"].value == pytest.approx(5 / 4)


def test_text_objective_orders_later_epochs_by_seed_and_step() -> None:
    target = Targets.of([Target(np.array([4, 5], np.int32), np.ones(2, np.uint8))] * 8)
    prompts = PromptSet(np.zeros(8, np.int32), np.arange(9, dtype=np.int64), {})
    data = RunData({}, None, [], [], ValidationParts(), {"train": TextSet(prompts, (target,), np.zeros(8))})
    config = Config()
    config.trainer.objective, config.algorithm.policy_loss.name = "sft", "sft"
    config.trainer.prompts_per_step, config.trainer.prompts_per_update, config.trainer.update_epochs = 8, 1, 2

    def orders(seed: int) -> list[list[int]]:
        config.run.seed, actor = seed, FakeActor()
        prepared: Any = SimpleNamespace(
            data=data, sampler=PromptSampler(8, seed=0), layout=SimpleNamespace(dp=1), cost=SequenceCost()
        )
        objective = text_objective(config, prepared, lambda buffers: buffers)  # type: ignore[arg-type,return-value]
        for step in (1, 2):
            objective.train(actor, step)  # type: ignore[arg-type]
        return [[int(update[0]) for update in sent.updates[8:]] for sent in actor.updates]

    first, second = orders(seed=1)
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert orders(seed=1) == [first, second]
    assert orders(seed=2)[0] != first


class RecordedObjective:
    validates = True

    def __init__(self, part: Recorder) -> None:
        self.part = part

    def train(self, actor: Recorder, step: int) -> dict[str, Metric]:
        return actor.update(actor.recompute_logp("batch"))

    def validate(self, actor: Recorder) -> dict[str, Metric]:
        self.part.note("validate")
        return {"val/accuracy": Mean(self.part.updates / 10, 1), "val/loss": Mean(1.0, 1)}


def run_of(part: Recorder, tmp_path: Path, steps: int) -> SupervisedRun:
    config = Config()
    config.trainer.steps, config.trainer.validate_every_steps = steps, 2
    config.checkpoint.every_steps = 2
    made: Any = SupervisedRun(
        config=config,
        actor=part,  # type: ignore[arg-type]
        objective=RecordedObjective(part),  # type: ignore[arg-type]
        journal=part,
        checkpoints=Checkpoints(tmp_path / "checkpoints", 2, 1),
        remove_unfinished=lambda: part.note("remove unfinished"),
        positions={"sampler": part},  # type: ignore[dict-item]
        stops=part,
    )
    return made


def test_train_supervised_validates_before_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    part = Recorder()
    assert train_supervised(run_of(part, tmp_path, 3))
    shown = [call for call in part.calls if call in ("validate", "save") or call.startswith(("update", "figures"))]
    assert shown == [
        *("validate", "figures 0"),
        *("update batch", "figures 1"),
        *("update batch", "validate", "figures 2", "save"),
        *("update batch", "validate", "figures 3", "save"),
    ]
    assert part.rows[0] == {"val/accuracy": 0.0, "val/loss": 1.0}
    assert part.rows[2]["val/accuracy"] == 0.2
    again = Recorder()
    assert train_supervised(run_of(again, tmp_path, 4))
    # A resumed run does not validate before its first step.
    assert [call for call in again.calls if call == "validate"] == ["validate"]


def test_train_supervised_stops_on_request_after_saving(tmp_path: Path) -> None:
    part = Recorder()
    part.stop_at = "figures 1"
    assert not train_supervised(run_of(part, tmp_path, 3))
    assert part.calls[-1] == "save"
    assert "figures 2" not in part.calls
