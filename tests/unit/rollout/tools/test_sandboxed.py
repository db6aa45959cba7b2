"""Interpreter and shell as tools: state per episode, time limits, cleanup."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.interface import ToolResult
from mcore_rl.rollout.tools.toolbox import ToolBox
from mcore_rl.sandbox.check import check_local
from tests.unit.rollout.tools.made import with_tools

YAML = Path(__file__).parents[4] / "configs" / "tools" / "sandbox.yaml"
ONE_SECOND = SandboxConfig(seconds=1.0)


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> None:
    try:
        check_local(SandboxConfig())
    except ConfigError as error:
        pytest.skip(str(error))


def test_sandboxed_tools_are_separate_per_episode() -> None:
    async def play(box: ToolBox) -> list[str]:
        assert [schema["function"]["name"] for schema in box.schemas] == ["python", "shell"]
        await asyncio.gather(*(box.call(name, "python", {"code": f"x = {len(name)}"}) for name in ("a", "bb")))
        answers = [await box.call(name, "python", {"code": "x * 2"}) for name in ("a", "bb")]
        answers.append(await box.call("a", "shell", {"command": "cd /tmp; y=5"}))
        answers.append(await box.call("a", "shell", {"command": "echo $PWD $y"}))
        answers.append(await box.call("a", "python", {"code": "open('/root/.bashrc')"}))
        assert [answer.error for answer in answers[:4]] == [None] * 4
        assert answers[4].error is not None
        for name in ("a", "bb"):
            await box.close_episode(name)
        return [answer.text.strip() for answer in answers]

    texts = with_tools(str(YAML), play, ONE_SECOND)
    assert texts[:4] == ["2", "4", "(no output)", "/tmp 5"]
    assert "FileNotFoundError" in texts[4] or "PermissionError" in texts[4]


def test_sandboxed_endless_code_restarts_and_close_leaves_nothing() -> None:
    async def play(box: ToolBox) -> list[ToolResult]:
        codes = ("x = 1", "while True: pass", "'x' in dir()")
        answers = [await box.call("a", "python", {"code": code}) for code in codes]
        assert _confined() > 0
        await box.close_episode("a")
        for _ in range(100):
            if not _confined():
                break
            await asyncio.sleep(0.05)
        assert _confined() == 0
        return answers

    _, stuck, after = with_tools(str(YAML), play, ONE_SECOND)
    assert stuck.error == "python: timeout"
    assert "The python has ended (timeout); the next call starts a new one" in stuck.text
    assert after.text.strip() == "False"


def _confined() -> int:
    found = 0
    for process in psutil.Process().children(recursive=True):
        try:
            found += process.name() in ("bwrap", "prlimit") or "/usr/bin/python3" in process.cmdline()
        except psutil.Error:
            continue
    return found
