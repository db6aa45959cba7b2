"""Megatron's strings that say which layers every pipeline stage holds, such as `E|(tt|)*30tmL`.

`|` ends a stage. In a stage stand E (embedding), t (decoder layer), m (multi-token-prediction layer), L (output
projection and loss). `x*n` repeats one character, `(...)*n` whatever stands between the parentheses, `|` included;
repeats do not nest. Commas count for nothing. With p pipeline ranks stage k is chunk k // p of rank k % p.

Source: megatron.core.transformer.pipeline_parallel_layer_layout (0.16.1), whose parser accepts the same strings.
"""

from __future__ import annotations

import re

from model_converters.errors import LayoutError

EMBEDDING, DECODER, MTP, OUTPUT = "E", "t", "m", "L"
_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_SINGLE = re.compile(r"(.)\*(\d+)")
_MAX_REPEATS = 10_000


def parse_stages(text: str) -> tuple[str, ...]:
    """The characters of every stage, in the order in which data passes them: `Et|(t|)*2L` -> Et, t, t, L.

    Raises: LayoutError for a character that has no meaning.
    """
    unrolled = text.replace(",", "")
    for pattern in (_GROUP, _SINGLE):
        unrolled = pattern.sub(_repeat, unrolled)
    stages = tuple(unrolled.split("|"))
    unknown = sorted(set("".join(stages)) - {EMBEDDING, DECODER, MTP, OUTPUT})
    if unknown:
        raise LayoutError(
            f"pipeline_layout {text!r} becomes {unrolled!r}, in which {', '.join(map(repr, unknown))} means nothing; "
            "it may hold E, t, m, L, |, x*n and (...)*n"
        )
    return stages


def check_stages(text: str, stages: tuple[str, ...]) -> None:
    """Refuses an order of layers that no model has, or that the trainer does not compute.

    Raises: LayoutError.
    """
    layers = "".join(stages)
    problem = None
    if layers.count(EMBEDDING) != 1 or not stages[0].startswith(EMBEDDING):
        problem = "the first stage must begin with E, which stands nowhere else"
    elif layers.count(OUTPUT) != 1 or not stages[-1].endswith(OUTPUT):
        problem = "the last stage must end with L, which stands nowhere else"
    elif not all(stages):
        problem = "every stage must hold something: one without weights cannot be trained"
    elif layers.count(MTP) != stages[-1].count(MTP):
        problem = "m must stand on the last stage: its loss is computed beside the output projection"
    elif DECODER in layers.partition(MTP)[2]:
        problem = "every t must stand before m"
    if problem:
        raise LayoutError(f"pipeline_layout {text!r}: {problem}")


def _repeat(match: re.Match[str]) -> str:
    count = int(match[2])
    if count > _MAX_REPEATS:
        raise LayoutError(f"pipeline_layout: {match[0]} repeats more than {_MAX_REPEATS} times")
    return match[1] * count
