"""Schemas of functions, rejection of types that transformers would drop, and validation of arguments."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import pytest

from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.schemas import ArgumentChecker, checked_schema, schema_of_function


@dataclass
class Point:
    x: int


class Colour(enum.Enum):
    RED = 1


class Keys(TypedDict):
    x: int


def search(
    query: str,
    k: int = 3,
    where: Literal["title", "text"] = "text",
    weights: dict[str, float] | None = None,
    tags: Annotated[list[str], "any"] | None = None,
    near: tuple[int, int] = (0, 0),
) -> list[str]:
    """Searches.

    Args:
        query: What for.
        k: How many.
        where: In what.
        weights: Of words.
        tags: Of documents.
        near: A place.

    Returns:
        Titles.
    """
    return []


def test_schema_of_function_includes_defaults() -> None:
    function = schema_of_function("t", search)["function"]
    properties = function["parameters"]["properties"]
    assert (function["name"], function["description"]) == ("search", "Searches.")
    assert function["parameters"]["required"] == ["query"]
    assert properties["k"] == {"type": "integer", "description": "How many.", "default": 3}
    assert properties["where"]["enum"] == ["title", "text"]
    assert "return" not in function


@pytest.mark.parametrize(
    "hint", [Point, Colour, Keys, bytes, list[Point], Point | None, dict[str, Colour], object, set[int]], ids=str
)
def test_schema_of_function_untyped_objects_are_rejected(hint: Any) -> None:
    def tool(x):  # type: ignore[no-untyped-def]
        """Takes.

        Args:
            x: Something.
        """

    tool.__annotations__ = {"x": hint}
    with pytest.raises(ConfigError, match=r"here: tool takes x: \w+"):
        schema_of_function("here", tool)


def test_schema_of_function_missing_hints_are_rejected() -> None:
    def bare(x: int) -> int:
        return x

    def silent(x: int) -> int:
        """Says nothing of x."""
        return x

    def untyped(x):  # type: ignore[no-untyped-def]
        """Takes.

        Args:
            x: Something.
        """

    def anything(**options: int) -> None:
        """Takes anything."""

    def several(*values: int) -> None:
        """Takes several."""

    for function in (bare, silent, untyped):
        with pytest.raises(ConfigError, match=f"^here: {function.__name__} has no schema: .*tool_schema"):
            schema_of_function("here", function)
    for function, shown in ((anything, r"\*\*options"), (several, r"\*values")):
        with pytest.raises(ConfigError, match=f"^here: {function.__name__} takes {shown}: 'int', which no schema"):
            schema_of_function("here", function)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"query": "a"}, None),
        ({"query": "a", "k": 1, "where": "title", "weights": {"a": 0.5}, "tags": None}, None),
        ({"query": "a", "weights": None, "near": [1, 2]}, None),
        ({}, "'query' is a required property"),
        ({"query": 1}, "argument query: 1 is not of type 'string'"),
        ({"query": "a", "k": True}, "argument k: True is not of type 'integer'"),
        ({"query": "a", "k": None}, "argument k: None is not of type 'integer'"),
        ({"query": "a", "where": "body"}, "argument where: 'body' is not one of ['title', 'text']"),
        ({"query": "a", "near": [1, "x"]}, "argument near.1: 'x' is not of type 'integer'"),
        ({"query": "a", "q": 1}, "there is no argument 'q'; the arguments are: query, k, where, weights, tags, near"),
    ],
)
def test_argument_checker_reports_problems(arguments: dict[str, Any], problem: str | None) -> None:
    assert ArgumentChecker(schema_of_function("t", search)).problem(arguments) == problem


def made(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "t", "parameters": parameters}}


def test_argument_checker_accepts_what_the_schema_allows() -> None:
    assert ArgumentChecker(made({"type": "object", "additionalProperties": True})).problem({"x": 1}) is None
    checker = ArgumentChecker(
        made({"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "integer"}}})
    )
    assert checker.problem({"p": 1}) is None
    assert checker.problem({"p": "x"}) == "argument p: 'x' is not of type 'integer'"
    assert checker.typed({"p": "12"}) == {"p": 12}


def test_argument_checker_fetches_no_external_reference() -> None:
    checker = ArgumentChecker(made({"type": "object", "properties": {"p": {"$ref": "http://127.0.0.1:9/x.json"}}}))
    assert "refers to http://127.0.0.1:9/x.json" in str(checker.problem({"p": 1}))


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {},
        {"type": "function", "function": {"description": "d"}},
        made("object"),
        made({"type": "array"}),
        made({"type": "object", "properties": {"x": {"type": "image"}}}),
        {"type": "function", "function": {"name": "two words"}},
    ],
)
def test_checked_schema_invalid_schema_is_rejected(schema: Any) -> None:
    with pytest.raises(ConfigError, match=r"^tools.yaml: tools\[0\]"):
        checked_schema("tools.yaml: tools[0]", schema)
