"""What a tool is called with: OpenAI schemas, derived from functions or checked, and arguments held to them."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from mcore_rl.config.functions import describe
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.formats import json_value

Schema = dict[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters": a JSON schema}}"""

JSON_TYPES = (int, float, str, bool, type(None), list, tuple, dict, Any)
NAME = r"[A-Za-z0-9_.-]{1,128}"
"""Of a tool: what every format of calls can hold, and no template breaks."""
MAX_PROBLEM_CHARACTERS = 300


def name_of(schema: Schema) -> str:
    return str(schema["function"]["name"])


def checked_schema(told: str, schema: Any) -> Schema:
    """`schema`, if it is an OpenAI schema of a function; `told` (file and key) starts the message.

    Raises: ConfigError.
    """
    from jsonschema.exceptions import SchemaError

    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConfigError(f"{told} must be {{type: function, function: {{name, description, parameters}}}}")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ConfigError(f"{told}: parameters of {function['name']} must be a JSON schema of type object")
    if re.fullmatch(NAME, function["name"]) is None:
        raise ConfigError(f"{told}: {function['name']!r} is no name for a tool; use letters, digits, _, - and .")
    try:
        _validator_class().check_schema(_without_nullable(parameters))
    except SchemaError as error:
        raise ConfigError(f"{told}: parameters of {function['name']} are no JSON schema: {error.message}") from None
    return {"type": "function", "function": {"description": "", **function, "parameters": parameters}}


def schema_of_function(told: str, function: Callable[..., Any]) -> Schema:
    """The schema of a plain function with type hints and a docstring that describes each argument, as transformers
    derives it, with defaults; what it would silently turn into an object of no shape is refused.

    Raises: ConfigError; `told` starts its message.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    name = getattr(function, "__name__", "the tool")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{told}: {name} takes {parameter}, which no schema can say; name its arguments")
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{told}: a type hint of {name} cannot be read: {describe(error)}") from error
    for argument, hint in hints.items():
        if argument != "return" and (refused := next(_shapeless(hint), None)) is not None:
            raise ConfigError(
                f"{told}: {name} takes {argument}: {getattr(refused, '__name__', refused)}, of which a model learns "
                "nothing; use str, int, float, bool, list, dict or Literal, or give a tool_schema"
            )
    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(
            f"{told}: {name} has no schema: {describe(error)}; write type hints and a docstring with a line for every "
            "argument under `Args:`, or give a tool_schema"
        ) from error
    schema["function"].pop("return", None)
    _add_defaults(function, schema["function"]["parameters"]["properties"])
    return checked_schema(told, schema)


def _shapeless(hint: Any) -> Iterator[Any]:
    """Types within a hint of which transformers makes {"type": "object"}, or something that is no JSON."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return
    if origin is None:
        if hint not in JSON_TYPES:  # a dataclass, an Enum, a TypedDict, bytes
            yield hint
        return
    if origin not in (list, tuple, dict, typing.Union, types.UnionType):
        yield hint
    for part in typing.get_args(hint):
        if part is not ...:
            yield from _shapeless(part)


def _add_defaults(function: Callable[..., Any], properties: dict[str, Any]) -> None:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in properties and parameter.default not in (parameter.empty, None):
            try:
                json.dumps(parameter.default)
            except (TypeError, ValueError):
                continue  # it stays the function's own
            properties[parameter.name]["default"] = parameter.default


class ArgumentChecker:
    """Holds arguments to the parameters of a schema."""

    def __init__(self, schema: Schema) -> None:
        from referencing import Registry

        parameters = _without_nullable(schema["function"]["parameters"])
        self._properties: dict[str, Any] = parameters.get("properties") or {}
        self._root = {key: value for key, value in parameters.items() if key in ("$defs", "definitions")}
        self._registry: Any = Registry()  # with nothing in it: a reference to elsewhere is never fetched
        self._validator = _validator_class()(parameters, registry=self._registry)
        closed = parameters.get("additionalProperties", False) is False and "patternProperties" not in parameters
        self._known = set(self._properties) if closed and "$ref" not in parameters else None

    def problem(self, arguments: dict[str, Any]) -> str | None:
        """What is wrong with `arguments`, on one line; None: nothing. An argument that the schema does not name is
        wrong unless it says otherwise."""
        from jsonschema.exceptions import best_match
        from referencing.exceptions import Unresolvable

        if self._known is not None and (unknown := [key for key in arguments if key not in self._known]):
            return f"there is no argument {unknown[0]!r}; the arguments are: {', '.join(self._properties) or 'none'}"
        try:
            error = best_match(self._validator.iter_errors(arguments))
        except Unresolvable as unresolvable:
            return f"its schema refers to {unresolvable.ref}, which is not there"
        if error is None:
            return None
        where = "".join(f".{part}" for part in error.absolute_path)
        text = f"argument {where[1:]}: {error.message}" if where else error.message
        return " ".join(text[:MAX_PROBLEM_CHARACTERS].split())

    def typed(self, texts: dict[str, Any]) -> dict[str, Any]:
        """Arguments of which only the texts are known: a text that is JSON of a type that the schema wants is read as
        that, every other one stays."""
        return {key: self._typed(self._properties.get(key), text) for key, text in texts.items()}

    def _typed(self, wanted: Any, text: str) -> Any:
        if not isinstance(wanted, dict) or wanted.get("type") == "string":
            return text
        stripped = text.strip()
        try:
            # Templates that print a value without tojson write Python's names.
            value = {"True": True, "False": False, "None": None}[stripped] if stripped in _PYTHON else json_value(text)
        except ValueError:
            return text
        fits = _validator_class()({**self._root, **wanted}, registry=self._registry).is_valid(value)
        return value if fits else text


_PYTHON = ("True", "False", "None")


def _validator_class() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator


def _without_nullable(schema: Any) -> Any:
    """OpenAPI's `nullable`, which transformers writes for optional arguments, in JSON schema's own words."""
    if isinstance(schema, list):
        return [_without_nullable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _without_nullable(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain
