"""What every kind of tool is to the process that runs it, and what callers get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from mcore_rl.errors import McoreRLError
from mcore_rl.rollout.tools.schemas import Schema


class ToolError(McoreRLError):
    """A call failed in a way that the model is told as it stands, without the name of an exception."""


class RetryableToolError(Exception):
    """For tools to raise where the same call may succeed a moment later."""


@dataclass(frozen=True)
class Outcome:
    """What one call of a tool gave. `error`: what went wrong although there is a text."""

    text: str
    reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class ToolAnswer:
    """What a caller gets of a call, whatever happened: `text` is for the model, `error` is counted.

    Units: `seconds` from the call to the answer, waiting for the tool's limits included.
    """

    text: str
    reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


class AgentData(SimpleNamespace):
    """What verl's tools get as `agent_data`: of one episode, for their state across calls. `request_id` names the
    episode; the conversation is not here."""

    def __init__(self, request_id: str, tools_kwargs: Mapping[str, Any]) -> None:
        super().__init__(request_id=request_id, tools_kwargs=dict(tools_kwargs), extra_fields={}, metrics={})


@dataclass
class Episode:
    """An episode as the tools of one process know it, from its first call until it is closed. `state`: of each tool, by
    its name; `tools_kwargs`: extra_info.tools_kwargs of the row."""

    id: str
    tools_kwargs: Mapping[str, Any]
    agent_data: AgentData
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(cls, episode_id: str, tools_kwargs: Mapping[str, Any]) -> Episode:
        return cls(episode_id, tools_kwargs, AgentData(episode_id, tools_kwargs))

    def kwargs_of(self, tool: str, part: str) -> dict[str, Any]:
        """`part` of the row's keyword arguments for a tool, such as create_kwargs."""
        given = self.tools_kwargs.get(tool)
        kwargs = given.get(part) if isinstance(given, Mapping) else None
        return dict(kwargs) if isinstance(kwargs, Mapping) else {}


class Tool(Protocol):
    """A tool in its process, called from one asyncio loop, by several episodes at once.

    A user's class of this form is constructed with the keyword arguments under `config` in the YAML.
    """

    schema: Schema

    async def call(self, episode: Episode, arguments: dict[str, Any]) -> Outcome:
        """`arguments` fit the schema. May raise anything: the model is told, and it is counted."""

    async def close_episode(self, episode: Episode) -> float | None:
        """Releases what an episode holds; the tool's reward for the episode, if it has one."""

    async def close(self) -> None:
        """Releases everything, before the process ends."""
