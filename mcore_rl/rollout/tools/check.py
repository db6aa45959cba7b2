"""Tries the tools of a run before anything else starts, so that a mistake costs seconds and not a run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.tools.schemas import Schema
from mcore_rl.rollout.tools.toolbox import ToolBox


def check_tools(rollout: RolloutConfig, sandbox: SandboxConfig) -> list[Schema]:
    """Load every tool in a tool process, as the run does, and return their schemas; empty if rollout.tools is null.

    Raises: ConfigError naming rollout.tools, its file and key, and the cause.
    """
    if rollout.tools is None:
        return []
    return asyncio.run(_schemas(replace(rollout, tool_processes=1), sandbox))


async def _schemas(rollout: RolloutConfig, sandbox: SandboxConfig) -> list[Schema]:
    box = await ToolBox.start(rollout, sandbox)
    await box.shutdown()
    return box.schemas
