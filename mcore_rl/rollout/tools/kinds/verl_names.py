"""Stand-ins for verl's tool classes and decorators, with the same interface, so that tool files can be imported without
verl. config.stand_ins defines the names under which they are imported.

Source: the interface of verl.tools as of 2026.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, model_validator

F = TypeVar("F", bound=Callable[..., object])
MARK_ATTRIBUTE = "__function_tool__"
"""Attribute of a decorated function that holds its FunctionMark."""


@dataclass(frozen=True)
class FunctionMark:
    """Arguments of the decorator `function_tool`; None: derived from the function."""

    name: str | None
    schema: object


class _Open(BaseModel):
    """Model that keeps unknown keys, since JSON schemas have many."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Open):
    """Schema of one argument of a tool."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[object] | None = None


class OpenAIFunctionParametersSchema(_Open):
    """Schema of all arguments of a tool."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(_Open):
    """Description of a tool for the model."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(_Open):
    """OpenAI schema of a tool."""

    type: str = "function"
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """Call as the model wrote it, with its arguments as JSON text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """Call with parsed arguments."""

    name: str
    arguments: dict[str, object]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Return the call, with empty arguments if they are not a JSON object, and whether they were invalid."""
        from mcore_rl.rollout.tools.strict_json import json_value

        try:
            arguments = json_value(parsed_schema.arguments)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={}), True
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=arguments), False


class OpenAIFunctionToolCall(BaseModel):
    """Call in a message."""

    id: str
    type: str = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """Response of a tool."""

    text: str | None = None
    image: list[object] | None = None
    video: list[object] | None = None

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, values: object) -> object:
        for key in ("image", "video"):
            if isinstance(values, dict) and not isinstance(values.get(key), list | None):
                raise ValueError(f"{key} of a ToolResponse must be a list, not {type(values[key]).__name__}")
        return values

    def is_empty(self) -> bool:
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """Base class of verl's tools."""

    tool_schema: OpenAIFunctionToolSchema | None = None

    def __init__(self, config: dict[str, object], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no tool_schema, and get_openai_tool_schema gives none")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """Return the schema. A subclass overrides this method if its YAML contains no schema."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: object) -> tuple[str, ToolResponse]:
        """Create an instance and return its id."""
        return (str(uuid4()) if instance_id is None else instance_id), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, object], **kwargs: object
    ) -> tuple[ToolResponse, float | None, dict[str, object] | None]:
        """Return response, reward and metrics of a call."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
        """Return the reward of an instance."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: object) -> None:
        """Release an instance."""


def rollout_trace_op(function: F) -> F:
    """Replacement of verl's tracing decorator; it does nothing."""
    return function


def function_tool(named: Any = None, *, schema: Any = None) -> Any:
    """Decorate a function as a tool: `@function_tool`, `@function_tool("name")`, `@function_tool("name", schema=...)`.

    The function is unchanged except for a mark, by which rollout.tools=FILE.py finds it.
    """
    if callable(named):
        return function_tool()(named)

    def mark(function: F) -> F:
        # A mark instead of a wrapper: other code of the file can still call the function.
        setattr(function, MARK_ATTRIBUTE, FunctionMark(named, schema))
        return function

    return mark
