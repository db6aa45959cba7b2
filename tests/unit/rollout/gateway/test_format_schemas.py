"""JSON schemas that engines enforce exactly; tests/contract/test_json_grammars.py samples from the accepted ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mcore_rl.rollout.gateway.exchange import RefusedError
from mcore_rl.rollout.gateway.formats.patterns import pattern_fault
from mcore_rl.rollout.gateway.formats.schemas import engine_schema

INTEGER = {"type": "integer"}


def converted(schema: Any) -> Any:
    return json.loads(engine_schema(schema, "schema"))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ([1], "schema must be a JSON schema, which is an object"),
        ({"type": "foo"}, "schema is not a JSON schema"),
        ({"type": "object", "patternProperties": {"^x": INTEGER}}, "schema has the keyword `patternProperties`"),
        ({"type": "array", "contains": INTEGER}, "schema has the keyword `contains`"),
        (
            {"type": "array", "items": {"type": "array", "uniqueItems": True}},
            "schema.items has the keyword `uniqueItems`",
        ),
        ({"type": "integer", "multipleOf": 5}, "schema has the keyword `multipleOf`"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "schema has the keyword `oneOf`"),
        ({"type": "string", "not": {"const": "a"}}, "schema has the keyword `not`"),
        ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 4}}, "schema has the keyword `if`"),
        (
            {"type": "object", "properties": {"a": INTEGER}, "minProperties": 1},
            "schema has the keyword `minProperties`",
        ),
        ({"type": "object", "properties": {"a": {**INTEGER, "invented": 1}}}, "schema.properties.a has the keyword"),
        (
            {"type": "string", "pattern": "^a$", "maxLength": 3},
            "`pattern` and `maxLength`, of which engines enforce one",
        ),
        ({"type": "string", "format": "regex"}, "schema.format is 'regex'; formats are: date, date-time"),
        ({"anyOf": [INTEGER, {"type": "string"}], "minimum": 5}, "schema has `minimum` beside `anyOf`"),
        ({"$defs": {"n": INTEGER}, "$ref": "#/$defs/n", "minimum": 5}, "schema has `minimum` beside `$ref`"),
        ({"allOf": [INTEGER, {"minimum": 5}]}, "schema has `allOf` of several schemas"),
        ({"$ref": "https://example.org/schema"}, "references may be # and #/$defs/NAME of this schema"),
        ({"$ref": "#/$defs/missing"}, "references may be # and #/$defs/NAME of this schema"),
        ({"$ref": "#"}, "a $ref to '#' that leads to itself"),
        ({"type": "object", "properties": {"a": INTEGER}, "required": ["z"]}, "required names 'z'; describe it"),
        ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True}, "set it to false"),
        ({"type": "string", "enum": [1, 2]}, "allows no value"),
        ({"type": "object", "properties": {"a": False}}, "schema.properties.a is false, and no value conforms"),
        ({"minimum": 5}, "has `minimum` without `type`"),
        ({"type": "integer", "maxLength": 5}, "`maxLength`, which has no effect on type integer"),
        (
            {"type": "array", "items": INTEGER, "minItems": 10**6},
            "schema.minItems: the bounds of lengths of a schema may be 10000 in all",
        ),
        ({"type": "object", "properties": {"a": {"$defs": {}, "type": "null"}}}, "definitions of its own"),
        ({"type": "string", "description": "x" * 70000}, "a schema may have 65536"),
        ({"enum": ["aaaa!", "a"], "pattern": "^(a+)+$"}, "schema has `pattern` beside `enum`"),
        ({"enum": [{"a": 1}], "$ref": "#"}, "a $ref to '#' that leads to itself"),
        ({"const": 1, "enum": [1]}, "schema has `enum` beside `const`"),
        ({"enum": list(range(1001))}, "schema has 1001 values; an enum may have 1000"),
        ({"const": [{"a": 2**63}]}, "an integer of more than 64 bits"),
        ({"type": "number", "minimum": 10**400, "multipleOf": 0.5}, "schema has the keyword `multipleOf`"),
        ({"anyOf": [INTEGER, {"$ref": "#"}]}, "a $ref to '#' that leads to itself"),
        ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, **INTEGER}, "leads to itself without an object or array"),
        ({"$defs": {"a": INTEGER}, "$ref": "#/$defs/%61"}, "with names without % and ~"),
        (
            {"anyOf": [{"type": "string", "maxLength": 9000 + number} for number in range(2)]},
            "schema.anyOf[1].maxLength: the bounds of lengths of a schema may be 10000 in all",
        ),
        (
            {"anyOf": [{"type": "string", "pattern": "^" + 36 * "a" + str(number)} for number in range(3)]},
            "schema.anyOf[2].pattern: the patterns of a schema are too long in all",
        ),
    ],
)
def test_schema_that_engines_would_not_enforce_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(RefusedError) as caught:
        engine_schema(schema, "schema")
    assert caught.value.status == 400
    assert reason in str(caught.value)


def test_deep_schema_is_refused() -> None:
    schema: Any = INTEGER
    for _ in range(70):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RefusedError, match="nested too deeply"):
        engine_schema(schema, "schema")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"title": "T", "description": "d", "default": 1, "type": "integer"}, INTEGER),
        ({"type": "string", "enum": ["a", 1], "title": "T"}, {"enum": ["a"]}),
        ({"const": {"k": 1}}, {"enum": [{"k": 1}]}),
        ({"type": ["integer", "null"], "enum": [1, 1.5, True, None, 2.0]}, {"enum": [1, None, 2.0]}),
        ({"type": "array", "minItems": 2}, {"type": "array", "minItems": 2, "items": {}}),
        ({"properties": {"a": True}}, {"type": "object", "properties": {"a": {}}, "additionalProperties": False}),
        ({"type": "object"}, {"type": "object"}),
        ({"type": "object", "additionalProperties": INTEGER}, {"type": "object", "additionalProperties": INTEGER}),
        ({"allOf": [INTEGER], "title": "T"}, INTEGER),
        ({"type": ["integer", "null"], "minimum": 1}, {"type": ["integer", "null"], "minimum": 1}),
        (
            {"$defs": {"n": {"title": "N", **INTEGER}}, "$ref": "#/$defs/n"},
            {"$defs": {"n": INTEGER}, "$ref": "#/$defs/n"},
        ),
        ({"type": "array", "uniqueItems": False, "items": INTEGER}, {"type": "array", "items": INTEGER}),
        ({}, {}),
    ],
)
def test_accepted_schema_has_the_form_for_engines(schema: Any, expected: Any) -> None:
    assert converted(schema) == expected


def test_properties_keep_their_order() -> None:
    schema = {"type": "object", "properties": dict.fromkeys("zax", INTEGER)}
    assert list(converted(schema)["properties"]) == list("zax")


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        (r"^\d{4}-\d{2}-\d{2}$", None),
        (r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", None),
        (r"^(?:a|[^b\]]+?)*$", None),
        (r"\^a\$b", None),
        ("[$^]x", None),
        ("^(?=a)a$", "begins with (?"),
        (r"^\n$", "has an escape"),
        (r"^[\x00-z]$", "has an escape"),
        (r"^a\\\t$", "has an escape"),
        (r"^\ud800$", "has an escape"),
        (r"^a\\t$", "has a quote or a backslash"),
        (r'^"a', "has a quote or a backslash"),
        (r'^["]+$', "has a quote or a backslash"),
        (r"^\"$", "has a quote or a backslash"),
        (r'^[^"\\]*$', None),
        (r"^\S$", "has an escape"),
        ("a{99999999999999999999}", "more than 40 characters"),
        ("^\t$", "has an escape or a control character"),
        ("a^b", "^ behind its beginning"),
        ("a$b", "$ before its end"),
        (r"^[\s\d]{0,200}$", "more than 40 characters"),
        ("^((a{10}){5}){4}$", "more than 40 characters"),
        ("a" * 101, "more than 40 characters"),
    ],
)
def test_pattern_beyond_the_exact_ones_has_a_fault(pattern: str, fault: str | None) -> None:
    found = pattern_fault(pattern)
    assert found is None if fault is None else fault in (found or "")
