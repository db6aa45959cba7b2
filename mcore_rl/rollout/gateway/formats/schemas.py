"""JSON schemas that engines enforce exactly, and their form for engines.

Grammars of engines ignore keywords that they do not know, and keywords beside an enum, a reference or a union. A client
would get replies that violate its schema, so every schema is checked here keyword by keyword.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache

from mcore_rl.rollout.gateway.exchange import RefusedError
from mcore_rl.rollout.gateway.formats.patterns import pattern_fault, pattern_size
from mcore_rl.types.json import JsonObject, JsonValue

MAX_CHARACTERS = 1 << 16
"""Maximum length of a schema as text."""
MAX_COUNT = 10_000
"""Maximum of the sum of all bounds of lengths of strings and arrays. The time to compile a grammar grows with it."""
MAX_SIZES = 100
"""Maximum of the sum of pattern_size over all patterns."""
MAX_VALUES = 1000
"""Maximum number of values of an enum."""
MAX_DEPTH = 64
_NOTES = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment $schema $defs definitions".split()
)
"""Keywords that restrict no value."""
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_FORMATS = frozenset("date-time date time duration email hostname ipv4 ipv6 uuid".split())
_ALONE = ("$ref", "anyOf", "allOf")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")


def engine_schema(schema: JsonValue, where: str) -> str:
    """Return a schema as JSON text in the form for engines: an enum has only the values of its type, and types that
    follow from keywords are named.

    where: path of the schema in the request, for messages.

    Raises: RefusedError for an invalid schema, and for one that engines do not enforce exactly.
    """
    if not isinstance(schema, dict):
        raise RefusedError(400, f"{where} must be a JSON schema, which is an object")
    text = json.dumps(schema, ensure_ascii=False)
    if len(text) > MAX_CHARACTERS:
        raise RefusedError(400, f"{where} has {len(text)} characters; a schema may have {MAX_CHARACTERS}")
    return _engine_schema(text, where)


@lru_cache(maxsize=256)
def _engine_schema(text: str, where: str) -> str:
    # Clients send the same schema with every request.
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    schema = json.loads(text)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise RefusedError(400, f"{where} is not a JSON schema: {error.message[:200]}") from None
    except (RecursionError, OverflowError, ValueError):  # numbers beyond every bound, and loops of references
        raise RefusedError(
            400, f"{where} cannot be checked; use at most {MAX_DEPTH} levels, and numbers of 64 bits"
        ) from None
    checked = _Checker(schema, where)
    return json.dumps(checked.whole(), ensure_ascii=False)


class _Checker:
    """Checks one schema. `root`: the whole schema, to which references refer."""

    def __init__(self, root: JsonObject, where: str) -> None:
        self._root, self._where = root, where
        self._counts = self._sizes = 0
        """Sums that MAX_COUNT and MAX_SIZES limit."""

    def whole(self) -> JsonValue:
        """Return the form of the whole schema for engines, with its definitions."""
        self._check_loops()
        made = self._schema(self._root, self._where, 0)
        for name in ("$defs", "definitions"):
            if isinstance(found := self._root.get(name), dict):
                parts = {key: self._schema(value, f"{self._where}.{name}.{key}", 1) for key, value in found.items()}
                made = {name: parts, **(made if isinstance(made, dict) else {})}
        return made

    def _schema(self, schema: JsonValue, path: str, depth: int) -> JsonValue:
        if depth > MAX_DEPTH:
            raise RefusedError(400, f"{self._where} is nested too deeply; use at most {MAX_DEPTH} levels")
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise RefusedError(400, f"{path} is {json.dumps(schema)}, and no value conforms to it; remove it")
        rules = {name: value for name, value in schema.items() if name not in _NOTES}
        if depth and any(name in schema for name in ("$defs", "definitions")):
            raise RefusedError(400, f"{path} has definitions of its own; move them to the top of the schema")
        if rules.get("uniqueItems") is False:
            del rules["uniqueItems"]
        if "enum" in rules or "const" in rules:
            return self._values(rules, path)
        if (alone := next((name for name in _ALONE if name in rules), None)) is not None:
            return self._alone(alone, rules, path, depth)
        return self._typed(rules, path, depth)

    def _values(self, rules: JsonObject, path: str) -> JsonObject:
        """Return the values of an enum or const that are of the given types."""
        first, *others = [name for name in rules if name != "type"]
        if others:
            raise RefusedError(400, f"{path} has `{others[0]}` beside `{first}`; leave out the values that it excludes")
        values = rules["enum"] if first == "enum" else [rules["const"]]
        assert isinstance(values, list)
        if len(values) > MAX_VALUES:
            raise RefusedError(400, f"{path} has {len(values)} values; an enum may have {MAX_VALUES}")
        if any(_exceeds_64_bits(value) for value in values):
            raise RefusedError(
                400, f"{path} has an integer of more than 64 bits, which engines write as another number"
            )
        types = _types(rules, path) if "type" in rules else None
        left = [value for value in values if types is None or any(_is_of_type(value, kind) for kind in types)]
        if not left:
            raise RefusedError(400, f"{path} allows no value: no value of its enum is of its type")
        return {"enum": left}

    def _alone(self, name: str, rules: JsonObject, path: str, depth: int) -> JsonValue:
        """Return a reference, or a union."""
        if others := [other for other in rules if other != name]:
            raise RefusedError(
                400, f"{path} has `{others[0]}` beside `{name}`, which engines would ignore; move it into the {name}"
            )
        value = rules[name]
        if name == "$ref":
            self._check_reference(str(value), path)
            return {"$ref": value}
        assert isinstance(value, list)
        if name == "allOf" and len(value) > 1:
            raise RefusedError(400, f"{path} has `allOf` of several schemas; write their keywords as one schema")
        branches = [self._schema(each, f"{path}.{name}[{place}]", depth + 1) for place, each in enumerate(value)]
        return branches[0] if name == "allOf" else {"anyOf": branches}

    def _check_reference(self, reference: str, path: str) -> None:
        """Raise RefusedError unless a reference leads to a part of the schema."""
        if self._target(reference) is None:
            raise RefusedError(
                400,
                f"{path}.$ref is {reference[:80]!r}; references may be # and #/$defs/NAME of this schema, with names "
                "without % and ~",
            )

    def _target(self, reference: str) -> JsonValue:
        """Return what a reference refers to, None for nothing."""
        if reference == "#":
            return self._root
        kind, _, name = reference.removeprefix("#/").partition("/")
        parts = self._root.get(kind) if reference.startswith(("#/$defs/", "#/definitions/")) else None
        return parts.get(name) if isinstance(parts, dict) and not {"%", "~", "/"} & set(name) else None

    def _check_loops(self) -> None:
        """Raise RefusedError for a reference that leads to itself without an object or array between."""
        state: dict[str, bool] = {}
        """References that were followed: True once everything behind them was."""
        pending: list[tuple[str, bool]] = [(each, False) for each in ["#", *self._names()]]
        while pending:
            reference, is_done = pending.pop()
            if is_done:
                state[reference] = True
            elif reference not in state:
                state[reference] = False
                pending.append((reference, True))
                for other in _direct_references(self._target(reference)):
                    if state.get(other) is False:
                        raise RefusedError(
                            400,
                            f"{self._where} has a $ref to {other[:80]!r} that leads to itself without an object or "
                            "array between; remove it",
                        )
                    pending.append((other, False))

    def _names(self) -> list[str]:
        """Return the references to all definitions."""
        found = [(kind, self._root.get(kind)) for kind in ("$defs", "definitions")]
        return [f"#/{kind}/{name}" for kind, parts in found if isinstance(parts, dict) for name in parts]

    def _typed(self, rules: JsonObject, path: str, depth: int) -> JsonObject:
        """Return a schema whose keywords belong to its types."""
        known = frozenset().union(*_OF_TYPE.values()) | {"type"}
        if unknown := next((name for name in rules if name not in known), None):
            raise _unsupported(unknown, path)
        if not rules:
            return {}
        types = _types(rules, path)
        for name in rules:
            if name != "type" and not any(name in _OF_TYPE[kind] for kind in types):
                raise RefusedError(
                    400, f"{path} has `{name}`, which has no effect on type {', '.join(types)}; remove it"
                )
        made: JsonObject = {**rules, "type": types[0] if len(types) == 1 else types}
        self._check_bounds(rules, path, has_strings="string" in types)
        if "array" in types:
            made |= self._array(rules, path, depth)
        if "object" in types:
            made |= self._object(rules, path, depth)
        return made

    def _check_bounds(self, rules: JsonObject, path: str, *, has_strings: bool) -> None:
        """Raise RefusedError for keywords of strings that engines ignore, and for bounds that cost too much time."""
        for name in _COUNTS:
            if isinstance(count := rules.get(name), int | float):
                self._counts += int(min(count, MAX_COUNT + 1))
            if self._counts > MAX_COUNT:
                raise RefusedError(
                    400,
                    f"{path}.{name}: the bounds of lengths of a schema may be {MAX_COUNT} in all; lower them, or "
                    "remove some",
                )
        if has_strings:
            _check_string(rules, path)
            self._sizes += pattern_size(str(rules.get("pattern", "")))
        if self._sizes > MAX_SIZES:
            raise RefusedError(400, f"{path}.pattern: the patterns of a schema are too long in all; shorten them")

    def _array(self, rules: JsonObject, path: str, depth: int) -> JsonObject:
        made: JsonObject = {}
        if isinstance(first := rules.get("prefixItems"), list):
            made["prefixItems"] = [
                self._schema(each, f"{path}.prefixItems[{place}]", depth + 1) for place, each in enumerate(first)
            ]
        items = rules.get("items")
        if items is False and "prefixItems" in rules:
            made["items"] = False
        elif items is not None:
            made["items"] = self._schema(items, f"{path}.items", depth + 1)
        elif "prefixItems" not in rules:
            made["items"] = {}
        return made

    def _object(self, rules: JsonObject, path: str, depth: int) -> JsonObject:
        properties, more = rules.get("properties"), rules.get("additionalProperties")
        named: JsonObject = properties if isinstance(properties, dict) else {}
        required = rules.get("required")
        missing = [name for name in (required if isinstance(required, list) else []) if name not in named]
        if missing:
            raise RefusedError(400, f"{path}.required names {missing[0]!r}; describe it in `properties`")
        if not named:
            return {} if more in (None, True, False) else {"additionalProperties": self._schema(more, path, depth + 1)}
        if more not in (None, False):
            # The name of another property may be written with escapes, as that of a property with another schema.
            raise RefusedError(
                400, f"{path} has `additionalProperties` beside `properties`; set it to false, or leave it out"
            )
        made = {name: self._schema(each, f"{path}.properties.{name}", depth + 1) for name, each in named.items()}
        return {"properties": made, "additionalProperties": False}


def _direct_references(schema: JsonValue) -> list[str]:
    """Return the references that apply to the value of a schema itself."""
    pending, found = [schema], list[str]()
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            found += [str(each["$ref"])] if "$ref" in each else []
            for name in ("anyOf", "allOf"):
                if isinstance(branches := each.get(name), list):
                    pending += branches
    return found


def _exceeds_64_bits(value: JsonValue) -> bool:
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, int) and not -(2**63) <= each < 2**63:
            return True
        if isinstance(each, dict | list):
            pending += each.values() if isinstance(each, dict) else each
    return False


def _is_of_type(value: JsonValue, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and (isinstance(value, int) or value.is_integer()))
    return kind == ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object")


def _types(rules: JsonObject, path: str) -> list[str]:
    """Return the types of a schema. Without `type`, keywords of objects and arrays imply theirs."""
    given = rules.get("type")
    if isinstance(given, str):
        return [given]
    if isinstance(given, Sequence):
        return [str(each) for each in given]
    for kind in ("object", "array"):
        if set(rules) <= _OF_TYPE[kind]:
            return [kind]
    raise RefusedError(400, f"{path} has `{next(iter(rules))}` without `type`; add the type")


def _check_string(rules: JsonObject, path: str) -> None:
    """Raise RefusedError for keywords of strings that engines ignore."""
    shapes = [name for name in ("pattern", "format") if name in rules]
    bounds = [name for name in ("minLength", "maxLength") if name in rules]
    if len(shapes) + bool(bounds) > 1:
        first, second = [*shapes, *bounds][:2]
        raise RefusedError(400, f"{path} has `{first}` and `{second}`, of which engines enforce one; remove the other")
    if "format" in rules and rules["format"] not in _FORMATS:
        raise RefusedError(
            400, f"{path}.format is {str(rules['format'])[:40]!r}; formats are: {', '.join(sorted(_FORMATS))}"
        )
    if "pattern" in rules and (fault := pattern_fault(str(rules["pattern"]))) is not None:
        raise RefusedError(400, f"{path}.pattern {fault}; write it in another way, or remove it")


def _unsupported(keyword: str, path: str) -> RefusedError:
    return RefusedError(400, f"{path} has the keyword `{keyword[:40]}`, which engines cannot enforce; remove it")
