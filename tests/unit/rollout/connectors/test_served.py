"""Commands of evaluation suites, as docs/agents.md has them, with the server of `mcore-rl serve`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.readme import ROOT
from tests.selection import needs_package
from tests.unit.rollout.connectors.test_suites import GENERATING
from tests.unit.rollout.gateway.scripted import ADMIN, ScriptedSessions, serving

pytestmark = pytest.mark.on_demand

SERVED = "http://127.0.0.1:8000"


@pytest.fixture
def server() -> Iterator[tuple[str, ScriptedSessions]]:
    sessions = ScriptedSessions()
    with serving(sessions, serves=True) as address:
        yield address, sessions


def documented(program: str, address: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and variables of the page's command."""
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if f" {program} " in line and SERVED in line)
    words = shlex.split(line.replace(SERVED, address).replace("...", ADMIN))
    begin = words.index(program)
    return words[begin + 1 :], dict(word.split("=", 1) for word in words[:begin])


def run(module: str, words: list[str], variables: dict[str, str]) -> str:
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1", **variables}
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_package("lm_eval", "scripts/setup_connectors.sh")
def test_lm_eval_evaluates_a_served_model(server: tuple[str, ScriptedSessions], tmp_path: Path) -> None:
    address, sessions = server
    (tmp_path / "test.jsonl").write_text('{"question": "2 + 3?", "answer": "5"}\n')
    (tmp_path / "words.yaml").write_text(GENERATING.replace("DATA", str(tmp_path / "test.jsonl")))
    words, variables = documented("lm_eval", address)
    words[words.index("gsm8k")] = "words"
    output = run("lm_eval", [*words, "--include_path", str(tmp_path)], variables)
    assert "exact_match" in output
    (request,) = sessions.requests
    assert request.messages == [{"role": "user", "content": "2 + 3?"}]
    assert request.sampling["stop"] == ("!",)


@needs_package("inspect_ai", "scripts/setup_connectors.sh")
def test_inspect_evaluates_a_served_model(server: tuple[str, ScriptedSessions], tmp_path: Path) -> None:
    address, sessions = server
    words, variables = documented("inspect", address)
    output = run("inspect_ai", [*words, "--display", "plain", "--log-dir", str(tmp_path)], variables)
    assert "accuracy" in output
    assert len(sessions.requests) == 20
