"""Options of single rows: sampling options and the number of turns, which override the run's keys, and tools.

Tools are schemas in column `tools` (TRL, OpenAI, slime), or names in `tool_selection` (verl).
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import cast

from mcore_rl.config.fields import DOMAIN, written
from mcore_rl.config.rules.rollout import stop_fault, untrainable
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.json_text import parse_json, without_nulls
from mcore_rl.errors import DataError
from mcore_rl.types import SamplingOptions, SamplingOverrides
from mcore_rl.types.chat import ToolSchema, tool_function, tool_name

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_response_tokens", "stop")
"""Keys of `rollout` that a row or a call of session.generate may override."""
CHANGES_DISTRIBUTION = (
    *("typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words"),
    *("bad_words_ids", "allowed_token_ids", "min_tokens", "min_new_tokens", "logits_processors", "structured_outputs"),
)
"""Engine options that are rejected: they change the sampling distribution."""
_NEUTRAL = {"repetition_penalty": 1}
"""Values that change nothing. `SamplingOptions` has this field too, for validation."""
_WHOLE = ("top_k", "max_response_tokens")
# No option needs more digits, and int() takes quadratic time for a long text.
_MOST_DIGITS = 10
_DOMAINS = {field.name: field.metadata[DOMAIN] for field in fields(RolloutConfig) if field.name in SAMPLING}


def check_sampling(
    given: Mapping[str, object],
    where: str,
    *,
    trained: bool,
    max_response_tokens: int | None = None,
    keeps_mask: bool = False,
) -> SamplingOverrides | None:
    """Check the sampling options of a row or call. Returns them (whole numbers as int, stop strings as a list) or None.

    A null counts as absent, because Arrow structs have all fields in every row.

    trained: whether responses are trained on; their tokens must then come from the distribution that the trainer
    computes.
    max_response_tokens: the run's limit, which the row must not exceed; None: not checked.
    keeps_mask: rollout.keep_sampling_mask, with which truncated sampling is trained.

    Raises: DataError for an unknown name, a value that the run's key does not allow, or a value above the run's limit.
    """
    wanted = {name: value for name, value in given.items() if value is not None and _NEUTRAL.get(name) != value}
    values = {name: _checked(name, value, where) for name, value in wanted.items()}
    checked = cast(SamplingOverrides, values)
    if max_response_tokens is not None and checked.get("max_response_tokens", 0) > max_response_tokens:
        raise DataError(
            f"{where}: sampling.max_response_tokens is {given['max_response_tokens']}, above "
            f"rollout.max_response_tokens={max_response_tokens}, which sizes engines and batches; raise "
            "rollout.max_response_tokens, or lower the row's value"
        )
    # An option that is not set has the run's value, which the rules of the configuration have checked.
    temperature, top_p, top_k = checked.get("temperature", 1.0), checked.get("top_p", 1.0), checked.get("top_k", -1)
    min_p = checked.get("min_p", 0.0)
    found = untrainable(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, keeps_mask=keeps_mask, of_row=True
    )
    if trained and found is not None:
        name, reason = found
        raise DataError(f"{where}: sampling.{name} is {given[name]}, which {reason}, or remove it")
    return checked or None


def changed_options(given: SamplingOptions, options: SamplingOptions) -> dict[str, object]:
    """Return the options of `given` that differ from the request's. Whether sets are recorded is not the caller's
    choice."""
    current = vars(options)
    return {name: value for name, value in vars(given).items() if value != current[name] and name != "keep_mask"}


def with_overrides(options: SamplingOptions, wanted: SamplingOverrides) -> SamplingOptions:
    """Apply checked options of a row or call. Greedy sampling (validation, baselines) stays greedy."""
    return replace(
        options,
        max_response_tokens=wanted.get("max_response_tokens", options.max_response_tokens),
        temperature=wanted.get("temperature", options.temperature) if options.temperature > 0 else 0.0,
        top_p=wanted.get("top_p", options.top_p),
        top_k=wanted.get("top_k", options.top_k),
        min_p=wanted.get("min_p", options.min_p),
        stop=tuple(wanted.get("stop", options.stop)),
    )


def _checked(name: str, value: object, where: str) -> float | list[str]:
    context = f"{where}: sampling.{name}"
    if name in CHANGES_DISTRIBUTION:
        raise DataError(f"{context} changes the sampling distribution, which the trainer does not model; remove it")
    if name not in SAMPLING:
        near = difflib.get_close_matches(name, SAMPLING, n=1)
        hint = f"did you mean {near[0]}? It" if near else "it"
        raise DataError(f"{where}: sampling has {name!r}; {hint} may set {', '.join(SAMPLING)}")
    if name == "stop":
        return _stops(value, context)
    number = _number(name, value, context)
    if name == "top_k" and number == 0:
        raise DataError(f"{context} is 0, which leaves no token; set it to -1 (all tokens) or to at least 1")
    return number


def _stops(value: object, context: str) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if (fault := stop_fault(stops)) is not None or not isinstance(stops, list | tuple):
        raise DataError(f"{context} is {written(value)}, which {fault}")
    return list(stops)


def check_turns(value: object, where: str) -> int | None:
    """Read the maximum number of turns of a row's episodes; None if the row does not set it.

    Raises: DataError unless it is a whole number above 0.
    """
    if value is None:
        return None
    turns = _whole(value)
    if turns is None or turns < 1:
        raise DataError(f"{where}: max_turns is {value!r}, not a whole number above 0")
    return turns


def _number(name: str, value: object, context: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{context} is {value!r}, not a number")
    if not math.isfinite(value):
        raise DataError(f"{context} is {value}, not a finite number")
    number: float | None = _whole(value) if name in _WHOLE else value
    if number is None:
        raise DataError(f"{context} is {value}, not a whole number")
    if (demand := _DOMAINS[name].violation(number)) is not None:
        raise DataError(f"{context} is {value}, but must be {demand}")
    return number


def _whole(value: object) -> int | None:
    """Parse a whole number; CSV files have text, and columns with nulls often have floats. None if it is not whole."""
    if isinstance(value, str):
        text = value.strip()
        # isdigit() also accepts digits such as superscripts, which int() rejects.
        return int(text) if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else None


TOOLS, SELECTION = "tools", "tool_selection"


class RowTools:
    """Reader of the tools of rows.

    tools: schemas of the run's tools.
    executes: whether calls execute these tools; a row may then offer only these.
    """

    def __init__(self, tools: Sequence[ToolSchema], *, executes: bool) -> None:
        self._tools = {tool_name(schema): schema for schema in tools}
        self.executes = executes and bool(tools)
        """True if calls are executed."""
        self._checked: dict[str, list[ToolSchema]] = {}
        """JSON text -> checked list of schemas, shared by rows with equal tools."""

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
        # In the flat form, `type` stands beside `name` and is not part of the function.
        function = {key: value for key, value in function.items() if key != "type" or function is not given}
        if isinstance(parameters := function.get("parameters"), str):
            function["parameters"] = parameters = parse_json(parameters, f"{context}: parameters of {name}")
        if not isinstance(parameters, dict | None):
            raise DataError(f"{context}: parameters of {name} is {type(parameters).__name__}, not a JSON schema")
        if self.executes:
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
        # default=str: rows of Arrow files may hold values that JSON lacks.
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
