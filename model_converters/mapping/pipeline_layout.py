"""Parser of Megatron's pipeline layout strings, which list the layers of every pipeline stage: `E|(tt|)*30tmL`.

`|` ends a stage. A stage consists of E (embedding), t (decoder layer), m (multi-token-prediction layer) and L (output
projection and loss). `x*n` repeats one character, `(...)*n` a group that may contain `|`; repeats do not nest. Commas
are ignored. With p pipeline ranks, stage k is virtual chunk k // p of rank k % p.

Source: megatron.core.transformer.pipeline_parallel_layer_layout (0.16.1), whose parser accepts the same strings.
"""

from __future__ import annotations

import re

from model_converters.errors import LayoutError

EMBEDDING, DECODER, MTP, OUTPUT = "E", "t", "m", "L"
_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_SINGLE = re.compile(r"(.)\*(\d+)")
# A mistyped count such as t*3000000000 would otherwise exhaust the memory.
_MAX_REPEATS = 10_000


def parse_stages(text: str) -> tuple[str, ...]:
    """Return the characters of every stage in execution order: `Et|(t|)*2L` -> Et, t, t, L.

    Raises: LayoutError for an unknown character.
    """
    # Expand groups before single characters, like Megatron's parser.
    unrolled = text.replace(",", "")
    for pattern in (_GROUP, _SINGLE):
        unrolled = pattern.sub(_repeat, unrolled)
    stages = tuple(unrolled.split("|"))
    unknown = sorted(set("".join(stages)) - {EMBEDDING, DECODER, MTP, OUTPUT})
    if unknown:
        raise LayoutError(
            f"pipeline_layout {text!r} expands to {unrolled!r}, which contains {', '.join(map(repr, unknown))}; "
            "it may contain E, t, m, L, |, x*n and (...)*n"
        )
    return stages


def check_stages(text: str, stages: tuple[str, ...]) -> None:
    """Reject an order of layers that no model has or that the trainer does not support.

    Raises: LayoutError.
    """
    layers = "".join(stages)
    problem = None
    if layers.count(EMBEDDING) != 1 or not stages[0].startswith(EMBEDDING):
        problem = "the first stage must begin with E, and no other stage may contain it"
    elif layers.count(OUTPUT) != 1 or not stages[-1].endswith(OUTPUT):
        problem = "the last stage must end with L, and no other stage may contain it"
    elif not all(stages):
        problem = "every stage must contain a layer: a stage without weights cannot be trained"
    elif layers.count(MTP) != stages[-1].count(MTP):
        problem = "m must be on the last stage: its loss needs the output projection"
    elif DECODER in layers.partition(MTP)[2]:
        problem = "every t must come before m"
    if problem:
        raise LayoutError(f"pipeline_layout {text!r}: {problem}")


def _repeat(match: re.Match[str]) -> str:
    count = int(match[2])
    if count > _MAX_REPEATS:
        raise LayoutError(f"pipeline_layout: {match[0]} repeats more than {_MAX_REPEATS} times")
    return match[1] * count
