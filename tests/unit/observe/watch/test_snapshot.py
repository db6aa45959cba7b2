"""State of a run, read from its files: finished, in progress, silent, stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from mcore_rl.observe.report.run_files import json_lines, read_run
from mcore_rl.observe.watch import snapshot as snapshots
from mcore_rl.observe.watch.heartbeat import SILENT_AFTER_SECONDS, Heartbeat, Renewal
from mcore_rl.observe.watch.responses import TAIL_BYTES, last_responses
from mcore_rl.observe.watch.snapshot import Snapshot, SnapshotReader
from tests.recorded_run import metrics_line, response, write_run

HOLDER = "process 17 on host n3"


def read(directory: Path, renewed: float | None = None) -> Snapshot:
    """Read a run whose holder has renewed its record at `renewed`; None: no process holds it."""
    renewal = None if renewed is None else (HOLDER, renewed)
    return SnapshotReader(directory, Heartbeat(lambda: renewal)).read()


def test_snapshot_has_finished_after_the_process_has_ended(tmp_path: Path) -> None:
    unfinished = write_run(tmp_path / "unfinished", steps=3)
    finished = write_run(tmp_path / "finished", steps=4)
    now = time.time()
    # (all steps done, process alive): a process that saves the model after the last step has not finished.
    assert not read(unfinished).has_finished
    assert not read(unfinished, now).has_finished
    assert not read(finished, now).has_finished
    assert read(finished).has_finished
    assert read(finished, now - 3600).has_finished


def test_snapshot_of_unknown_configuration_never_finishes(tmp_path: Path) -> None:
    snapshot = read(write_run(tmp_path / "run", config="trainer: ["))
    assert not snapshot.has_finished
    assert snapshot.seconds_left() is None
    assert any("config.yaml cannot be read" in alert.text for alert in snapshot.alerts)


def test_snapshot_time_left_uses_last_steps_and_elapsed_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = "trainer: {steps: 102}\n"
    directory = write_run(tmp_path / "run", config=config, rollouts={}, steps=0)
    # Step 0 validates for long, and the first 80 steps are slow; only the last 20 count.
    seconds = [500, *[90] * 80, *[10] * 20]
    lines = [metrics_line(step, time__step=each) for step, each in enumerate(seconds)]
    (directory / "metrics.jsonl").write_text("".join(lines))
    written = (directory / "metrics.jsonl").stat().st_mtime
    monkeypatch.setattr(snapshots.time, "time", lambda: written + 4)
    assert read(directory).seconds_left() == 20
    assert read(directory, written).seconds_left() == pytest.approx(16)
    # A step that takes longer than the others does not make the estimate negative.
    monkeypatch.setattr(snapshots.time, "time", lambda: written + 40)
    assert read(directory, written + 40).seconds_left() == 10


def test_heartbeat_trusts_only_its_own_clock_after_a_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    now, renewals = [1000.0], [(HOLDER, 0.0), (HOLDER, 0.0), (HOLDER, 10.0), (HOLDER, 10.0)]
    monkeypatch.setattr("mcore_rl.observe.watch.heartbeat.time.time", lambda: now[0])
    monkeypatch.setattr("mcore_rl.observe.watch.heartbeat.time.monotonic", lambda: now[0])
    heartbeat = Heartbeat(lambda: renewals.pop(0))
    silences = []
    for seconds in (0, 5, 5, SILENT_AFTER_SECONDS + 1):
        now[0] += seconds
        holder = heartbeat.holder()
        assert holder is not None
        silences.append(holder.silent_seconds)
    # The file server's clock is 1000 s late, which its first renewal shows.
    assert silences == [1000, 1005, 0, SILENT_AFTER_SECONDS + 1]


def test_heartbeat_without_holder_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    renewals: list[Renewal | None] = [None, ("a", time.time()), None, ("b", time.time() - 1000)]
    heartbeat = Heartbeat(lambda: renewals.pop(0))
    states = [heartbeat.holder() for _ in range(4)]
    assert [state and (state.description, state.is_alive) for state in states] == [
        None,
        ("a", True),
        None,
        ("b", False),
    ]


def test_reader_reads_again_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_run(tmp_path / "run")
    reads = []
    monkeypatch.setattr(snapshots, "read_run", lambda path: reads.append(path) or read_run(path))
    reader = SnapshotReader(directory, Heartbeat(lambda: None))
    for _ in range(4):
        assert reader.read().last_step == 3
    # Twice, since the newest rollout file is known after the first time.
    assert len(reads) == 2
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(metrics_line(4))
    assert reader.read().last_step == 4
    with (directory / "rollouts" / "step_3.jsonl").open("a") as file:
        file.write(json.dumps(response(response="new")) + "\n")
    assert reader.read().responses.records[-1]["response"] == "new"


@pytest.mark.parametrize(
    ("last_bytes", "values"), [(8, []), (9, [2]), (10, [2]), (17, [2]), (18, [1, 2]), (99, [1, 2])]
)
def test_json_lines_of_last_bytes_are_complete(tmp_path: Path, last_bytes: int, values: list[int]) -> None:
    path = tmp_path / "lines.jsonl"
    notes: list[str] = []
    # Two lines of 9 bytes.
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert [record["a"] for record in json_lines(path, notes, last_bytes=last_bytes)] == values
    assert notes == []


def test_last_responses_of_newest_file_that_has_some(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", {"step_1": [response(0)], "val_step_2": [response(n) for n in range(5)]})
    (directory / "rollouts" / "step_3.jsonl").write_text('{"response": "being wri')
    last = last_responses(read_run(directory))
    assert last.file is not None
    assert (last.file.step, last.file.is_validation) == (2, True)
    assert [record["group"] for record in last.records] == [2, 3, 4]


def test_last_responses_of_large_file_are_read_from_its_end(tmp_path: Path) -> None:
    large = "x" * (TAIL_BYTES // 3)
    directory = write_run(tmp_path / "run", {"step_1": [response(n, response=large) for n in range(6)]})
    run = read_run(directory)
    assert [record["group"] for record in last_responses(run).records] == [4, 5]
    assert run.notes == []


def test_last_responses_larger_than_the_limit_are_noted(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", {"step_1": [response(response="x" * TAIL_BYTES)]})
    run = read_run(directory)
    assert last_responses(run).records == []
    assert run.notes == [f"rollouts/step_1.jsonl: the last response is larger than {TAIL_BYTES:,} bytes"]
