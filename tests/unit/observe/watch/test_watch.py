"""Command watch: frames, end of the run, and texts of models in a terminal."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from mcore_rl import cli
from mcore_rl.observe.watch.frame import frame
from mcore_rl.observe.watch.heartbeat import Heartbeat
from mcore_rl.observe.watch.live import watch
from mcore_rl.observe.watch.snapshot import SnapshotReader
from mcore_rl.preparation.run_dir import FILE_NAME, Holder, RunLock, holder_renewal
from tests.recorded_run import metrics_line, response, write_run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(directory: Path, *, width: int = 100, rows: int | None = None, alive: bool = False) -> str:
    """Return a frame as text."""
    renewal = ("process 17 on host n3", time.time()) if alive else None
    snapshot = SnapshotReader(directory, Heartbeat(lambda: renewal)).read()
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None)
    console.print(frame(snapshot, console, rows))
    return file.getvalue()


def test_frame_shows_state_metrics_phases_and_responses(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    lines = [metrics_line(step, time__rollout=0.25, time__update=0.75) for step in range(4)]
    (directory / "metrics.jsonl").write_text("".join(lines))
    text = shown(directory, alive=True)
    assert "running: process 17 on host n3" in text
    assert "step 3/4" in text
    assert "1.00 s per step" in text
    assert "left 0:0" in text
    words = [line.strip("│ ").split() for line in text.splitlines()]
    assert ["val/accuracy", "▁▃▆█", "0.6", "0", "0.6"] in words
    assert ["rollout", "0.25", "0.25"] in [each[:3] for each in words]
    assert ["group", "1", "sample", "3", "reward", "1", "accuracy", "1", "tokens", "13", "stop"] in words
    assert "answer 1.3" in text


@pytest.mark.parametrize("width", [1, 12, 20, 40, 80, 110, 200])
def test_frame_lines_fit_the_width(tmp_path: Path, width: int) -> None:
    directory = write_run(tmp_path / "run", {"step_1": [response(response="長い答え " * 500, error="e" * 1000)]})
    names = ("throughput__tokens_per_second", "response_tokens__clipped_fraction", "time__update")
    lines = [metrics_line(step, **dict.fromkeys(names, -1.2345e-99 * step)) for step in range(300)]
    (directory / "metrics.jsonl").write_text("".join(lines))
    assert {cell_len(line) for line in shown(directory, width=width).splitlines()} == {width}


def test_frame_of_20_columns_has_whole_numbers(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    lines = [metrics_line(step, actor__loss=-1.234e-5 * step, time__update=12.3456) for step in range(4)]
    (directory / "metrics.jsonl").write_text("".join(lines))
    words = " ".join(line.strip("│ ") for line in shown(directory, width=20).splitlines())
    for line in ("reward/mean 0.3", "val/accuracy 0.6", "actor/loss -3.702e-05", "update 12.35"):
        assert line in words


@pytest.mark.parametrize(("width", "rows"), [(80, 27), (80, 30), (80, 45), (160, 22), (120, 40)])
def test_frame_on_low_terminal_has_rows_of_every_part(tmp_path: Path, width: int, rows: int) -> None:
    directory = write_run(tmp_path / "run", {"step_3": [response(n, response="many words " * 100) for n in range(3)]})
    names = (
        "actor__loss",
        "actor__ppo_kl",
        "actor__clip_fraction",
        "actor__grad_norm",
        "time__update",
        "time__rollout",
    )
    lines = [metrics_line(step, **dict.fromkeys(names, 1.0), **{f"m{step}": None}) for step in range(1, 4)]
    (directory / "metrics.jsonl").write_text("".join(lines))
    frame_lines = shown(directory, width=width, rows=rows).splitlines()
    assert len(frame_lines) == rows
    text = "\n".join(frame_lines)
    parts = ("step 3/4", "reward/mean", "val/accuracy", "update", "not finite: m3", "group 2  sample 0", "many words")
    assert [part for part in parts if part not in text] == []


def test_frame_on_high_terminal_is_complete(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    assert shown(directory, rows=100) == shown(directory)


def test_frame_escapes_texts_of_models(tmp_path: Path) -> None:
    hostile = "\x1b[2J\x1b]0;x\x07[bold]b[/bold][/] \u202eright\r\nleft"
    record = response(prompt=hostile, response=hostile, finish_reason=hostile, error=hostile)
    text = shown(write_run(tmp_path / "run", {"step_1": [record]}), width=300)
    assert not set(text) & {"\x1b", "\x07", "\r", "\u202e"}
    assert text.count("U+001B[2JU+001B]0;xU+0007[bold]b[/bold][/] U+202Eright↵↵left") == 4


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"group": True, "reward": "x", "tokens": [1], "prompt": [{"role": "user"}], "response": None, "error": 3},
        {"reward": float("nan"), "accuracy": 10**400, "response": "x" * 10_000_000},
    ],
)
def test_frame_shows_records_of_other_forms(tmp_path: Path, record: dict[str, object]) -> None:
    directory = write_run(tmp_path / "run", {"step_1": [record | {"known": "yes"}]})
    assert len(shown(directory)) < 20_000


def test_frame_of_stopped_and_silent_runs_names_the_state(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=1)
    assert "not running, steps left: 3" in shown(directory)
    (directory / FILE_NAME).write_text(json.dumps(vars(Holder.this_process())))
    os.utime(directory / FILE_NAME, (time.time() - 600,) * 2)
    renewal = holder_renewal(directory)
    assert renewal is not None
    snapshot = SnapshotReader(directory, Heartbeat(lambda: renewal)).read()
    file = io.StringIO()
    console = Console(file=file, width=200)
    console.print(frame(snapshot, console))
    assert "no sign of life for 10:00: process" in file.getvalue()


def test_frame_limits_the_warnings(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=0)
    # Every step has one more metric that is not finite.
    lines = [metrics_line(step, **{f"m{step}": None}) for step in range(1, 21)]
    (directory / "metrics.jsonl").write_text("".join(lines))
    text = shown(directory)
    assert "step 20: not finite: m20" in text
    assert "step 14: " not in text
    assert "14 more are in the report" in text


def test_watch_ends_when_run_has_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    lock = RunLock(directory, lambda line: None, lambda line: None)
    lock.take()
    events = [lambda: None, lambda: (directory / "metrics.jsonl").open("a").write(metrics_line(4)), lock.release]
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert watch(directory, lambda: holder_renewal(directory), sleep=lambda _: events.pop(0)()) == 0
    assert events == []
    *_, rest = terminal.getvalue().partition("\x1b[?1049l")  # the alternate screen is left
    assert f"{directory}: finished" in rest
    assert "0.800 (step 4)" in rest


def test_watch_interrupt_exits_with_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    directory = write_run(tmp_path / "run")
    assert watch(directory, lambda: None, sleep=interrupt) == 0
    assert terminal.getvalue().endswith("\x1b[?25h\x1b[?1049l")  # the cursor and the screen are back


def test_watch_once_prints_one_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path / "run")
    assert cli.main(["watch", str(directory), "--once"]) == 0
    output = capsys.readouterr().out
    assert output.count("step 3/4") == 1
    assert "\x1b" not in output


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing", "is not a directory"), ("empty", "is no run"), ("run", "add --once")],
)
def test_watch_invalid_input_exits_with_2(
    tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "run")
    assert cli.main(["watch", str(tmp_path / name)]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_watch_without_utf8_replaces_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(file, encoding="ascii"))
    assert watch(write_run(tmp_path / "run"), lambda: None, once=True) == 0
    sys.stdout.flush()
    assert b"step 3/4" in file.getvalue()
