"""Parsing takes linear time for any output of a model: 24,000 characters of one mark must not block the engine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from mcore_rl.rollout.tools.formats import FORMATS
from tests.unit.rollout.tools.test_parsers import FIRST, MESSAGE_FORMATS, parser, written

CHARACTERS = 24_000
SECONDS = 1.0
"""Quadratic time takes 5 seconds and more; linear time 0.04."""
PIECES = (" ", "\n", "\t", "\\", '"', "{", "[", "<", ">", "</", ";", "a", "1", ",", "`")


def marks(form: str) -> set[str]:
    """Yield every tag and piece of syntax of a format, complete and truncated in the middle."""
    whole = written(form, FIRST) + written(form, '{"q": "a"' if form not in ("qwen3_coder", "glm45") else FIRST)
    tags = set(re.findall(r"<[^<>]*>|\[[A-Z_]+\]|```json|\{\"[a-z]+\": ", whole))
    return tags | {"<think>", "</think>", "<|python_tag|>", "[CALL_ID]", '{"name": "', '{"type": "function", "name": "'}


def shortest(read: Callable[[str], object], text: str) -> float:
    """Return the shorter time of two runs, since a busy machine can delay one."""
    taken = []
    for _ in range(2):
        began = time.process_time()
        read(text)
        taken.append(time.process_time() - began)
        if taken[-1] < SECONDS:
            break
    return min(taken)


@pytest.mark.parametrize("form", [*MESSAGE_FORMATS, "mistral_list"])
def test_parser_takes_linear_time_for_repeated_marks(form: str) -> None:
    read, whole = parser(form).parse, written(form, FIRST)
    opening = re.search(FORMATS[next(name for name in FORMATS if form.startswith(name))].opening, whole)
    assert opening is not None
    begun = whole[: max(opening.end(), 1)]
    units = sorted(marks(form)) + list(PIECES) + [whole, whole[:-1], whole[: len(whole) // 2]]
    units += [f"{begun}{piece}" for piece in PIECES] + [f'{begun}{{"{unit}' for unit in ("", "\\", '":"', '":[')]
    slow = {}
    for unit in units:
        repeated = unit * (CHARACTERS // len(unit))
        for text in (repeated, begun + repeated, f"{begun}{repeated}x", whole + repeated, f"<think>{repeated}"):
            if (seconds := shortest(read, text)) > SECONDS:
                slow[text[:60]] = seconds
    assert not slow
