"""Tools in separate processes: every call gets an answer for any behaviour of the tool."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError, WorkerDiedError
from mcore_rl.rollout.tools import toolbox
from mcore_rl.rollout.tools.interface import ClosedEpisode, ToolResult
from mcore_rl.rollout.tools.tool_server import _shortened
from mcore_rl.rollout.tools.toolbox import RESTARTED, ToolBox
from tests.unit.rollout.tools.made import FUNCTIONS, alive, answers_of, load, tools_file, with_tools


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with functions.py."""
    made = tmp_path_factory.mktemp("tools")
    (made / "functions.py").write_text(FUNCTIONS)
    return made


def test_toolbox_dead_process_is_reported_and_replaced(folder: Path) -> None:
    async def use(box: ToolBox) -> list[Any]:
        await box.call("other", "add", {"a": 1})
        died, beside = await asyncio.gather(box.call("e", "die", {}), box.call("other", "pause", {"seconds": 60}))
        after = [await box.call("e", "add", {"a": 1}) for _ in range(2)]
        return [died, beside, *after, await box.call("new", "add", {"a": 1}), await box.close_episode("other")]

    died, beside, first, second, new, closed = with_tools(tools_file(folder, "add", "pause", "die"), use)
    cause = "the tool process was lost: it ended with exit code 7"
    assert died == ToolResult(f"Error: {cause}", error=cause, seconds=died.seconds)
    assert beside.error == cause
    assert (first.text, second.text, new.text) == (f"{RESTARTED}2", "2", "2")
    assert closed.error == cause


def test_toolbox_spreads_episodes_over_processes(folder: Path) -> None:
    async def use(box: ToolBox) -> list[str]:
        return [(await box.call(f"e{i % 4}", "whereabouts", {})).text for i in range(8)]

    processes = with_tools(tools_file(folder, "whereabouts"), use, tool_processes=2)
    assert processes[:4] == processes[4:]
    assert [processes.count(each) for each in set(processes)] == [4, 4]
    assert {json.loads(each)["parent"] for each in processes} == {os.getpid()}


def test_toolbox_hanging_call_without_free_slot_replaces_process(folder: Path) -> None:
    """The function runs in a thread, which cannot be stopped; other calls continue."""
    spec = tools_file(folder, "add", "hang", timeout_seconds=1, max_running=1)
    waits = ("hang", {"seconds": 0.0})
    hung, beside, waiting, after = answers_of(spec, ("hang", {"seconds": 100.0}), ("add", {"a": 1}), waits, waits)
    assert hung.error == "the tool did not answer within 1 seconds"
    assert (beside.text, beside.error) == ("2", None)
    assert waiting.error == "the tool process was lost: 1 calls of hang did not return"  # it has not started
    assert (after.error, after.text) == (None, f"{RESTARTED}back")


def test_toolbox_blocked_loop_replaces_the_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolbox, "SILENT_SECONDS", 2.0)

    async def use(box: ToolBox) -> list[Any]:
        pid = box._processes[0].pid
        ticks = 0

        async def count() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.05)
                ticks += 1

        counting = asyncio.create_task(count())
        blocked = await box.call("e", "block", {"seconds": 60})
        counting.cancel()
        return [pid, ticks, blocked, await box.call("e", "add", {"a": 1})]

    pid, ticks, blocked, after = with_tools(tools_file(folder, "add", "block", timeout_seconds=0.2), use)
    assert "the tool process was lost: it has not answered for" in blocked.error
    assert ticks > 1  # the caller's loop continued meanwhile
    assert after.text == f"{RESTARTED}2"
    assert not alive(pid)


def test_toolbox_truncates_answers_as_configured(folder: Path) -> None:
    letters = "abcdefghij" * 10
    config = RolloutConfig(tool_answer_characters=21, tool_answer_keep="start")
    assert _shortened(letters, config) == "abcdefghijabcdefghija\n... (79 characters left out) ..."
    config = replace(config, tool_answer_keep="end")
    assert _shortened(letters, config) == "... (79 characters left out) ...\njabcdefghijabcdefghij"
    assert _shortened(letters, replace(config, tool_answer_characters=100)) == letters
    keys = {"tool_answer_characters": 21, "tool_answer_keep": "both"}
    (answer,) = answers_of(tools_file(folder, "letters"), ("letters", {"count": 100}), **keys)
    assert answer.text == "abcdefghija\n... (79 characters left out) ...\nabcdefghij"


def test_toolbox_function_runs_in_its_own_processes(folder: Path) -> None:
    async def use(box: ToolBox) -> list[Any]:
        here = await box.call("e", "whereabouts", {})
        deaths = await box.call("e", "die", {})
        return [box._processes[0].pid, here, deaths, await box.call("e", "whereabouts", {})]

    pid, here, died, after = with_tools(tools_file(folder, "whereabouts", "die", processes=1, retries=0), use)
    assert f'"parent": {pid}' in here.text
    assert died.error == "RetryableToolError: a process of the function died"
    assert f'"parent": {pid}' in after.text


def test_toolbox_cancelled_and_closed_calls_free_their_slots(folder: Path) -> None:
    async def use(box: ToolBox) -> list[ToolResult]:
        calls = [asyncio.create_task(box.call("e", "pause", {"seconds": 60})) for _ in range(2)]
        await box.call("e", "add", {"a": 1})  # both have started when this one returns
        for call in calls:
            call.cancel()
        assert (await asyncio.wait_for(box.call("e", "pause", {"seconds": 0.0}), 20)).error is None
        assert [await box.close_episode("e") for _ in range(2)] == [ClosedEpisode()] * 2
        call = asyncio.create_task(box.call("e", "pause", {"seconds": 60}))
        await box.call("f", "pause", {"seconds": 0.0})
        assert await box.close_episode("e") == ClosedEpisode()
        assert (await call).error == "the episode was closed before the tool answered"
        return await asyncio.gather(*(box.call(f"e{i % 10}", "pause", {"seconds": i % 9 / 400}) for i in range(100)))

    answers = with_tools(tools_file(folder, "add", "pause", max_running=2), use)
    assert {answer.error for answer in answers} == {None}
    assert {answer.text for answer in answers} == {"2"}  # the limit is reached and never exceeded


def test_toolbox_shutdown_leaves_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolbox, "CLOSE_SECONDS", 0.2)

    async def run() -> tuple[int, list[BaseException | ToolResult]]:
        box = await ToolBox.start(RolloutConfig(tools=tools_file(folder, "hang", "block")))
        calls = [asyncio.create_task(box.call("e", name, {"seconds": 60})) for name in ("hang", "block")]
        await asyncio.sleep(0.2)
        await box.shutdown()
        await box.shutdown()
        return box._processes[0].pid, await asyncio.gather(*calls, return_exceptions=True)

    pid, answers = asyncio.run(run())
    assert not alive(pid)
    assert [getattr(answer, "error", None) for answer in answers] == [
        "the tool process was lost: the tools are shut down"
    ] * 2


def test_toolbox_processes_end_with_their_parent(folder: Path) -> None:
    """The kernel kills them, and the processes that they started, however the parent ends."""
    code = (
        "import asyncio, os\n"
        "from mcore_rl.config.schema import RolloutConfig\n"
        "from mcore_rl.rollout.tools.toolbox import ToolBox\n"
        "async def main():\n"
        f"    box = await ToolBox.start(RolloutConfig(tools={tools_file(folder, 'whereabouts', processes=1)!r}))\n"
        "    print((await box.call('e', 'whereabouts', {})).text, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    found = json.loads(done.stdout)
    deadline = time.monotonic() + 60
    while any(alive(found[key]) for key in ("pid", "parent")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(found[key]) for key in ("pid", "parent"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def f(x):\n    pass\n", "f has no schema"),
        ("f = 3\n", "int is not a function with type hints"),
        ("f = []\n", "has no tools"),
        ("raise ValueError('early')\n", "does not import: ValueError: early"),
        ("class f:\n    schema = {}\n", "f is not a function"),
        ("class f:\n    def __init__(self):\n        raise OSError('no')\n", r"f\(\*\*config\) raised OSError: no"),
        ("def g():\n    '''G.'''\nf = [g, g]\n", "another tool has the name g; rename one"),
    ],
)
def test_toolbox_code_without_tools_is_rejected(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"^rollout.tools={tmp_path}/mine.py:f.*{told}"):
        load(f"{tmp_path}/mine.py:f")


NATIVE = """
from mcore_rl.rollout.tools.interface import ToolResult

class Count(ToolResult):
    pass

class Counter:
    def __init__(self, name, by):
        self.name, self.by = name, by
        self.schema = {"type": "function", "function": {"name": name}}

    async def call(self, episode, arguments):
        episode.state[self.name] = episode.state.get(self.name, 0) + self.by
        return Count(str(episode.state[self.name]), metrics={"bad": lambda: 0} if self.by > 5 else {})

    async def close_episode(self, episode):
        return episode.state.get(self.name)

    async def close(self):
        pass
"""


def test_toolbox_accepts_native_tool_classes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NATIVE)
    spec = tmp_path / "tools.yaml"
    configs = [{"name": "count", "by": 3}, {"name": "unsendable", "by": 7}]
    spec.write_text(yaml.safe_dump({"tools": [{"class_name": "mine.py:Counter", "config": each} for each in configs]}))

    async def use(box: ToolBox) -> list[Any]:
        counted = [(await box.call(episode, "count", {})).text for episode in ("e", "e", "f")]
        counted += [(await box.close_episode("e")).rewards, (await box.call("e", "count", {})).text]
        return [*counted, await box.call("e", "unsendable", {})]

    *counted, answer = with_tools(str(spec), use)
    assert counted == ["3", "6", "3", {"count": 6.0}, "3"]
    assert answer.text == "7"
    assert "the tool's metrics cannot be sent" in str(answer.error)


def test_toolbox_repeated_start_failures_end_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(box: ToolBox) -> list[str | None]:
        monkeypatch.setattr(sys, "executable", "/bin/false")  # from now on no Python can be started
        errors = []

        async def go_on() -> None:
            for _ in range(200):
                errors.append((await box.call("e", "die", {})).error)
                await asyncio.sleep(0.05)

        with pytest.raises(WorkerDiedError, match=r"rollout.tools: the tool process was lost: .* 3 times before"):
            await go_on()
        return errors

    assert None not in with_tools(tools_file(folder, "die"), use)


RAISING = """
import asyncio, sys

async def cancels() -> str:
    raise asyncio.CancelledError

async def cancels_its_task() -> str:
    asyncio.current_task().cancel()
    await asyncio.sleep(1)

def cancels_in_a_thread() -> str:
    raise asyncio.CancelledError

def fails() -> str:
    raise KeyError("no such thing")

def quits() -> str:
    sys.exit(3)

async def interrupts() -> str:
    raise KeyboardInterrupt

async def exits() -> str:
    raise GeneratorExit

def stops() -> str:
    raise StopIteration

async def leaves() -> str:
    raise SystemExit(3)

class Own(BaseException): ...

async def raises_its_own() -> str:
    raise Own("x")

async def fine() -> dict:
    return {"n": np.int64(3), "d": Decimal("0.5"), "x": float("nan"), "a": np.arange(2)}

class Episodes:
    schema = {"type": "function", "function": {"name": "episodes", "parameters": {"type": "object"}}}
    async def call(self, episode, arguments):
        return ToolResult("here")
    async def close_episode(self, episode):
        raise asyncio.CancelledError
    async def close(self): ...

import numpy as np
from decimal import Decimal
from mcore_rl.rollout.tools.interface import ToolResult
from verl.tools.function_tool import function_tool

def tool(function):
    name = function.__name__
    return function_tool(name, schema={"type": "function", "function": {"name": name}})(function)

TOOLS = [tool(f) for f in (cancels, cancels_its_task, cancels_in_a_thread, fails, quits, interrupts, exits, stops,
                           leaves, raises_its_own, fine)] + [Episodes]
"""


def test_toolbox_raising_function_fails_its_call_only(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text(RAISING)
    told = {
        "cancels": "the tool cancelled itself",
        "cancels_its_task": "the tool cancelled itself",
        "cancels_in_a_thread": "the tool cancelled itself",
        "fails": "KeyError: 'no such thing'",
        "quits": "the tool called sys.exit",
        "interrupts": "the tool raised KeyboardInterrupt",
        "exits": "the tool raised GeneratorExit",
        "stops": "RuntimeError: the function raised StopIteration",
        "leaves": "the tool called sys.exit",
        "raises_its_own": "the tool raised Own: x",
    }

    async def use(box: ToolBox) -> tuple[list[Any], Any, Any]:
        process = box._processes[0]
        assert [schema["function"]["name"] for schema in box.schemas] == [*told, "fine", "episodes"]
        answers = [await asyncio.wait_for(box.call("e", name, {}), 10) for name in told]
        assert (await box.call("e", "episodes", {})).text == "here"
        closed = await asyncio.wait_for(box.close_episode("e"), 10)
        fine = await box.call("f", "fine", {})
        assert box._processes == [process], "it was not replaced"
        return answers, closed, fine

    answers, closed, fine = with_tools(f"{tmp_path}/raising.py:TOOLS", use)
    assert [answer.error.partition(" (")[0] for answer in answers] == list(told.values())
    assert all(answer.text == f"Error: {answer.error}" for answer in answers)
    assert "episodes: the tool cancelled itself" in str(closed.error)
    assert (fine.text, fine.error) == ('{"n": 3, "d": 0.5, "x": null, "a": [0, 1]}', None)
