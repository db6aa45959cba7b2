"""Sampling: reports of large runs stay within their size."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mcore_rl.observe.report.pages import MAX_BYTES, decode, evenly, fit
from mcore_rl.observe.report.series import MAX_BUCKETS, series_of
from mcore_rl.observe.report.statistics import StepStatistics
from mcore_rl.observe.report.write import write_report
from tests.recorded_run import groups, metrics_line, response, write_run
from tests.unit.observe.report.pages_of import blocks_of, run_of


def noise(characters: int, seed: int) -> str:
    """Return text that does not compress well."""
    return random.Random(seed).randbytes(characters // 2).hex()


def test_fit_incompressible_items_stays_below_limit() -> None:
    items = [noise(400, seed) for seed in range(100)]
    block, count = fit(items, 5000)
    assert len(block) <= 5000
    assert 10 < count < 30
    assert decode(block) == items[:count]
    assert fit(items, 100) == (fit([], 100)[0], 0)


@pytest.mark.parametrize(("most", "chosen"), [(0, []), (1, [9]), (2, [0, 9]), (4, [0, 3, 6, 9]), (99, list(range(10)))])
def test_evenly_keeps_both_ends(most: int, chosen: list[int]) -> None:
    assert evenly(range(10), most) == chosen


def test_series_long_run_keeps_peaks_in_their_order() -> None:
    records = {step: {"a": 0.0, "b": 1.0 if step % 7 else None} for step in range(50_000)}
    records[1234]["a"], records[1236]["a"] = 9.0, -9.0
    series = series_of(records)
    assert len(series.steps) == 2 * MAX_BUCKETS
    assert series.steps == sorted(series.steps)
    peak = series.values["a"].index(9.0)
    assert series.values["a"][peak : peak + 2] == [9.0, -9.0]
    assert abs(series.steps[peak] - 1234) <= 50


def test_statistics_only_unanimous_groups_are_in_outer_bins() -> None:
    statistics = StepStatistics()
    for group, right in ((0, 0), (1, 1), (2, 99), (3, 100)):
        for sample in range(100):
            statistics.count(response(group, accuracy=float(sample < right), tokens=6))
    assert statistics.solve_rates() == [1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert max(statistics.lengths[1]) == 200


def test_report_many_long_responses_stays_in_budget(tmp_path: Path) -> None:
    """40 steps with 64 incompressible responses of 20,000 characters, 51 MB in total."""
    text = noise(20_000, 0)
    steps = {
        f"step_{n}": (response(i // 8, i % 8, response=text[i * 7 :] + text[: i * 7]) for i in range(64))
        for n in range(1, 41)
    }
    directory = write_run(tmp_path / "run", steps, steps=40)
    assert write_report([directory]).stat().st_size < MAX_BYTES
    pages = run_of(directory)["responses"]["pages"]
    assert all(page[3] >= 1 and page[4] == 64 for page in pages)


def test_report_sample_has_whole_groups_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.observe.report.sample.RESPONSE_BYTES", 20_000)
    records = groups(num_groups=64, samples=8)
    for record in records:
        record["response"] = noise(600, int(str(record["group"])) * 8 + int(str(record["sample"])))
    records[300]["error"] = "the grader raised"
    shown = blocks_of(write_run(tmp_path / "run", {"step_1": records}))["run0.responses0"]
    assert len(shown) < 512
    assert shown[0]["error"] == "the grader raised"
    sampled = [record["group"] for record in shown[1:]]
    assert len(set(sampled)) == pytest.approx(len(sampled) / 8, abs=1.1)


def test_report_response_of_10_mb_is_cut_in_the_middle(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", {"step_1": [response(response="a" + "x" * 10_000_000 + "z")]})
    (record,) = blocks_of(directory)["run0.responses0"]
    assert len(record["response"]) < 25_000
    assert record["response"][0] + record["response"][-1] == "az"
    assert "9980002 characters are left out" in record["response"]


def test_report_metrics_of_many_steps_stay_in_budget(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", {})
    values = {f"m{index}": index / 7 for index in range(120)}
    (directory / "metrics.jsonl").write_text("".join(metrics_line(step, **values) for step in range(3000)))
    assert write_report([directory]).stat().st_size < 4_000_000


def test_report_half_surrogate_pair_reaches_the_page(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", {})
    (directory / "rollouts" / "step_1.jsonl").write_text(
        json.dumps(response(response="\ud83d", accuracy=float("nan"))) + "\n"
    )
    assert blocks_of(directory)["run0.responses0"][0]["response"] == "\ud83d"
