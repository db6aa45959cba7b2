"""OpenAI schemas of tools, derived from functions or checked, and validation of arguments against them."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mcore_rl.config.functions import describe
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.strict_json import json_value

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

Schema = dict[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters": a JSON schema}}"""

JSON_TYPES = (int, float, str, bool, type(None), list, tuple, dict, Any)
NAME = r"[A-Za-z0-9_.-]{1,128}"
"""Allowed tool names: supported by every call format and chat template."""
MAX_PROBLEM_CHARACTERS = 300
"""Maximum length of a problem: jsonschema quotes the whole value, which the model would have to read again."""


def name_of(schema: Schema) -> str:
    return str(schema["function"]["name"])


def checked_schema(origin: str, schema: object) -> Schema:
    """Check that `schema` is an OpenAI function schema and return it normalized; `origin` (file and key) starts error
    messages.

    Raises: ConfigError.
    """
    from jsonschema.exceptions import SchemaError

    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConfigError(f"{origin} must be {{type: function, function: {{name, description, parameters}}}}")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ConfigError(f"{origin}: parameters of {function['name']} must be a JSON schema of type object")
    if re.fullmatch(NAME, function["name"]) is None:
        raise ConfigError(f"{origin}: {function['name']!r} is not a valid tool name; use letters, digits, _, - and .")
    try:
        _validator_class().check_schema(_without_nullable(parameters))
    except SchemaError as error:
        raise ConfigError(
            f"{origin}: parameters of {function['name']} are not a JSON schema: {error.message}"
        ) from None
    return {"type": "function", "function": {"description": "", **function, "parameters": parameters}}


def schema_of_function(origin: str, function: Callable[..., object]) -> Schema:
    """Derive the schema of a function with type hints and a docstring that describes each argument, using transformers,
    and add defaults. Types that transformers would silently turn into an untyped object are rejected.

    Raises: ConfigError; `origin` starts its message.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    name = getattr(function, "__name__", "the tool")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{origin}: {name} takes {parameter}, which no schema can express; name its arguments")
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{origin}: a type hint of {name} cannot be read: {describe(error)}") from error
    for argument, hint in hints.items():
        if argument != "return" and (refused := next(_shapeless(hint), None)) is not None:
            raise ConfigError(
                f"{origin}: {name} takes {argument}: {getattr(refused, '__name__', refused)}, which the schema cannot "
                "describe; use str, int, float, bool, list, dict or Literal, or give a tool_schema"
            )
    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(
            f"{origin}: {name} has no schema: {describe(error)}; write type hints and a docstring with a line per "
            "argument under `Args:`, or give a tool_schema"
        ) from error
    schema["function"].pop("return", None)
    _add_defaults(function, schema["function"]["parameters"]["properties"])
    return checked_schema(origin, schema)


def _shapeless(hint: object) -> Iterator[object]:
    """Yield the types in a hint that transformers turns into {"type": "object"} or into invalid JSON."""
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


def _add_defaults(function: Callable[..., object], properties: dict[str, dict[str, object]]) -> None:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in properties and parameter.default not in (parameter.empty, None):
            try:
                json.dumps(parameter.default)
            except (TypeError, ValueError):
                continue  # the function still applies its default
            properties[parameter.name]["default"] = parameter.default


class ArgumentChecker:
    """Validates arguments against the parameters of a schema."""

    def __init__(self, schema: Schema) -> None:
        from referencing import Registry

        parameters = _without_nullable(schema["function"]["parameters"])
        self._properties: dict[str, object] = parameters.get("properties") or {}
        self._root = {key: value for key, value in parameters.items() if key in ("$defs", "definitions")}
        self._registry = Registry()  # empty, so that external references are never fetched
        self._validator = _validator_class()(parameters, registry=self._registry)
        # JSON schema allows unknown properties by default; for tools, an unknown argument is most likely a mistake.
        closed = parameters.get("additionalProperties", False) is False and "patternProperties" not in parameters
        self._known = set(self._properties) if closed and "$ref" not in parameters else None

    def problem(self, arguments: dict[str, object]) -> str | None:
        """Return the problem of `arguments` in one line, or None. Arguments that the schema does not name are wrong
        unless it allows additional ones."""
        from jsonschema.exceptions import best_match
        from referencing.exceptions import Unresolvable

        if self._known is not None and (unknown := [key for key in arguments if key not in self._known]):
            return f"there is no argument {unknown[0]!r}; the arguments are: {', '.join(self._properties) or 'none'}"
        try:
            error = best_match(self._validator.iter_errors(arguments))
        except Unresolvable as unresolvable:
            return f"its schema refers to {unresolvable.ref}, which does not exist"
        if error is None:
            return None
        where = "".join(f".{part}" for part in error.absolute_path)
        text = f"argument {where[1:]}: {error.message}" if where else error.message
        return " ".join(text[:MAX_PROBLEM_CHARACTERS].split())

    def typed(self, texts: Mapping[str, object]) -> dict[str, object]:
        """Convert textual arguments: a text is parsed as JSON if the result has the type that the schema requires;
        otherwise it stays a text."""
        return {key: self._typed(self._properties.get(key), str(text)) for key, text in texts.items()}

    def _typed(self, wanted: object, text: str) -> object:
        if not isinstance(wanted, dict) or wanted.get("type") == "string":
            return text
        stripped = text.strip()
        try:
            # Templates that print a value without tojson write Python literals.
            value = _PYTHON[stripped] if stripped in _PYTHON else json_value(text)
        except ValueError:
            return text
        fits = _validator_class()({**self._root, **wanted}, registry=self._registry).is_valid(value)
        return value if fits else text


_PYTHON = {"True": True, "False": False, "None": None}


def _validator_class() -> type[Draft202012Validator]:
    from jsonschema import Draft202012Validator

    return Draft202012Validator


def _without_nullable(schema: Any) -> Any:
    """Replace OpenAPI's `nullable`, which transformers writes for optional arguments, by JSON schema's anyOf."""
    if isinstance(schema, list):
        return [_without_nullable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _without_nullable(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain
