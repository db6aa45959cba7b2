"""Example tools of users, as files, and helpers to start them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil
import yaml

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.tools.interface import ToolResult
from mcore_rl.rollout.tools.limits import LimitedTool
from mcore_rl.rollout.tools.load import ToolSettings, load_tools
from mcore_rl.rollout.tools.toolbox import ToolBox

T = TypeVar("T")

FUNCTIONS = """
import asyncio, os, time

def add(a, b=1):
    return a + b

running = most = 0

async def pause(seconds):
    global running, most
    running += 1
    most = max(most, running)
    try:
        await asyncio.sleep(seconds)
    finally:
        running -= 1
    return str(most)

def whereabouts():
    return {"pid": os.getpid(), "parent": os.getppid()}

def hang(seconds):
    time.sleep(seconds)
    return "back"

async def block(seconds):
    time.sleep(seconds)

def die():
    os._exit(7)

def letters(count):
    return "abcdefghij" * (count // 10)
"""


def load(spec: str) -> dict[str, LimitedTool]:
    """Load the tools of rollout.tools=spec in this process, as a tool process does."""
    return asyncio.run(load_tools(ToolSettings(RolloutConfig(tools=spec), SandboxConfig()), print))


def with_tools(
    spec: str, use: Callable[[ToolBox], Awaitable[T]], sandbox: SandboxConfig | None = None, **keys: object
) -> T:
    """Return the result of `use` with the tools of rollout.tools=spec."""

    async def run() -> T:
        box = await ToolBox.start(RolloutConfig(tools=spec, **keys), sandbox)
        try:
            return await use(box)
        finally:
            await box.shutdown()

    return asyncio.run(run())


def answers_of(spec: str, *calls: tuple[str, dict[str, object]], **keys: object) -> list[ToolResult]:
    """Return the answers to calls of one episode, one after another, with the tools of rollout.tools=spec."""

    async def use(box: ToolBox) -> list[ToolResult]:
        return [await box.call("e", name, arguments) for name, arguments in calls]

    return with_tools(spec, use, **keys)


def tools_file(folder: Path, *names: str, **keys: object) -> str:
    """Write a YAML file with these functions of `folder`, each with `keys`. It contains schemas, so that a tool process
    need not load transformers to derive them."""
    entries = [
        {"function": f"functions.py:{name}", "tool_schema": _schema(name), **keys}  # in the folder of the file
        for name in names
    ]
    path = folder / f"{'_'.join((*names, *keys))}.yaml"
    path.write_text(yaml.safe_dump({"tools": entries}))
    return str(path)


def _schema(name: str) -> dict[str, object]:
    numbers = {"type": "object", "additionalProperties": {"type": "number"}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": numbers}}


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
