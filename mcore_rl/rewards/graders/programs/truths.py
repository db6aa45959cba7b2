"""Parsing of ground truths for code graders, in the formats of published data sets."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.rewards.graders.programs.wire import Encoder, Owner, WireError


@dataclass(frozen=True)
class Examples:
    """Tests of a program by standard input and output, or of its function `name`: pairs (input, expected output)."""

    tests: list[tuple[object, object]]
    name: str | None


@dataclass(frozen=True)
class Assertions:
    """Test code. statements: code to run in order; collect: run the test functions that pytest would collect."""

    statements: list[str]
    entry_point: str | None
    prompt: str
    collect: bool = False


def read_examples(ground_truth: object) -> Examples:
    """Read {"inputs", "outputs", "fn_name"} (APPS, TACO, verl) or a list of {"input", "output"} (LiveCodeBench).

    PrimeIntellect has the list under "test_cases".

    Raises: ValueError for another form.
    """
    truth = _loaded(ground_truth)
    cases = truth.get("test_cases") if isinstance(truth, Mapping) else truth
    if isinstance(cases, Sequence) and cases and all(isinstance(case, Mapping) for case in cases):
        return _cases(cases)
    truth = _mapping(truth, "inputs", "outputs")
    # A text is one test, not a sequence of characters.
    inputs, outputs = ([each] if isinstance(each, str) else list(each) for each in (truth["inputs"], truth["outputs"]))
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"ground truth with {len(inputs)} inputs and {len(outputs)} outputs")
    return _examples(zip(inputs, outputs, strict=True), truth.get("fn_name"))


def read_assertions(ground_truth: object) -> Assertions:
    """Read the tests of HumanEval, MBPP, or KodCode.

    HumanEval: {"test", "entry_point", "prompt"}; MBPP: {"test_list", "test_setup_code", "test_imports"}; KodCode:
    {"test"} with test functions. Plain test code counts as "test", a plain list of assertions as "test_list".

    Raises: ValueError for another form.
    """
    truth = _mapping(_test_code(ground_truth))
    prompt = _parseable(str(truth.get("prompt") or ""))
    test, entry_point = truth.get("test"), truth.get("entry_point")
    test = None if test is None else str(test)
    if test is not None and (entry_point or _has_tests(test)):
        _check_syntax([test], str(entry_point or "0"))
        has_check = bool(entry_point) and "check" in _defined(test)
        asserts = any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(test)))
        if not (has_check or asserts or _has_tests(test)):
            raise ValueError("the test of the ground truth has neither check, test functions nor assertions")
        collect = _has_tests(test) and not has_check
        return Assertions([test], str(entry_point) if entry_point else None, prompt, collect)
    test_list = truth.get("test_list")
    if test_list is None or not len(test_list):
        raise ValueError("the ground truth has neither test and entry_point nor test_list")
    imports = [] if truth.get("test_imports") is None else [str(each) for each in truth["test_imports"]]
    setup = str(truth.get("test_setup_code") or "")
    statements = [*imports, setup, *map(str, test_list)]
    _check_syntax(statements)
    return Assertions(statements, None, prompt)


def encoded_arguments(value: object) -> str:
    """Encode the arguments of a call as a message for programs.call.

    Raises: ValueError for arguments that are not plain data.
    """
    encoder = Encoder(Owner())
    try:
        root = encoder.encode(_arguments(value))
    except WireError as error:
        raise ValueError(f"ground truth: {error}") from error
    return json.dumps({"root": root, "nodes": encoder.nodes})


def as_text(value: object) -> str:
    """Return standard input or output as text. `value` is a text or a list of lines; a line may be a list of words."""
    if isinstance(value, list | tuple):
        return "\n".join(" ".join(map(str, line)) if isinstance(line, list | tuple) else str(line) for line in value)
    return value if isinstance(value, str) else str(value)


def _cases(cases: Sequence[Mapping[str, object]]) -> Examples:
    if not all("input" in case and "output" in case for case in cases):
        raise ValueError("a test of the ground truth lacks input or output")
    metadata = cases[0].get("metadata")
    if isinstance(metadata, str) and metadata:  # LiveCodeBench stores it as JSON text
        metadata = json.loads(metadata)
    named = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    name = cases[0].get("fn_name") or named
    return _examples([(case["input"], case["output"]) for case in cases], name)


def _examples(pairs: Iterable[tuple[object, object]], name: object) -> Examples:
    tests = [(_native(given), _native(expected)) for given, expected in pairs]
    return Examples(tests, str(name) if name else None)


def _arguments(given: object) -> list[object]:
    """Return a list of arguments. A text has one JSON or Python value per line, or is `name = value, ...`."""
    if isinstance(given, str):
        return _from_text(given)
    given = list(given) if isinstance(given, tuple) else given
    arguments = given if isinstance(given, list) else [given]
    if arguments and isinstance(arguments[0], dict):  # restore integer keys, which JSON turns into text (APPS)
        arguments = [_with_number_keys(arguments[0]), *arguments[1:]]
    return arguments


def _from_text(text: str) -> list[object]:
    lines = [line for line in text.split("\n") if line.strip()]
    with contextlib.suppress(ValueError, SyntaxError):
        return [_literal(line) for line in lines]
    try:
        call = ast.parse(f"call({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return [named] if named else [ast.literal_eval(each) for each in call.args]
    except (SyntaxError, ValueError, AssertionError):
        raise ValueError(f"ground truth: the input {text[:80]!r} is neither JSON nor Python values") from None


def _literal(line: str) -> object:
    with contextlib.suppress(ValueError):
        return json.loads(line)
    return ast.literal_eval(line.strip())


def _with_number_keys(value: dict[Any, object]) -> dict[Any, object]:
    try:
        return {int(key): each for key, each in value.items()}
    except (ValueError, TypeError):
        return value


def _native(value: object) -> object:
    """Convert arrays, which parquet nests, to plain lists and numbers."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {_native(key): _native(each) for key, each in value.items()}
    # Exact types only: a named tuple cannot be built from a sequence.
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(_native, value))
    return value


def _loaded(ground_truth: object) -> object:
    return json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth


def _test_code(ground_truth: object) -> object:
    """Convert plain test code or a list of assertions to a mapping; return other values unchanged.

    Raises: ValueError for text that is neither JSON nor test code.
    """
    try:
        truth = _native(_loaded(ground_truth))
    except ValueError:
        code = str(ground_truth)
        if not _defined(code) and "assert" not in code:
            raise
        return {"test": code} if _has_tests(code) else {"test_list": [code]}
    is_list = isinstance(truth, list) and truth and all(isinstance(each, str) for each in truth)
    return {"test_list": truth} if is_list else truth


def _mapping(truth: object, *names: str) -> Mapping[str, Any]:
    if not isinstance(truth, Mapping) or any(truth.get(name) is None for name in names):
        raise ValueError(f"the ground truth has no {' and '.join(names) or 'tests'}: {str(truth)[:80]}")
    return truth


def _check_syntax(statements: Sequence[str], entry_point: str = "0") -> None:
    try:
        ast.parse("\n".join(statements))
        ast.parse(entry_point, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"the tests of the ground truth are not Python: {error}") from None


def _defined(test: str) -> list[str]:
    """Return the names of functions and classes at the top level of test code; empty if it is not Python."""
    try:
        tree = ast.parse(test)
    except SyntaxError:
        return []
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [node.name for node in tree.body if isinstance(node, kinds)]


def _has_tests(test: str) -> bool:
    return any(name.lower().startswith("test") for name in _defined(test)) or "TestCase" in test


def _parseable(prompt: str) -> str:
    """Complete a prompt that ends after a function's head or inside its docstring; else return its imports only."""
    for ending in ("", "    pass\n", '    """\n    pass\n'):
        try:
            ast.parse(prompt + ending)
        except SyntaxError:
            continue
        return prompt + ending
    return "\n".join(line for line in prompt.splitlines() if line.startswith(("import ", "from ")))
