"""Answers of the tool process to results of users' tools, in one process: every call gets an answer."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.processes import frames
from mcore_rl.rollout.tools.interface import ToolResult
from mcore_rl.rollout.tools.limits import LimitedTool, ToolLimits
from mcore_rl.rollout.tools.tool_server import ToolServer
from tests.unit.rollout.tools.test_limits import FakeTool

HEADER_BYTES = 8
"""Length of a message, before it."""


class FakeWriter:
    """Collects the server's messages."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    def write(self, content: bytes) -> None:
        self.messages.put_nowait(pickle.loads(content[HEADER_BYTES:]))


def answer_to(result: Any) -> ToolResult:
    """Return the server's answer to a call whose tool returns `result`."""

    async def run() -> ToolResult:
        async def behave(call: int) -> Any:
            return result

        reader, writer = asyncio.StreamReader(), FakeWriter()
        tool = LimitedTool(FakeTool(behave), ToolLimits(5.0), print)
        serving = asyncio.create_task(ToolServer({"t": tool}, RolloutConfig(), writer).run(reader))  # type: ignore[arg-type]
        send = SimpleNamespace(write=reader.feed_data)
        frames.write(send, ("call", 1, "e", "t", {}, {}))  # type: ignore[arg-type]
        _, _, answer = await asyncio.wait_for(writer.messages.get(), 10)
        frames.write(send, "shutdown")  # type: ignore[arg-type]
        await serving
        assert isinstance(answer, ToolResult)
        return answer

    return asyncio.run(run())


def test_tool_server_result_of_another_class_needs_no_images() -> None:
    found = answer_to(SimpleNamespace(text="seen", reward=0.5, metrics={"n": 1}, error=None))
    assert found == ToolResult("seen", 0.5, {"n": 1})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("seen", "AttributeError: 'str' object has no attribute 'text'"),
        (SimpleNamespace(text=1, reward=None, metrics={}, error=None), "AttributeError: 'int' object"),
        (ToolResult("seen", reward=lambda: 1), "pickle"),  # type: ignore[arg-type]
    ],
)
def test_tool_server_invalid_result_is_an_error_of_the_tool(result: object, message: str) -> None:
    found = answer_to(result)
    assert found.text.startswith("Error: the tool's result is invalid: ")
    assert message in str(found.error)
