"""Groups that no step has trained survive a restart: none is lost, trained twice, or changed."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.errors import CheckpointError, DamagedCheckpointError
from mcore_rl.rollout.streaming.checkpoint import (
    FINISHED,
    Bounds,
    SavedGroup,
    read_groups,
    read_trajectories,
    write_groups,
    write_trajectories,
)
from mcore_rl.rollout.streaming.collector import StreamingCollector
from mcore_rl.types import RolloutScalars, SavedFile, TrajectoryBuffers
from tests.unit.rollout.made import made_scalars
from tests.unit.rollout.streaming.streamed import SAMPLES, SIZE, Stream, collector_of, some
from tests.unit.rollout.streaming.test_collector import ages, trained


class Run:
    """Collector and publisher as the trainer uses them, with a checkpoint in `directory`."""

    def __init__(self, directory: Path, seed: int, **given: object) -> None:
        self.directory, self.given, self.saves = directory, given, 0
        self.start(seed)

    def start(self, seed: int) -> None:
        records = self.directory / "rollouts"
        records.mkdir(parents=True, exist_ok=True)
        for part in records.glob(".*"):
            part.unlink()
        self.stream = Stream(some(seed), slots=6 * SAMPLES)
        self.stream.dull = lambda group: group % 5 == 0
        dynamic = {"enable": True, "max_batches": 3}
        self.collector: StreamingCollector = collector_of(
            self.stream, records, steps=20, rollout={"max_staleness": 2}, dynamic=dynamic, **self.given
        )
        self.sampler: Any = self.collector.source.sampler

    def save(self) -> tuple[dict[str, Any], int, tuple[SavedFile, ...]]:
        state = self.collector.state_dict()
        drawn, self.saves = self.sampler.next, self.saves + 1
        path = self.directory / f"saved_{self.saves}"
        path.mkdir()
        files = self.collector.start_save(str(path)).result().files
        return {**state, "path": str(path)}, drawn, files

    def load(self, saved: tuple[dict[str, Any], int, tuple[SavedFile, ...]]) -> None:
        state, self.sampler.next, files = saved
        self.collector.load_state_dict(json.loads(json.dumps(state)))
        self.collector.load(state["path"], files)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drain", [False, True])
def test_collector_resumes_train_every_group_once(seed: int, drain: bool, tmp_path: Path) -> None:
    run, of_steps = Run(tmp_path, seed, drain=drain), dict[int, list[int]]()
    dropped: dict[int, list[int]] = {}
    run.collector.published(0)
    step, saved = 0, run.save()
    lives = [3, 2, 5, 1, 30]
    while step < 20:
        for _ in range(lives.pop(0)):
            if step == 20:
                break
            groups = run.collector.collect(step + 1)
            assert max(ages(groups, step)) <= 4
            of_steps[step + 1] = trained(groups)
            dropped[step + 1] = [int(s.group_ids[0]) for s in groups.scalars if s.group_ids[0] not in trained(groups)]
            lines = (tmp_path / "rollouts" / f"step_{step + 1}.jsonl").read_text().split()
            assert lines == [str(int(scalars.group_ids[0])) for scalars in groups.scalars]
            step += 1
            run.stream.version = step
            run.collector.published(step)
            saved = run.save()
            if drain:
                assert json.loads((Path(saved[0]["path"]) / "engine_0.journal").read_text()) == []
        # The run continues for a while before it dies; this work is lost.
        if run.stream.underway and step < 20:
            run.collector.collect(step + 1)
        run.start(seed + step)
        run.load(saved)
        run.stream.version = step
        run.collector.published(step)
    every = sorted(group for of_step in of_steps.values() for group in of_step)
    assert len(every) == len(set(every)) == 20 * SIZE
    every_dropped = [group for of_step in dropped.values() for group in of_step]
    assert all(group % 5 == 0 for group in every_dropped)
    assert set(every) | set(every_dropped) >= set(range(max(every)))


def test_load_running_groups_keep_version_and_tokens(tmp_path: Path) -> None:
    run = Run(tmp_path, 1)
    run.collector.published(0)
    run.collector.collect(1)
    run.collector.published(1)
    before = {int(task.group_ids[0]): task for task, _ in run.stream.underway.values()}
    saved = run.save()
    run.start(2)
    run.load(saved)
    assert run.stream.begun == [], "before engines have weights nothing begins"
    run.collector.published(1)
    after = {int(task.group_ids[0]): task for task in run.stream.begun}
    assert before.keys() <= after.keys()
    for number, task in before.items():
        assert after[number].version == task.version
        assert after[number].prompt_rows.tolist() == task.prompt_rows.tolist()
        assert after[number].journals == (f"{saved[0]['path']}/engine_0.journal",)
        assert after[number].records == task.records


def test_load_changed_file_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, 1)
    run.collector.published(0)
    saved = run.save()
    path = Path(saved[0]["path"], "groups.json")
    path.write_text(path.read_text().replace("0", "1", 1))
    run.start(1)
    with pytest.raises(DamagedCheckpointError, match=r"saved_\d+/groups\.json has another checksum"):
        run.load(saved)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("max_staleness", r"rollout\.max_staleness=2, but this run has 1"),
        ("max_staleness_hard", r"rollout\.max_staleness_hard=4, but this run has 3"),
        ("prompts_per_step", r"trainer\.prompts_per_step=8, but this run has 7"),
        ("samples_per_prompt", r"rollout\.samples_per_prompt=4, but this run has 3"),
    ],
)
def test_load_lowered_bounds_are_rejected(name: str, key: str) -> None:
    saved = Bounds(2, 4, 8, 4)
    with pytest.raises(CheckpointError, match=key):
        replace(saved, **{name: getattr(saved, name) - 1}).require(saved)
    if name != "samples_per_prompt":
        replace(saved, **{name: getattr(saved, name) + 1}).require(saved)


def test_load_with_another_rule_for_sets_is_rejected() -> None:
    saved, now = Bounds(2, 4, 8, 4, True), Bounds(2, 4, 8, 4)
    with pytest.raises(CheckpointError, match=r"rollout\.keep_sampling_mask=true, but this run has false: restore"):
        now.require(saved)
    with pytest.raises(CheckpointError, match=r"rollout\.keep_sampling_mask=false, but this run has true: restore"):
        saved.require(now)
    saved.require(saved)


def test_write_groups_scalars_round_trip_exactly(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    floats = generator.normal(size=3).astype(np.float32)
    scalars = RolloutScalars(
        np.arange(3), np.arange(3), *[np.arange(3, dtype=np.int32)] * 3, floats, -floats, np.ones(3, np.uint8),
        np.arange(6, dtype=np.int32).reshape(3, 2), errors=((1, "a grader's wörds"),), scores={"model": floats / 3},
        parts={"half": np.array([0.1, np.nan, 1e-300])}, traceback="line\n", episodes=np.array([0, 0, 2]),
        episode_metrics={"episode/turns": np.array([1.0, 2.0, 3.0])}, digests=np.array([1, 2, 2**32 - 1], np.uint32),
        version_tokens=((2, 2**40), (3, 1)), roles=np.array(["", "critic", "löser"]), other_rewards=floats / 7,
    )  # fmt: skip
    write_groups(tmp_path / "groups.json", Bounds(1, 2, 3, 4), [SavedGroup(7, 3, 1, FINISHED, scalars, "a.npz", 2, 9)])
    bounds, (group,) = read_groups(tmp_path / "groups.json")
    assert (bounds, replace(group, scalars=None)) == (
        Bounds(1, 2, 3, 4), SavedGroup(7, 3, 1, FINISHED, None, "a.npz", 2, 9),
    )  # fmt: skip
    assert group.scalars is not None
    for field in fields(RolloutScalars):
        same(getattr(group.scalars, field.name), getattr(scalars, field.name))


@pytest.mark.parametrize("renamed", ["version_tokens", "rewards"])
def test_read_groups_of_another_version_is_rejected(renamed: str, tmp_path: Path) -> None:
    path = tmp_path / "groups.json"
    write_groups(path, Bounds(1, 2, 3, 4), [SavedGroup(7, 3, 1, FINISHED, made_scalars([7]), "a.npz", 2, 9)])
    path.write_text(path.read_text().replace(f'"{renamed}"', '"of_old"'))
    with pytest.raises(CheckpointError, match="another version of mcore-rl"):
        read_groups(path)


def same(one: Any, other: Any) -> None:
    if isinstance(other, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(other, dict):
        assert one.keys() == other.keys()
        for name in other:
            same(one[name], other[name])
    else:
        assert one == other


@pytest.mark.parametrize("temperature", [None, 0.5, "each"])
@pytest.mark.parametrize("experts", [False, True])
def test_write_trajectories_parts_round_trip(experts: bool, temperature: Any, tmp_path: Path) -> None:
    parts = [buffers(lengths, experts) for lengths in ([3, 2], [4], [1, 1, 5])]
    if temperature is not None:
        drawn = np.random.default_rng(0).uniform(0.1, 2, 7).astype(np.float32)
        given = [np.float32(temperature).reshape(()) if temperature != "each" else drawn[:n] for n in (5, 4, 7)]
        parts = [replace(part, temperatures=each) for part, each in zip(parts, given, strict=True)]
    file = write_trajectories(tmp_path / "t.npz", parts)
    assert (file.name, file.num_bytes) == ("t.npz", (tmp_path / "t.npz").stat().st_size)
    for one, other in zip(read_trajectories(tmp_path / "t.npz"), parts, strict=True):
        for field in fields(TrajectoryBuffers):
            same(getattr(one, field.name), getattr(other, field.name))


def buffers(lengths: list[int], experts: bool) -> TrajectoryBuffers:
    generator, total = np.random.default_rng(len(lengths)), sum(lengths)
    prompts = np.full(len(lengths), 2, np.int32)
    return TrajectoryBuffers(
        generator.integers(0, 99, total + 2 * len(lengths)).astype(np.int32),
        np.cumsum([0, *(length + 2 for length in lengths)]),
        prompts,
        np.cumsum([0, *lengths]),
        generator.normal(size=total).astype(np.float32),
        generator.integers(0, 5, total).astype(np.int32),
        np.ones(total, np.uint8),
        generator.integers(0, 8, (total + 2 * len(lengths), 2, 2)).astype(np.uint8) if experts else None,
    )
