"""verl's names for authors of tools: classes and decorators of ours with the same interface, so that a tool's file
imports unchanged where verl is not installed. config.stand_ins says under which names they are imported.

Source: the interface of verl.tools as of 2026.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, model_validator

F = TypeVar("F", bound=Callable[..., Any])
MARK = "__function_tool__"
"""Of a decorated function: its FunctionTold."""


@dataclass(frozen=True)
class FunctionTold:
    """What a decorator says of a tool; None: what the function itself says."""

    name: str | None
    schema: Any


class _Open(BaseModel):
    """Keys that it does not name are kept: JSON schemas have many."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Open):
    """One argument of a tool."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Open):
    """The arguments of a tool."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(_Open):
    """What a model is told of a tool."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(_Open):
    """The OpenAI schema of a tool."""

    type: str = "function"
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as it was written, with its arguments as JSON text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call with its arguments read."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """The call, without arguments where they are no JSON object, and whether that was so."""
        from mcore_rl.rollout.tools.formats import json_value

        try:
            arguments = json_value(parsed_schema.arguments)
        except ValueError:
            arguments = None
        wrong = not isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={} if wrong else arguments), wrong


class OpenAIFunctionToolCall(BaseModel):
    """A call of a message."""

    id: str
    type: str = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """What a tool answers."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, values: Any) -> Any:
        for key in ("image", "video"):
            if isinstance(values, dict) and not isinstance(values.get(key), list | None):
                raise ValueError(f"{key} of a ToolResponse must be a list, not {type(values[key]).__name__}")
        return values

    def is_empty(self) -> bool:
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """The base class of verl's tools."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no tool_schema, and get_openai_tool_schema gives none")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The schema; a class overrides it where its YAML gives none."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begins an instance; its id."""
        return (str(uuid4()) if instance_id is None else instance_id), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        """Answer, reward and metrics of a call."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of an instance."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends an instance."""


def rollout_trace_op(function: F) -> F:
    """verl's tracing decorator, which traces nothing here."""
    return function


def function_tool(named: Any = None, *, schema: Any = None) -> Any:
    """Decorates a function as a tool: `@function_tool`, `@function_tool("name")`, `@function_tool("name", schema=...)`.

    The function stays itself; rollout.tools=FILE.py finds those of a file by the mark that it gets.
    """
    if callable(named):
        return function_tool()(named)

    def mark(function: F) -> F:
        setattr(function, MARK, FunctionTold(named, schema))
        return function

    return mark
