"""Interface between tools and their process, and conversion of users' return values to results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from types import SimpleNamespace
from typing import Protocol

from mcore_rl.data.chat.messages import answer_content
from mcore_rl.data.json_text import as_json_text
from mcore_rl.errors import McoreRLError
from mcore_rl.rollout.tools.images import encoded_images
from mcore_rl.rollout.tools.schemas import Schema
from mcore_rl.types.chat import ContentPart


class ToolError(McoreRLError):
    """Failure whose message is shown to the model as it is, without the name of an exception."""


class RetryableToolError(Exception):
    """Raised by tools if the same call may succeed a moment later."""


@dataclass(frozen=True)
class ToolResult:
    """Result of one call: `text` and `images` are for the model, `error` is counted; all may be present.

    images: encoded files, such as PNG; see rollout/tools/images.py for the limits.

    Units: `seconds` from the call to the answer, including waiting for the tool's limits; ToolBox sets them.
    """

    text: str
    reward: float | None = None
    metrics: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    images: tuple[bytes, ...] = ()

    @property
    def content(self) -> str | list[ContentPart]:
        """Content of the tool's message: the text, or the images followed by the text."""
        return answer_content(self.text, self.images)

    def rejected(self, reason: str) -> ToolResult:
        """Return a copy that describes an error to the model, for an image that cannot be used. The tool has run, so
        reward and metrics stay."""
        return replace(self, text=f"Error: {reason}", error=reason, images=())


@dataclass(frozen=True)
class ClosedEpisode:
    """Result of closing an episode: rewards by tool, and the errors of tools that could not close it."""

    rewards: dict[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass
class EpisodeState:
    """An episode's state in a tool process, from its first call until it is closed. `state`: by tool name.
    `tools_kwargs`: extra_info.tools_kwargs of the row."""

    id: str
    tools_kwargs: Mapping[str, object]
    state: dict[str, object] = field(default_factory=dict)
    agent_data: SimpleNamespace = field(init=False)
    """Argument of verl's tools: state of one episode across calls, without the conversation."""

    def __post_init__(self) -> None:
        self.agent_data = SimpleNamespace(
            request_id=self.id, tools_kwargs=dict(self.tools_kwargs), extra_fields={}, metrics={}
        )

    def kwargs_of(self, tool: str, part: str) -> dict[str, object]:
        """Return `part` (such as create_kwargs) of the row's keyword arguments for a tool."""
        given = self.tools_kwargs.get(tool)
        kwargs = given.get(part) if isinstance(given, Mapping) else None
        return dict(kwargs) if isinstance(kwargs, Mapping) else {}


class Tool(Protocol):
    """Tool in its process. Several episodes call it concurrently, all from one asyncio loop. By default, it has nothing
    to release.

    A user's class of this form is constructed with the keyword arguments in `config` of the YAML.
    """

    schema: Schema

    async def call(self, episode: EpisodeState, arguments: dict[str, object]) -> ToolResult:
        """Execute a call; `arguments` match the schema. Any exception is reported to the model and counted."""

    async def close_episode(self, episode: EpisodeState) -> float | None:
        """Release an episode's resources; returns the tool's reward for the episode, if any."""
        return None

    async def close(self) -> None:
        """Release all resources before the process ends."""
        return  # without a statement, mypy would require every tool to define it


def as_text(result: object) -> str:
    """Return text for the model: a string as it is, other values as JSON."""
    try:
        return as_json_text(result)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return str(result)
    except (ValueError, RecursionError):  # an integer with more than 4,300 digits, or deeply nested lists
        return f"the tool returned a {type(result).__name__} that is too large or too deeply nested to be shown"


def result_of(result: object) -> ToolResult:
    """Convert the return value of execute: a response, optionally with reward and metrics (either may be None).

    An image of another form, or one that is too large, makes it an error for the model.

    Raises: ToolError for videos; TypeError for a reward of another form.
    """
    parts = result if isinstance(result, tuple) and result else (result,)
    # Reward and metrics may be missing.
    response, reward, metrics = (*parts, None, None)[:3]
    if getattr(response, "video", None):
        raise ToolError("the tool returned videos, but only text and images are supported")
    text = response.text or "" if hasattr(response, "text") else "" if response is None else as_text(response)
    given = dict(metrics) if isinstance(metrics, Mapping) else {}
    answer = ToolResult(text, number_of(reward), given)
    try:
        return replace(answer, images=encoded_images(getattr(response, "image", None) or ()))
    except (TypeError, ValueError) as error:
        return answer.rejected(str(error))


def result_of_function(result: object) -> ToolResult:
    """Convert the return value of a function: a ToolResponse, optionally with reward and metrics, or any other
    value."""
    response = result[0] if isinstance(result, tuple) and result else result
    return result_of(result) if hasattr(response, "text") else ToolResult(as_text(result))


def number_of(value: object) -> float | None:
    if value is None:
        return None
    # NumPy scalars and tensors with one element.
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, Real) or not math.isfinite(number):
        raise TypeError(f"the reward is {number!r} instead of a finite number or None")
    return float(number)
