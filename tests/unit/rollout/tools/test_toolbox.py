"""Tools in separate processes: every call gets an answer for any behaviour of the tool."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError, WorkerDiedError
from mcore_rl.rollout.tools import toolbox
from mcore_rl.rollout.tools.interface import ToolResult
from mcore_rl.rollout.tools.toolbox import RESTARTED, ToolBox, check_tools
from tests.unit.rollout.tools.made import alive, answers_of, functions_file, tools_file, with_tools


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with functions.py."""
    made = tmp_path_factory.mktemp("tools")
    functions_file(made)
    return made


def test_toolbox_list_of_functions_has_schemas(folder: Path) -> None:
    async def use(box: ToolBox) -> list[Any]:
        names = [schema["function"]["name"] for schema in box.schemas]
        calls = [
            ("add", {"a": 2}),
            ("add", {"a": 2, "b": 5}),
            ("whereabouts", {}),
            ("wrong", {}),
            ("quit_politely", {}),
        ]
        return [names, *(await asyncio.gather(*(box.call("e", name, arguments) for name, arguments in calls)))]

    names, three, seven, where, wrong, quit_ = with_tools(f"{folder}/functions.py:every", use)
    assert names[:3] == ["add", "pause", "whereabouts"]
    assert (three.text, seven.text) == ("3", "7")
    assert f'"parent": {os.getpid()}' in where.text  # the tool runs in a child process
    assert (wrong.text, wrong.error) == ("Error: KeyError: 'no such thing'", "KeyError: 'no such thing'")
    assert quit_.error == "the tool called sys.exit"


def test_toolbox_runs_a_thousand_concurrent_calls(folder: Path) -> None:
    async def use(box: ToolBox) -> list[ToolResult]:
        return await asyncio.gather(*(box.call(f"e{i % 100}", "pause", {"seconds": i % 9 / 40}) for i in range(1000)))

    answers = with_tools(tools_file(folder, "pause", max_running=100), use)
    assert {answer.error for answer in answers} == {None}
    assert max(int(answer.text) for answer in answers) == 100  # the limit is reached and never exceeded


def test_toolbox_transient_error_is_retried(folder: Path) -> None:
    (answer,) = answers_of(tools_file(folder, "flaky", retries=1), ("flaky", {"times": 1}))
    assert answer.text == "attempt 2"


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

    pids = with_tools(tools_file(folder, "whereabouts"), use, tool_processes=2)
    assert pids[:4] == pids[4:]
    assert [pids.count(pid) for pid in set(pids)] == [4, 4]


def test_toolbox_hanging_function_fails_its_call_only(folder: Path) -> None:
    """The function runs in a thread, which cannot be stopped; other calls continue."""
    spec = tools_file(folder, "add", "hang", timeout_seconds=0.2)
    hung, after = answers_of(spec, ("hang", {"seconds": 3.0}), ("add", {"a": 1}))
    assert hung.error == "the tool did not answer within 0.2 seconds"
    assert (after.text, after.error) == ("2", None)


def test_toolbox_stuck_slot_replaces_the_process(folder: Path) -> None:
    spec = tools_file(folder, "hang", timeout_seconds=0.3, max_running=1)
    hung, waiting, after = answers_of(spec, *(("hang", {"seconds": seconds}) for seconds in (100.0, 0.0, 0.0)))
    assert hung.error == "the tool did not answer within 0.3 seconds"
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
    def letters(characters: int, keep: str = "both") -> str:
        keys = {"tool_answer_characters": characters, "tool_answer_keep": keep}
        return answers_of(tools_file(folder, "letters"), ("letters", {"count": 100}), **keys)[0].text

    assert letters(21, "start") == "abcdefghijabcdefghija\n... (79 characters left out) ..."
    assert letters(21, "both") == "abcdefghija\n... (79 characters left out) ...\nabcdefghij"
    assert letters(21, "end") == "... (79 characters left out) ...\njabcdefghijabcdefghij"
    assert letters(100) == "abcdefghij" * 10


def test_toolbox_function_runs_in_its_own_processes(folder: Path) -> None:
    async def use(box: ToolBox) -> list[Any]:
        here = await box.call("e", "whereabouts", {})
        deaths = await box.call("e", "die", {})
        return [box._processes[0].pid, here, deaths, await box.call("e", "whereabouts", {})]

    pid, here, died, after = with_tools(tools_file(folder, "whereabouts", "die", processes=1, retries=0), use)
    assert f'"parent": {pid}' in here.text
    assert died.error == "RetryableToolError: a process of the function died"
    assert f'"parent": {pid}' in after.text


def test_toolbox_cancelled_call_ends(folder: Path) -> None:
    async def use(box: ToolBox) -> list[Any]:
        call = asyncio.create_task(box.call("e", "pause", {"seconds": 60}))
        await box.call("e", "pause", {"seconds": 0.0})  # the first call has started when this one returns
        call.cancel()
        after = await box.call("e", "pause", {"seconds": 0.0})  # one of the two slots, released by the cancelled call
        return [after, await box.close_episode("e"), await box.close_episode("e")]

    after, closed, again = with_tools(tools_file(folder, "pause", max_running=2), use)
    assert after.error is None
    assert (closed.error, closed.rewards, again.error) == (None, {}, None)


def test_toolbox_close_episode_answers_running_calls(folder: Path) -> None:
    async def use(box: ToolBox) -> tuple[ToolResult, str | None]:
        call = asyncio.create_task(box.call("e", "pause", {"seconds": 60}))
        await box.call("f", "pause", {"seconds": 0.0})
        closed = await box.close_episode("e")
        return await call, closed.error

    answer, error = with_tools(tools_file(folder, "pause"), use)
    assert (answer.error, error) == ("the episode was closed before the tool answered", None)


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
    deadline = time.monotonic() + 10
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
        check_tools(RolloutConfig(tools=f"{tmp_path}/mine.py:f"), SandboxConfig())


def test_toolbox_accepts_a_native_tool_class(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from mcore_rl.rollout.tools.interface import ToolResult\n"
        "class Count(ToolResult):\n"
        "    pass\n"
        "class Counter:\n"
        "    def __init__(self, by):\n"
        "        self.by = by\n"
        "        self.schema = {'type': 'function', 'function': {'name': 'count'}}\n"
        "    async def call(self, episode, arguments):\n"
        "        episode.state['n'] = episode.state.get('n', 0) + self.by\n"
        "        return Count(str(episode.state['n']), metrics={'bad': lambda: 0} if self.by > 5 else {})\n"
        "    async def close_episode(self, episode):\n"
        "        return float(episode.state['n'])\n"
        "    async def close(self):\n"
        "        pass\n"
    )
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: 'mine.py:Counter', config: {by: 3}}]")

    async def use(box: ToolBox) -> list[Any]:
        counted = [(await box.call(episode, "count", {})).text for episode in ("e", "e", "f")]
        return [*counted, (await box.close_episode("e")).rewards, (await box.call("e", "count", {})).text]

    assert with_tools(str(tmp_path / "tools.yaml"), use) == ["3", "6", "3", {"count": 6.0}, "3"]
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: 'mine.py:Counter', config: {by: 7}}]")
    (answer,) = answers_of(str(tmp_path / "tools.yaml"), ("count", {}))
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
import asyncio

async def cancels() -> str:
    raise asyncio.CancelledError

async def cancels_its_task() -> str:
    asyncio.current_task().cancel()
    await asyncio.sleep(1)

def cancels_in_a_thread() -> str:
    raise asyncio.CancelledError

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

def described(function):
    parameters = {"type": "object", "properties": {}}
    function.__doc__ = "Does it."
    return function

TOOLS = [described(f) for f in (cancels, cancels_its_task, cancels_in_a_thread, interrupts, exits, stops, leaves,
                                raises_its_own, fine)] + [Episodes]
"""


def test_toolbox_self_cancelling_tool_fails_its_call(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text(RAISING)
    told = {
        "cancels": "the tool cancelled itself",
        "cancels_its_task": "the tool cancelled itself",
        "cancels_in_a_thread": "the tool cancelled itself",
        "interrupts": "the tool raised KeyboardInterrupt",
        "exits": "the tool raised GeneratorExit",
        "stops": "RuntimeError: the function raised StopIteration",
        "leaves": "the tool called sys.exit",
        "raises_its_own": "the tool raised Own: x",
    }

    async def use(box: ToolBox) -> tuple[list[Any], Any, Any]:
        process = box._processes[0]
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
