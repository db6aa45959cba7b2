"""The live screen on a pseudo-terminal, driven by a sequence of events like a run's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TextIO

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.schema import Config
from mcore_rl.observe.screen.live import live_screen
from mcore_rl.runtime.stops import Stops
from tests.recorded_run import write_run

MARK = b"<end>"
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


class PseudoTerminal:
    """Terminal whose output is read by a thread into `text`. `stderr` writes to it."""

    stderr: TextIO

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        self.resize(120, 50)
        self._content = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self.slave)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this terminal stderr. Called by the test itself: pytest replaces the streams after its fixtures."""
        monkeypatch.setattr(sys, "stderr", self.stderr)
        monkeypatch.setattr(sys, "__stderr__", self.stderr)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        # EIO after the last descriptor of the slave is closed.
        with contextlib.suppress(OSError):
            while content := os.read(self._master, 1 << 16):
                self._content += content  # a new object: other threads read the old one
        os.close(self._master)

    @property
    def text(self) -> str:
        return self._content.decode(errors="replace")

    def wait_for(self, text: str) -> str:
        """Wait until frames show `text`; return everything without escape sequences. The deadline is for a screen that
        never shows it, not for a busy machine."""
        deadline = time.monotonic() + 120
        while text not in (shown := re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.text)):
            assert time.monotonic() < deadline, shown[-4000:]
            time.sleep(0.02)
        return shown

    def below(self) -> str:
        """Return the lines after the screen."""
        # Everything that was written before the mark has arrived with it.
        os.write(self.slave, MARK)
        self.wait_for(MARK.decode())
        self._content = self._content.replace(MARK, b"")
        return self.text.rpartition(LEAVE)[2].replace("\r\n", "\n")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[PseudoTerminal]:
    made = PseudoTerminal()
    # A descriptor of its own, because the screen redirects it.
    with os.fdopen(os.dup(made.slave), "w", buffering=1, encoding="utf-8") as stream:
        made.stderr = stream
        monkeypatch.setenv("TERM", "xterm-256color")
        yield made
        monkeypatch.undo()
    made.close()


def config_of(directory: Path, *overrides: str) -> Config:
    return load_config(directory / "config.yaml", [f"run.dir={directory}", *overrides], needs_data=False)


def test_screen_shows_stages_counts_lines_and_curves(
    tmp_path: Path, terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.use(monkeypatch)
    directory = write_run(tmp_path / "run")
    partial = directory / "checkpoints" / ".step_3.partial"
    partial.mkdir(parents=True)
    (partial / "__0_0.distcp").write_bytes(bytes(1_000_000))
    complete = directory / "checkpoints" / "step_2"
    complete.mkdir()
    (complete / "__0_0.distcp").write_bytes(bytes(4_000_000))
    stops = Stops()
    with live_screen(config_of(directory), stops.restoring) as board:
        assert board is not None
        print("[  1.0 s] starting Ray", file=sys.stderr)
        terminal.wait_for("[  1.0 s] starting Ray")
        with board.stage("rollout"), board.stage("engine_wake_up"):
            board.update("finished responses", 0, 64, "responses")
            time.sleep(0.05)
            board.update("finished responses", 16, 64, "responses")
            shown = terminal.wait_for("16 of 64 responses")
            assert re.search(r"rollout > engine_wake_up  for \d+:\d\d", shown)
            assert "left 0:0" in shown
            assert "1.0 MB of 4.0 MB" in shown
            assert "checkpoint of step 3" in shown
            assert "step 3/4" in shown
            assert "val/accuracy" in shown
        board.end("finished responses")
        # As signal handlers write.
        os.write(sys.stderr.fileno(), b"finishing step 4, then saving; a second signal stops at once\n")
        terminal.wait_for("finishing step 4, then saving")
    expected = "[  1.0 s] starting Ray\nfinishing step 4, then saving; a second signal stops at once\n"
    assert terminal.below() == expected
    assert terminal.text.count(ENTER) == terminal.text.count(LEAVE) == 1
    print("the summary", file=sys.stderr)
    assert terminal.below() == expected + "the summary\n"


def test_screen_stage_without_count_names_its_mean(
    tmp_path: Path, terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.use(monkeypatch)
    directory = write_run(tmp_path / "run")
    (directory / "metrics.jsonl").open("a").write('{"step": 4, "time/update": 1.5}\n')
    with live_screen(config_of(directory), Stops().restoring) as board:
        assert board is not None
        with board.stage("update"):
            shown = terminal.wait_for("(mean of the last steps 1.50 s)")
            assert re.search(r"update  for \d+:\d\d  \(mean", shown)
        with board.stage("export"):
            shown = terminal.wait_for("(no fraction is known)")
            assert re.search(r"export  for \d+:\d\d  \(no", shown)
        terminal.wait_for("waiting")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_screen_error_restores_terminal(
    tmp_path: Path, terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    terminal.use(monkeypatch)
    config = config_of(write_run(tmp_path / "run"))

    def fail() -> None:
        with live_screen(config, Stops().restoring):
            terminal.wait_for("step 3/4")
            print("a rank died", file=sys.stderr)
            raise error

    with pytest.raises(error):
        fail()
    print("error: see above", file=sys.stderr)
    assert terminal.below() == "a rank died\nerror: see above\n"
    assert "\x1b[?25h" in terminal.text  # the cursor is back


def test_screen_exit_without_unwinding_restores_terminal(
    tmp_path: Path, terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.use(monkeypatch)

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    stops = Stops()
    config = config_of(write_run(tmp_path / "run"))

    def give_up() -> None:
        with live_screen(config, stops.restoring):
            terminal.wait_for("step 3/4")
            stops.give_up("the cluster died")

    with pytest.raises(SystemExit) as ended:
        give_up()
    assert ended.value.code == 1
    terminal.below()
    # In this test the exit unwinds: the screen is left a second time, after the line.
    assert "error: the cluster died\r\n" in terminal.text.partition(LEAVE)[2]


def test_screen_of_removed_directory_continues_as_lines(
    tmp_path: Path, terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.use(monkeypatch)
    directory = write_run(tmp_path / "run")
    with live_screen(config_of(directory), Stops().restoring):
        terminal.wait_for("step 3/4")
        directory.rename(tmp_path / "moved")
        terminal.wait_for("warning: the live screen has ended")
        print("step 4/4", file=sys.stderr)
        assert terminal.below().endswith("step 4/4\n")
    assert terminal.text.count("step 4/4\r\n") == 1


@pytest.mark.parametrize("reason", ["plain", "dumb", "narrow", "low"])
def test_screen_is_not_shown_where_lines_are_better(
    tmp_path: Path, terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    terminal.use(monkeypatch)
    overrides = ["observe.plain=true"] if reason == "plain" else []
    if reason == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    if reason in ("narrow", "low"):
        terminal.resize(*{"narrow": (60, 50), "low": (120, 15)}[reason])
    with live_screen(config_of(write_run(tmp_path / "run"), *overrides), Stops().restoring) as board:
        assert board is None
        print("a line", file=sys.stderr)
    assert terminal.below() == "a line\n"
    assert "\x1b" not in terminal.text


def test_screen_resized_terminal_gets_frames_of_its_size(
    tmp_path: Path, terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.use(monkeypatch)
    with live_screen(config_of(write_run(tmp_path / "run")), Stops().restoring):
        terminal.wait_for("step 3/4")
        terminal.resize(90, 30)
        border = "╭─ now " + "─" * 82 + "╮"
        assert border not in terminal.text
        terminal.wait_for(border)


def test_screen_keeps_first_and_last_lines(
    tmp_path: Path, terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.use(monkeypatch)
    with live_screen(config_of(write_run(tmp_path / "run")), Stops().restoring):
        for number in range(1000):
            print(f"line {number}", file=sys.stderr)
    lines = terminal.below().splitlines()
    assert lines[:2] == ["line 0", "line 1"]
    assert "[... 880 lines ...]" in lines
    assert lines[-1] == "line 999"
