"""Limits of a tool's calls, with a tool whose calls the test answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mcore_rl.rollout.tools import limits as module
from mcore_rl.rollout.tools.interface import EpisodeState, RetryableToolError, ToolError, ToolResult
from mcore_rl.rollout.tools.limits import LimitedTool, ToolLimits

SCHEMA = {
    "type": "function",
    "function": {"name": "t", "parameters": {"type": "object", "properties": {"i": {"type": "integer"}}}},
}
EPISODE = EpisodeState("e", {})


class FakeTool:
    """Executes `behave` with the number of the call."""

    schema = SCHEMA

    def __init__(self, behave: Callable[[int], Coroutine[Any, Any, ToolResult]]) -> None:
        self.behave, self.calls = behave, 0

    async def call(self, episode: EpisodeState, arguments: dict[str, Any]) -> ToolResult:
        self.calls += 1
        return await self.behave(self.calls)

    async def close_episode(self, episode: EpisodeState) -> float | None:
        return None

    async def close(self) -> None: ...


def limited(tool: FakeTool, stuck: list[str] | None = None, **limits: object) -> LimitedTool:
    return LimitedTool(
        tool, ToolLimits(**{"timeout_seconds": 5.0, **limits}), [].append if stuck is None else stuck.append
    )


async def done(call: int) -> ToolResult:
    return ToolResult("")


@pytest.mark.parametrize("error", [RetryableToolError("busy"), ConnectionResetError("gone"), TimeoutError("its own")])
def test_limited_tool_transient_errors_are_retried(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(module, "BACKOFF_SECONDS", 0.0)

    async def behave(call: int) -> ToolResult:
        if call <= 2:
            raise error
        return ToolResult("done")

    async def run(retries: int) -> tuple[ToolResult, int]:
        tool = FakeTool(behave)
        return await limited(tool, retries=retries).call(EPISODE, {}), tool.calls

    assert asyncio.run(run(2)) == (ToolResult("done"), 3)
    outcome, calls = asyncio.run(run(1))
    assert (calls, outcome.text.startswith("Error: "), outcome.error is not None) == (2, True, True)


@pytest.mark.parametrize(("error", "told"), [(ValueError("bad"), "ValueError: bad"), (ToolError("as told"), "as told")])
def test_limited_tool_other_errors_are_not_retried(error: Exception, told: str) -> None:
    async def behave(call: int) -> ToolResult:
        raise error

    tool = FakeTool(behave)
    outcome = asyncio.run(limited(tool, retries=5).call(EPISODE, {}))
    assert (outcome, tool.calls) == (ToolResult(f"Error: {told}", error=told), 1)


def test_limited_tool_invalid_arguments_are_not_passed() -> None:
    tool = FakeTool(done)
    outcome = asyncio.run(limited(tool).call(EPISODE, {"i": "x"}))
    assert (outcome.error, tool.calls) == ("argument i: 'x' is not of type 'integer'", 0)


def test_limited_tool_call_with_other_parameters_frees_its_slot() -> None:
    class Other(FakeTool):
        async def call(self, episode: EpisodeState) -> ToolResult:  # type: ignore[override]
            return ToolResult("")

    async def run() -> list[ToolResult]:
        held = limited(Other(done), max_running=1)
        return [await asyncio.wait_for(held.call(EPISODE, {}), 10) for _ in range(2)]

    assert all("TypeError" in str(outcome.error) for outcome in asyncio.run(run()))


def test_limited_tool_time_limit_excludes_waiting() -> None:
    async def behave(call: int) -> ToolResult:
        await asyncio.sleep(0.1)
        return ToolResult("done")

    async def run() -> list[ToolResult]:  # a busy machine may stop for a second
        held = limited(FakeTool(behave), max_running=1, timeout_seconds=2)
        return await asyncio.gather(*(held.call(EPISODE, {}) for _ in range(25)))

    assert {outcome.text for outcome in asyncio.run(run())} == {"done"}


def test_limited_tool_stuck_call_keeps_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.01)
    stuck: list[str] = []

    async def run() -> tuple[ToolResult, int, ToolResult]:
        free = asyncio.Event()

        async def behave(call: int) -> ToolResult:
            while not free.is_set():
                try:
                    await free.wait()
                except asyncio.CancelledError:
                    continue
            return ToolResult("late")

        tool = FakeTool(behave)
        held = limited(tool, stuck, max_running=1, timeout_seconds=0.01)
        first = await held.call(EPISODE, {})
        second = asyncio.create_task(held.call(EPISODE, {}))
        while not stuck:
            await asyncio.sleep(0.01)
        began = tool.calls
        free.set()
        return first, began, await second

    first, began, second = asyncio.run(run())
    assert first.error == "the tool did not answer within 0.01 seconds"
    assert (began, second.text, stuck) == (1, "late", ["1 calls of t did not return"])


def test_limited_tool_respects_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the loop's own clock, which the test advances."""
    starts: list[float] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        now = [100.0]
        monkeypatch.setattr(loop, "time", lambda: now[0])
        waits: list[float] = []

        async def sleep(seconds: float) -> None:
            waits.append(seconds)

        monkeypatch.setattr(module.asyncio, "sleep", sleep)
        held = limited(FakeTool(done), rate_per_second=4.0)
        for _ in range(3):
            await held._wait_for_rate()
        now[0] = 110.0
        await held._wait_for_rate()
        starts.extend(waits)

    asyncio.run(run())
    assert starts == [0.0, 0.25, 0.5, 0.0]


def test_limited_tool_cancelled_call_frees_its_slot() -> None:
    async def behave(call: int) -> ToolResult:
        if call == 1:
            await asyncio.sleep(60)
        return ToolResult("done")

    async def run() -> ToolResult:
        held = limited(FakeTool(behave), max_running=1, rate_per_second=1000.0)
        first = asyncio.create_task(held.call(EPISODE, {}))
        waiting = asyncio.create_task(held.call(EPISODE, {}))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.sleep(0.01)
        first.cancel()
        return await held.call(EPISODE, {})

    assert asyncio.run(run()).text == "done"
