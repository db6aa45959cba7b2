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
from mcore_rl.rollout.tools.toolbox import ToolBox

T = TypeVar("T")

FUNCTIONS = '''
import asyncio, os, sys, threading, time

def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

async def pause(seconds: float) -> str:
    """Waits.

    Args:
        seconds: How long.
    """
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(seconds)
    running -= 1
    return str(most)

running = most = 0

def whereabouts() -> dict:
    """Tells where it runs."""
    return {"pid": os.getpid(), "parent": os.getppid()}

def hang(seconds: float) -> str:
    """Does not return for a while.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "back"

async def block(seconds: float) -> str:
    """Holds up the loop.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "back"

def die() -> str:
    """Ends the process."""
    os._exit(7)

def quit_politely() -> str:
    """Calls sys.exit."""
    sys.exit(3)

def busy(seconds: float) -> int:
    """Keeps a CPU busy.

    Args:
        seconds: How long.
    """
    end, n = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        n += 1
    return n

attempts = 0

def flaky(times: int) -> str:
    """Fails at first.

    Args:
        times: How often.
    """
    global attempts
    attempts += 1
    if attempts <= times:
        raise ConnectionResetError("try again")
    return f"attempt {attempts}"

def wrong() -> str:
    """Raises."""
    raise KeyError("no such thing")

def letters(count: int) -> str:
    """Gives many letters.

    Args:
        count: How many.
    """
    return "abcdefghij" * (count // 10)

every = [add, pause, whereabouts, hang, block, die, quit_politely, flaky, wrong, letters]
'''


def functions_file(folder: Path) -> Path:
    """Write functions.py into `folder`; each folder has a different module."""
    path = folder / "functions.py"
    path.write_text(FUNCTIONS)
    return path


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
