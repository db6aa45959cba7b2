"""Interface between tools and their process, and the answers that callers receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from mcore_rl.errors import McoreRLError
from mcore_rl.rollout.tools.schemas import Schema


class ToolError(McoreRLError):
    """Failure whose message is shown to the model as it is, without the name of an exception."""


class RetryableToolError(Exception):
    """Raised by tools if the same call may succeed a moment later."""


@dataclass(frozen=True)
class ToolResult:
    """Result of one call of a tool. `error`: a problem that occurred although there is a text."""

    text: str
    reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class ToolAnswer:
    """Answer to a caller, also after an error: `text` is for the model, `error` is counted.

    Units: `seconds` from the call to the answer, including waiting for the tool's limits.
    """

    text: str
    reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


class AgentData(SimpleNamespace):
    """Argument `agent_data` of verl's tools: state of one episode across calls. `request_id` identifies the episode;
    the conversation is not included."""

    def __init__(self, request_id: str, tools_kwargs: Mapping[str, Any]) -> None:
        super().__init__(request_id=request_id, tools_kwargs=dict(tools_kwargs), extra_fields={}, metrics={})


@dataclass
class EpisodeState:
    """An episode's state in a tool process, from its first call until it is closed. `state`: by tool name.
    `tools_kwargs`: extra_info.tools_kwargs of the row."""

    id: str
    tools_kwargs: Mapping[str, Any]
    agent_data: AgentData
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(cls, episode_id: str, tools_kwargs: Mapping[str, Any]) -> EpisodeState:
        return cls(episode_id, tools_kwargs, AgentData(episode_id, tools_kwargs))

    def kwargs_of(self, tool: str, part: str) -> dict[str, Any]:
        """Return `part` (such as create_kwargs) of the row's keyword arguments for a tool."""
        given = self.tools_kwargs.get(tool)
        kwargs = given.get(part) if isinstance(given, Mapping) else None
        return dict(kwargs) if isinstance(kwargs, Mapping) else {}


class Tool(Protocol):
    """Tool in its process. Several episodes call it concurrently, all from one asyncio loop.

    A user's class of this form is constructed with the keyword arguments in `config` of the YAML.
    """

    schema: Schema

    async def call(self, episode: EpisodeState, arguments: dict[str, Any]) -> ToolResult:
        """Execute a call; `arguments` match the schema. Any exception is reported to the model and counted."""

    async def close_episode(self, episode: EpisodeState) -> float | None:
        """Release an episode's resources; returns the tool's reward for the episode, if any."""

    async def close(self) -> None:
        """Release all resources before the process ends."""
