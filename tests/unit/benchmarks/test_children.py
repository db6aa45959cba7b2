"""Child processes of benchmarks: their own errors arrive in the parent."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from benchmarks.children import ChildError, LineProgram, PipedChild


def answer(pipe: Connection, factor: int) -> None:
    while (number := pipe.recv()) is not None:
        if number < 0:
            raise ValueError(f"{number} is below 0")
        if number == 7:
            os._exit(3)
        pipe.send(factor * number)


@contextmanager
def child(target: Any, *arguments: Any) -> Iterator[PipedChild]:
    started = PipedChild(target, *arguments)
    try:
        yield started
    finally:
        started.end()
        assert not started._process.is_alive()


def test_child_that_sends_another_type_is_named() -> None:
    with child(answer, "ab") as started:
        started.send(2)
        with pytest.raises(ChildError, match="answer sent 'abab' instead of int"):
            started.recv(int)


def test_child_answers_until_it_raises_its_own_error() -> None:
    with child(answer, 3) as started:
        started.send(2)
        assert started.recv(int) == 6
        started.send(-1)
        with pytest.raises(ChildError) as raised:
            started.recv(int)
    assert str(raised.value).startswith("child process answer failed:\nTraceback")
    assert str(raised.value).splitlines()[-1] == "ValueError: -1 is below 0"


def test_child_that_ends_without_an_answer_brings_its_exit_code() -> None:
    with child(answer, 3) as started:
        started.send(7)
        with pytest.raises(ChildError, match="answer ended with exit code 3 before it answered"):
            started.recv(int)
        with pytest.raises(ChildError, match="answer ended with exit code 3"):
            started.send(2)


PROGRAM = """
import json, sys
print("loading")
print(json.dumps({"threads": 2}), flush=True)
for number, _ in enumerate(sys.stdin, 1):
    if number == 3:
        sys.exit("out of memory")
    print(json.dumps({"step": number / 2}), flush=True)
"""


def test_line_program_answers_requests_and_brings_its_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = LineProgram("the peer", [sys.executable, "-c", PROGRAM], tmp_path)
    try:
        assert program.answer() == {"threads": 2}
        assert capsys.readouterr().err == "loading\n"
        assert [program.ask(), program.ask()] == [{"step": 0.5}, {"step": 1.0}]
        for _ in range(2):  # it does not read any more
            with pytest.raises(ChildError, match="the peer ended with code 1:\nout of memory"):
                program.ask()
    finally:
        program.kill()
