"""Chat messages, tool calls and tool schemas in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, TypedDict, final

ToolSchema = Mapping[str, object]
"""Schema of a tool: {type: function, function: {name, description, parameters}}."""


@final
class TextPart(TypedDict):
    """Text in a message's content."""

    type: str
    text: str


@final
class ImagePart(TypedDict):
    """Image in the answer of a tool, or in a message of a program, as the encoded file."""

    type: str
    image: bytes


ContentPart = TextPart | ImagePart


class CalledFunction(TypedDict):
    """Name and arguments of a tool call."""

    name: str
    arguments: Mapping[str, object]


class ChatCall(TypedDict):
    """Tool call in a message of the assistant."""

    type: str
    function: CalledFunction
    id: NotRequired[str]


class ChatMessage(TypedDict):
    """Message of a conversation. Rows may have further fields, which templates may read."""

    role: str
    content: str | list[TextPart] | list[ContentPart]
    name: NotRequired[str]
    tool_calls: NotRequired[list[ChatCall]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    thinking: NotRequired[str]
    prefix: NotRequired[bool]


def tool_function(schema: ToolSchema) -> Mapping[str, object]:
    """Return the object `function` of a tool's schema."""
    # Schemas of rows are checked by RowTools, schemas of the run when its tools are loaded.
    function = schema["function"]
    assert isinstance(function, Mapping)
    return function


def tool_name(schema: ToolSchema) -> str:
    """Return the name of a tool."""
    return str(tool_function(schema)["name"])
