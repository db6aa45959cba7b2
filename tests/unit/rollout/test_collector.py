"""Dynamic sampling: kept groups, refills, and independence of timing."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.data.batching import gather, positions_in_groups
from mcore_rl.rollout.collector import RolloutCollector
from mcore_rl.trainer.batches import response_advantages
from mcore_rl.types import Groups, RolloutScalars, RolloutTask
from tests.unit.rollout.made import drawn_and_dropped, made_scalars, source_of

SAMPLES = 4


class ScriptedPool:
    """Engines whose responses to a row are all right, all wrong, or mixed, as `signal(row)` returns."""

    def __init__(self, signal: Any, num_engines: int = 1) -> None:
        self.signal, self.num_engines, self.tasks = signal, num_engines, []

    def run(self, tasks: Any) -> list[tuple[Any, RolloutScalars]]:
        self.tasks.append(tasks)
        return [(f"chunk of {task.prompt_rows.tolist()}", self._score(task)) for task in tasks]

    def _score(self, task: RolloutTask) -> RolloutScalars:
        samples = task.samples_per_prompt
        if task.records is not None:
            Path(str(task.records)).write_text("".join(f"{row}\n" for row in task.prompt_rows))
        accuracies = np.zeros((len(task.prompt_rows), samples), np.float32)
        accuracies[[self.signal(row) for row in task.prompt_rows], 0] = 1
        given = {"prompt_rows": np.repeat(task.prompt_rows, samples), "accuracies": accuracies.ravel()}
        return made_scalars(np.repeat(task.group_ids, samples), rewards=accuracies.ravel().copy(), **given)


def collector_of(
    pool: ScriptedPool, tmp_path: Path, *, dynamic: dict[str, Any], with_greedy: bool = False, **given: object
) -> RolloutCollector:
    source = source_of(tmp_path, 8, {"samples_per_prompt": SAMPLES, "top_k": 5}, dynamic, **given)
    return RolloutCollector(pool, source, with_greedy)


def collect(tmp_path: Path, signal: Any, *, num_engines: int = 1, **dynamic: object) -> tuple[Groups, ScriptedPool]:
    pool = ScriptedPool(signal, num_engines)
    return collector_of(pool, tmp_path, dynamic={"enable": True, **dynamic}).collect(1), pool


def test_collector_greedy_responses_for_kept_groups_only(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []

    class Failures:
        def check(self, graded: Any, what: str, records: str) -> None:
            assert (tmp_path / Path(records).name).exists()
            seen.append((sum(len(part.rewards) for part in graded), what))

    pool = ScriptedPool(lambda row: row % 2 == 0, num_engines=3)
    given = {"with_greedy": True, "failures": Failures()}
    groups = collector_of(pool, tmp_path, dynamic={"enable": True}, **given).collect(1)
    assert seen == [(drawn_and_dropped(groups)[0] * SAMPLES + 8, "step 1")]
    kept = zip(groups.scalars, groups.keep, strict=True)
    row_of = {int(i): int(row) for s, k in kept for i, row in zip(s.group_ids[k], s.prompt_rows[k], strict=True)}
    greedy = {int(i): int(row) for s in groups.greedy for i, row in zip(s.group_ids, s.prompt_rows, strict=True)}
    assert greedy == row_of
    assert sum(len(s.group_ids) for s in groups.greedy) == 8
    tasks = pool.tasks[-1]
    assert len(tasks) == 6
    assert {(t.samples_per_prompt, t.sampling.temperature, t.sampling.top_k, t.records) for t in tasks} == {
        (1, 0.0, -1, None)
    }


def kept_rows(groups: Groups) -> list[int]:
    rows = [s.prompt_rows[keep] for s, keep in zip(groups.scalars, groups.keep, strict=True)]
    return np.concatenate(rows)[::SAMPLES].tolist()


def test_collector_drops_and_refills_zero_variance_groups(tmp_path: Path) -> None:
    groups, pool = collect(tmp_path, lambda row: row % 2 == 0, num_engines=3)
    assert kept_rows(groups) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert drawn_and_dropped(groups) == (16, 8)
    assert [task.prompt_rows.tolist() for task in pool.tasks[0]] == [[0, 1], [2, 3], [4], [5], [6], [7]]
    assert np.concatenate([task.group_ids for tasks in pool.tasks for task in tasks]).tolist() == list(range(16))
    assert [path.name for path in tmp_path.iterdir()] == ["step_1.jsonl"]
    assert (tmp_path / "step_1.jsonl").read_text().split() == [str(row) for row in range(16)]


def test_collector_refill_size_follows_the_signal_fraction(tmp_path: Path) -> None:
    _, pool = collect(tmp_path, lambda row: row % 8 < 6)  # 6 of 8 have signal: 2 / 0.75 -> 3 more
    assert [sum(len(t.prompt_rows) for t in tasks) for tasks in pool.tasks] == [8, 3]
    _, pool = collect(tmp_path, lambda row: row in (0, 20, 30), max_batches=4)
    assert max(sum(len(t.prompt_rows) for t in tasks) for tasks in pool.tasks) == 8


def test_collector_surplus_groups_are_cut_in_order(tmp_path: Path) -> None:
    groups, _ = collect(tmp_path, lambda row: row != 0)
    assert kept_rows(groups) == [1, 2, 3, 4, 5, 6, 7, 8]  # row 9, if drawn, is one too many


def test_collector_max_batches_fills_with_zero_variance(tmp_path: Path) -> None:
    groups, pool = collect(tmp_path, lambda row: row == 3, max_batches=2)
    assert len(pool.tasks) == 2
    assert kept_rows(groups) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert drawn_and_dropped(groups)[1] == drawn_and_dropped(groups)[0] - 1


def test_collector_without_dynamic_sampling_keeps_all(tmp_path: Path) -> None:
    pool = ScriptedPool(lambda row: False)
    assert kept_rows(collector_of(pool, tmp_path, dynamic={}).collect(1)) == list(range(8))
    assert len(pool.tasks) == 1


@pytest.mark.parametrize("metric", ["accuracy", "reward"])
def test_collector_signal_depends_on_the_metric(tmp_path: Path, metric: str) -> None:
    class Shaped(ScriptedPool):
        def _score(self, task: RolloutTask) -> RolloutScalars:
            result = super()._score(task)
            result.rewards[:] = np.arange(len(result.rewards))  # overlong shaping: rewards differ everywhere
            result.accuracies[:] = 1
            return result

    pool = Shaped(lambda row: False)
    dynamic = {"enable": True, "max_batches": 2, "metric": metric}
    groups = collector_of(pool, tmp_path, dynamic=dynamic).collect(1)
    assert drawn_and_dropped(groups)[1] == (16 if metric == "accuracy" else 0)


@pytest.mark.parametrize("baseline", ["prompt", "role"])
def test_collector_signal_of_roles_depends_on_the_baseline(tmp_path: Path, baseline: str) -> None:
    """Two agents play for a point: the rewards of all episodes are 0. In the group of row 1, the first always wins."""

    class Duel(ScriptedPool):
        def _score(self, task: RolloutTask) -> RolloutScalars:
            super()._score(task)  # writes the records
            points = np.ones((len(task.prompt_rows), SAMPLES, 2), np.float32)
            points[..., 1] = -1
            points[task.prompt_rows != 1, 0] *= -1
            ids, rows = (np.repeat(each, 2 * SAMPLES) for each in (task.group_ids, task.prompt_rows))
            roles = np.tile(["first", "second"], len(ids) // 2)
            return made_scalars(ids, prompt_rows=rows, roles=roles, other_rewards=-points.ravel())

    dynamic = {"enable": True, "max_batches": 1, "metric": "reward"}
    groups = collector_of(Duel(lambda row: True), tmp_path, dynamic=dynamic, baseline=baseline).collect(1)
    assert drawn_and_dropped(groups) == (8, 1 if baseline == "role" else 8)
    kept = gather(groups.scalars, groups.keep)
    advantages = response_advantages(AlgorithmConfig(baseline=baseline))(groups, kept.rewards)
    dull = [row for row in range(8) if not advantages[kept.prompt_rows == row].any()]
    assert dull == ([1] if baseline == "role" else list(range(8)))


def test_collector_handles_groups_of_unequal_sizes(tmp_path: Path) -> None:
    """An episode may have several sequences: here response s of the group of row r has 1 + (r + s) % 3."""

    class Several(ScriptedPool):
        def _score(self, task: RolloutTask) -> RolloutScalars:
            whole = super()._score(task)
            counts = 1 + (whole.prompt_rows + positions_in_groups(whole.group_ids)) % 3
            arrays = {
                field.name: np.repeat(value, counts, axis=0)
                for field in fields(RolloutScalars)
                if isinstance(value := getattr(whole, field.name), np.ndarray)
            }
            first = np.cumsum(counts) - counts
            return RolloutScalars(**arrays, episodes=np.repeat(first, counts))

    for max_batches, signal in ((3, lambda row: row % 2 == 0), (1, lambda row: row % 3 == 0)):
        dynamic = {"enable": True, "max_batches": max_batches}
        groups = collector_of(Several(signal, 2), tmp_path, dynamic=dynamic).collect(1)
        kept = [s.group_ids[k] for s, k in zip(groups.scalars, groups.keep, strict=True)]
        assert len(np.unique(np.concatenate(kept))) == 8
        for scalars, rows in zip(groups.scalars, groups.keep, strict=True):
            for group in np.unique(scalars.group_ids[rows]):
                of_group = np.flatnonzero(scalars.group_ids == group)
                assert np.isin(of_group, rows).all(), "a group was cut"
        solved = [signal(row) for s, k in zip(groups.scalars, groups.keep, strict=True) for row in s.prompt_rows[k]]
        assert all(solved) if max_batches == 3 else not all(solved)
        drawn = np.concatenate([s.group_ids for s in groups.scalars])
        row_of = {int(g): int(r) for s in groups.scalars for g, r in zip(s.group_ids, s.prompt_rows, strict=True)}
        lacking = sum(not signal(row) for row in row_of.values())
        assert drawn_and_dropped(groups) == (len(np.unique(drawn)), lacking)
