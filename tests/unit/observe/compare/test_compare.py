"""Command compare: sides, differing keys, and metrics at the last common step."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl import cli
from mcore_rl.observe.compare.metric_comparison import compare_metrics, last_common_step
from mcore_rl.observe.compare.sides import read_sides
from tests.recorded_run import CONFIG, metrics_line, write_run


def write_seed(directory: Path, seed: int, *, lr: str = "1e-6", accuracies: tuple[float, ...] = (0.1, 0.3)) -> Path:
    """Write a run with its own run.dir, and a validation accuracy per step."""
    config = CONFIG.replace("dir: runs/x", f"dir: {directory}, seed: {seed}")
    write_run(directory, rollouts={}, config=config + f"actor: {{optimizer: {{lr: {lr}}}}}\n")
    lines = (metrics_line(step, val__accuracy=value) for step, value in enumerate(accuracies))
    (directory / "metrics.jsonl").write_text("".join(lines))
    return directory


def output(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *runs: Path) -> list[list[str]]:
    """Run the command on a wide screen. Returns the words of each line."""
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main(["compare", *map(str, runs)]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_sides_join_runs_that_differ_only_in_the_seed(tmp_path: Path) -> None:
    a1, b1 = write_seed(tmp_path / "a1", 1), write_seed(tmp_path / "b1", 1, lr="2e-6")
    a2, b2 = write_seed(tmp_path / "a2", 2), write_seed(tmp_path / "b2", 2, lr="2e-6")
    again = write_seed(tmp_path / "again", 1)
    sides = read_sides([a1, b1, a2, b2, again])
    # A repetition with the same seed is no independent run.
    assert [[run.directory.name for run in side.runs] for side in sides] == [["a1", "a2"], ["b1", "b2"], ["again"]]


def test_sides_of_one_experiment_are_its_runs(tmp_path: Path) -> None:
    runs = [write_seed(tmp_path / str(seed), seed) for seed in (1, 2, 3)]
    assert [len(side.runs) for side in read_sides(runs)] == [1, 1, 1]


def test_sides_without_configuration_are_single_runs(tmp_path: Path) -> None:
    runs = [write_seed(tmp_path / str(seed), seed) for seed in (1, 2, 3)]
    for run in runs[:2]:
        (run / "config.yaml").unlink()
    assert [len(side.runs) for side in read_sides(runs)] == [1, 1, 1]


def test_rows_compare_at_last_common_step(tmp_path: Path) -> None:
    short = write_seed(tmp_path / "short", 1, accuracies=(0.2, 0.5, 0.4))
    long = write_seed(tmp_path / "long", 1, lr="2e-6", accuracies=(0.1, 0.3, 0.35, 0.9))
    sides = read_sides([short, long])
    assert last_common_step(sides) == 2
    rows = {row.name: row for row in compare_metrics(sides, 2)}
    # The accuracy 0.9 of a later step does not count.
    best = rows["best val/accuracy"]
    assert [side and side.values for side in best.sides] == [[0.5], [0.35]]
    assert best.difference(1) == pytest.approx(-0.15)
    assert best.significance(1) is None
    assert rows["val/accuracy"].difference(1) == pytest.approx(-0.05)
    assert "actor/loss" not in rows


def test_rows_metric_that_one_run_lacks_has_no_mean(tmp_path: Path) -> None:
    runs = [write_seed(tmp_path / str(seed), seed) for seed in (1, 2)]
    runs.append(write_seed(tmp_path / "other", 1, lr="2e-6"))
    (runs[1] / "metrics.jsonl").write_text(metrics_line(0) + metrics_line(1, val__accuracy=None))
    rows = {row.name: row for row in compare_metrics(read_sides(runs), 1)}
    assert rows["val/accuracy"].sides[0] is None
    assert rows["val/accuracy"].difference(1) is None
    assert rows["reward/mean"].difference(1) == 0


def test_compare_prints_means_deviations_and_significance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    low = [write_seed(tmp_path / f"a{seed}", seed, accuracies=(0, 0.1 * seed)) for seed in (1, 2, 3)]
    high = [write_seed(tmp_path / f"b{seed}", seed, lr="2e-6", accuracies=(0, 0.4 + 0.1 * seed)) for seed in (1, 2, 3)]
    lines = output(capsys, monkeypatch, *low, *high)
    assert ["actor.optimizer.lr", "1e-6", "2e-6"] in lines
    assert not [line for line in lines if line[:1] in (["run.dir"], ["run.seed"])]
    # The difference 0.4 is the largest of 20 splits in both directions.
    best = ["best", "val/accuracy", "0.2", "±", "0.1", "0.6", "±", "0.1", "+0.4", "0.1", "(0.1)"]
    assert best in lines
    assert any(line[:3] == ["p:", "exact", "two-sided"] for line in lines)


def test_compare_single_runs_prints_no_significance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = output(capsys, monkeypatch, write_seed(tmp_path / "a", 1), write_seed(tmp_path / "b", 2))
    assert ["A", str(tmp_path / "a"), "1", "1"] in lines
    assert ["B", str(tmp_path / "b"), "2", "1"] in lines
    assert ["configuration:", "no", "key", "differs,"] in [line[:4] for line in lines]
    assert ["best", "val/accuracy", "0.3", "0.3", "+0"] in lines
    assert not any(line[:1] == ["p:"] for line in lines)


def test_compare_runs_without_common_step_prints_configurations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = write_seed(tmp_path / "a", 1), write_seed(tmp_path / "b", 1, lr="2e-6")
    (two / "metrics.jsonl").unlink()
    lines = output(capsys, monkeypatch, one, two)
    assert ["actor.optimizer.lr", "1e-6", "2e-6"] in lines
    assert "metrics: no step has been finished by all runs".split() in lines


def test_compare_escapes_values_of_configurations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = write_seed(tmp_path / "a", 1), write_seed(tmp_path / "b", 1)
    with (two / "config.yaml").open("a") as file:
        file.write('reward: {function: "\\e[2J[bold]x[/]"}\n')
    assert ["reward.function", "-", "U+001B[2J[bold]x[/]"] in output(capsys, monkeypatch, one, two)


@pytest.mark.parametrize(("name", "message"), [("missing", "is not a directory"), ("./a", "is named twice")])
def test_compare_invalid_runs_exit_with_2(
    tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_seed(tmp_path / "a", 1)
    assert cli.main(["compare", str(run), f"{tmp_path}/{name}"]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_compare_needs_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["compare", str(tmp_path)])
    assert caught.value.code == 2
    assert "B" in capsys.readouterr().err
