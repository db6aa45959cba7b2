"""Tools of single rows: schemas in column `tools` (TRL, OpenAI, slime), or names in `tool_selection` (verl)."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence

from mcore_rl.data.json_text import parse_json, without_nulls
from mcore_rl.errors import DataError
from mcore_rl.types.chat import ToolSchema, tool_function, tool_name

TOOLS, SELECTION = "tools", "tool_selection"


class RowTools:
    """Reader of the tools of rows.

    tools: schemas of the run's tools.
    executes: whether calls execute these tools; a row may then offer only these.
    """

    def __init__(self, tools: Sequence[ToolSchema], *, executes: bool) -> None:
        self._tools = {tool_name(schema): schema for schema in tools}
        self._executes = executes and bool(tools)
        self._checked: dict[str, list[ToolSchema]] = {}
        """JSON text -> checked list of schemas, shared by rows with equal tools."""

    @property
    def are_called(self) -> bool:
        """True if calls are executed."""
        return self._executes

    def unknown(self, tools_kwargs: object) -> list[str]:
        """Return the names in a row's tools_kwargs that are not tools of the run."""
        given = tools_kwargs if isinstance(tools_kwargs, Mapping) else {}
        return [str(name) for name, kwargs in given.items() if kwargs is not None and name not in self._tools]

    def of(self, given: object, selection: object, where: str, *, struct_nulls: bool) -> list[ToolSchema] | None:
        """Return the schemas that a row offers: its own, or a selection of the run's; None: all tools of the run.

        `given` is the column `tools`; `selection` is `tool_selection`, which has no effect if it is empty.

        Raises: DataError naming the row, for an invalid schema, a tool that is not implemented, or one that differs
        from its implementation.
        """
        offered = self._own(given, where, struct_nulls)
        names = _names(selection, f"{where}: {SELECTION}")
        if not names:
            return offered
        there = self._tools if offered is None else {tool_name(schema): schema for schema in offered}
        return self._interned([self._named(name, there, f"{where}: {SELECTION}") for name in names])

    def _own(self, given: object, where: str, struct_nulls: bool) -> list[ToolSchema] | None:
        context = f"{where}: {TOOLS}"
        if isinstance(given, str):
            given = parse_json(given, context) if given.strip() else None
        if given is None:
            return None
        listed = [given] if isinstance(given, dict) else given
        if not isinstance(listed, list):
            raise DataError(
                f"{context} is {type(given).__name__}, not a list of schemas of functions; rename the column"
            )
        schemas = [self._schema(each, f"{context}[{place}]", struct_nulls) for place, each in enumerate(listed)]
        names = [tool_name(schema) for schema in schemas]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"{context} has two tools {twice!r}; remove one")
        return self._interned(schemas)

    def _schema(self, given: object, context: str, struct_nulls: bool) -> ToolSchema:
        if isinstance(given, str):
            if not given.lstrip().startswith("{"):
                return self._named(given, self._tools, context)
            given = parse_json(given, context)
        if struct_nulls:
            given = without_nulls(given)
        given = given if isinstance(given, dict) else {}
        function = given.get("function", given)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise DataError(f"{context} must be {{type: function, function: {{name, description, parameters}}}}")
        if given.get("type", "function") != "function":
            raise DataError(f"{context} is of type {given['type']!r}; only functions are supported")
        function = {key: value for key, value in function.items() if key != "type" or function is not given}
        if isinstance(parameters := function.get("parameters"), str):
            function["parameters"] = parameters = parse_json(parameters, f"{context}: parameters of {name}")
        if not isinstance(parameters, dict | None):
            raise DataError(f"{context}: parameters of {name} is {type(parameters).__name__}, not a JSON schema")
        if self._executes:
            self._check_implemented(name, parameters or {}, context)
        return {"type": "function", "function": function}

    def _check_implemented(self, name: str, parameters: Mapping[str, object], context: str) -> None:
        """Check that the run's tool accepts the arguments of a row's schema."""
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError

        own = tool_function(self._named(name, self._tools, context)).get("parameters")
        own = own if isinstance(own, Mapping) else {}
        try:
            Draft202012Validator.check_schema(parameters)
        except SchemaError as error:
            raise DataError(f"{context}: parameters of {name} are not a JSON schema: {error.message}") from None
        shown, taken = _names_in(parameters, "properties"), _names_in(own, "properties")
        # The row may offer fewer arguments than the tool has, but all required ones.
        if not own.get("additionalProperties") and (extra := sorted(shown - taken)):
            raise DataError(f"{context}: {name} has the argument {extra[0]!r}, which its implementation lacks")
        if lacking := sorted(_names_in(own, "required") - shown):
            raise DataError(f"{context}: {name} lacks the argument {lacking[0]!r}, which its implementation requires")

    def _named(self, name: str, there: Mapping[str, ToolSchema], context: str) -> ToolSchema:
        if name in there:
            return there[name]
        near = difflib.get_close_matches(name, there, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        where = "rollout.tools has" if there is self._tools else "the row has"
        raise DataError(
            f"{context} names {name!r}, which has no implementation ({where}: {', '.join(there) or 'none'}){hint} "
            "Add it to rollout.tools, or remove it from the row"
        )

    def _interned(self, schemas: list[ToolSchema]) -> list[ToolSchema]:
        return self._checked.setdefault(json.dumps(schemas, sort_keys=True, default=str), schemas)


def _names_in(parameters: Mapping[str, object], key: str) -> set[str]:
    """Return the names of arguments in `properties` or `required` of a JSON schema."""
    names = parameters.get(key)
    return set(names) if isinstance(names, dict | list) else set()


def _names(given: object, context: str) -> list[str]:
    if isinstance(given, str):
        given = parse_json(given, context) if given.lstrip().startswith("[") else given or None
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise DataError(f"{context} is {given!r}, not a list of names of tools")
    return list(dict.fromkeys(given))
