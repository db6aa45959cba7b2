"""Progress bar of conversions."""

from __future__ import annotations

import io
import sys

import pytest

from model_converters.progress import byte_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_prints_only_on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        monkeypatch.setattr(sys, "stderr", stream)
        with byte_progress("verify", 2 << 30, 1 << 30) as advance:
            advance(1 << 30)
    assert "verify" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
    assert "2.0/2.0 GiB" in terminal.getvalue()
    assert file.getvalue() == ""
