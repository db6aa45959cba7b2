"""Progress line of conversions."""

from __future__ import annotations

import io

import pytest

from model_converters.progress import ByteProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("done", "seconds", "line"),
    [
        (2 * 2**30, 2.0, "to-hf  50%  2.00 of 4.00 GiB  1.07 GB/s  0:02 left"),
        (2**20, 1.0, "to-hf   0%  0.00 of 4.00 GiB  0.00 GB/s  1:08:15 left"),
        (0, 1.0, "to-hf   0%  0.00 of 4.00 GiB  0.00 GB/s  ? left"),
    ],
)
def test_progress_line_shows_speed_and_remaining_time(done: int, seconds: float, line: str) -> None:
    progress = ByteProgress("to-hf", 4 * 2**30, stream=Terminal())
    progress.advance(done)
    assert progress.line(seconds) == line


def test_progress_resumed_bytes_do_not_count_for_speed() -> None:
    progress = ByteProgress("to-mcore", 4 * 10**9, 2 * 10**9, Terminal())
    progress.advance(10**9)
    assert progress.line(1.0) == "to-mcore  75%  2.79 of 3.73 GiB  1.00 GB/s  0:01 left"


def test_progress_prints_only_on_terminal() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with ByteProgress("verify", 100, stream=stream) as progress:
            progress.advance(50)
            progress.advance(50)
    assert terminal.getvalue().startswith("\rverify  50%")
    assert terminal.getvalue().split("\r")[-1].startswith("verify 100%")
    assert terminal.getvalue().count("\n") == 1
    assert file.getvalue() == ""
