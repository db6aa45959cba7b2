"""`mcore-rl chat` with a served model."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl import cli
from mcore_rl.rollout.gateway.exchange import RefusedError
from mcore_rl.rollout.gateway.wire import FILE
from mcore_rl.serving import TOKEN
from tests.unit.rollout.gateway.scripted import ADMIN, ScriptedSessions, serving

REPLY = "Good day — to you!"


@pytest.fixture
def sessions() -> ScriptedSessions:
    return ScriptedSessions()


@pytest.fixture
def chat(sessions: ScriptedSessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that enters lines in a conversation with the served model and returns the exit code."""

    def run(*lines: str, token: str = ADMIN, options: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        with serving(sessions, serves=True) as url:
            (tmp_path / FILE).write_text(json.dumps([{"url": url, "token": token}]))
            return cli.main(["chat", str(tmp_path), *options])

    return run


def test_chat_sends_the_conversation_until_an_empty_line(
    chat: Callable[..., int], sessions: ScriptedSessions, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--system", "Be brief.", "--max-tokens", "7")
    assert chat("hello", "and now?", "", "again", "/quit", "unread", options=options) == 0
    contents = [[message["content"] for message in request.messages] for request in sessions.requests]
    assert contents == [
        ["Be brief.", "hello"],
        ["Be brief.", "hello", REPLY, "and now?"],
        ["Be brief.", "again"],
    ]
    assert {request.sampling["max_response_tokens"] for request in sessions.requests} == {7}
    output = capsys.readouterr()
    assert output.out == f"{REPLY}\n" * 3
    assert output.err == "tiny; an empty line starts anew, /quit ends\n"


def test_chat_goes_on_after_a_refused_line(
    chat: Callable[..., int], sessions: ScriptedSessions, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions.refusal = RefusedError(400, "no room", "context_length_exceeded")
    assert chat("long", "longer") == 0
    assert capsys.readouterr().err.count("error: ") == 2
    assert [len(request.messages) for request in sessions.requests] == [1, 1]


def test_chat_with_a_wrong_key_or_without_a_server_is_refused(
    chat: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat("hello", token="wrong") == 2
    assert "start `mcore-rl serve` first" in capsys.readouterr().err
    assert cli.main(["chat", str(tmp_path / "absent")]) == 2
    assert "gateways.json does not exist: nothing serves" in capsys.readouterr().err
    monkeypatch.delenv(TOKEN, raising=False)
    assert cli.main(["chat", "http://127.0.0.1:9/v1"]) == 2
    assert f"set the environment variable {TOKEN}" in capsys.readouterr().err
