"""Selection, concatenation and splitting of trajectories in buffers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypedDict

import numpy as np

from mcore_rl.types import PromptImages, TrajectoryBuffers

OFFSETS = {"token_offsets", "response_offsets", "kept_offsets", "hint_offsets"}
"""Offsets of runs; buffers are joined by adding up their lengths."""


def take_rows(buffers: TrajectoryBuffers, rows: np.ndarray) -> TrajectoryBuffers:
    """Copy the trajectories `rows` (int [b]), in this order."""
    tokens, token_offsets = ragged(buffers.token_offsets, rows)
    responses, response_offsets = ragged(buffers.response_offsets, rows)
    experts, temperatures = buffers.routed_experts, buffers.temperatures
    if temperatures is not None and temperatures.ndim:  # else one temperature for all tokens, or none
        temperatures = temperatures[responses]
    kept = None if buffers.kept is None else buffers.kept.take(responses)
    return TrajectoryBuffers(
        tokens=buffers.tokens[tokens],
        token_offsets=token_offsets,
        prompt_tokens=buffers.prompt_tokens[rows],
        response_offsets=response_offsets,
        logp_rollout=buffers.logp_rollout[responses],
        versions=buffers.versions[responses],
        trained=buffers.trained[responses],
        routed_experts=None if experts is None else experts[tokens],
        turn_rewards=None if buffers.turn_rewards is None else buffers.turn_rewards[responses],
        temperatures=temperatures,
        kept_words=None if kept is None else kept.words,
        kept_offsets=None if kept is None else kept.offsets,
        **_chosen_images([(buffers, rows)]),
        **_chosen_hints(buffers, rows),
    )


def join_rows(parts: Sequence[TrajectoryBuffers]) -> TrajectoryBuffers:
    """Concatenate the trajectories of buffers. Routed experts, turn rewards and kept sets must exist in all buffers
    or in none. Without hints in a buffer, its trajectories have none.

    Raises: ValueError naming a column that some buffers lack.
    """
    names = {field.name for field in fields(TrajectoryBuffers)} - {"images", "image_rows"}
    if any(part.hint_offsets is not None for part in parts):
        parts = [part if part.hint_offsets is not None else _without_hints(part) for part in parts]
    columns = {name: [getattr(part, name) for part in parts] for name in names}
    # Temperatures may be scalar in one buffer and an array in another, so they need their own function.
    temperatures = _joined_temperatures(parts)
    del columns["temperatures"]
    absent = {name: sum(array is None for array in arrays) for name, arrays in columns.items()}
    for name, count in absent.items():
        if 0 < count < len(parts):
            raise ValueError(f"{count} of {len(parts)} buffers have no {name}")
    joined = {name: np.concatenate(arrays) for name, arrays in columns.items() if not absent[name]}
    # The offsets of every part begin at 0.
    for name in OFFSETS & joined.keys():
        lengths = np.concatenate([np.diff(offsets) for offsets in columns[name]])
        joined[name] = offsets_of(lengths)
    images = _chosen_images([(part, np.arange(len(part.prompt_tokens))) for part in parts])
    return TrajectoryBuffers(**joined, temperatures=temperatures, **images)


class _HintColumns(TypedDict):
    hint_tokens: np.ndarray | None
    hint_offsets: np.ndarray | None


def _chosen_hints(buffers: TrajectoryBuffers, rows: np.ndarray) -> _HintColumns:
    """Return the hints of rows of buffers."""
    if buffers.hint_tokens is None or buffers.hint_offsets is None:
        return {"hint_tokens": None, "hint_offsets": None}
    tokens, offsets = ragged(buffers.hint_offsets, rows)
    return {"hint_tokens": buffers.hint_tokens[tokens], "hint_offsets": offsets}


def _without_hints(buffers: TrajectoryBuffers) -> TrajectoryBuffers:
    count = len(buffers.prompt_tokens)
    return replace(buffers, hint_tokens=np.empty(0, np.int32), hint_offsets=np.zeros(count + 1, np.int64))


def has_hint(buffers: TrajectoryBuffers) -> np.ndarray:
    """Return True for each trajectory with a hint. Shapes: bool [B]."""
    if buffers.hint_offsets is None:
        return np.zeros(len(buffers.prompt_tokens), bool)
    return np.diff(buffers.hint_offsets) > 0


def after_hints(buffers: TrajectoryBuffers) -> TrajectoryBuffers:
    """Replace the prompts of trajectories by their prompts with hints, if they have one.

    The response tokens and their values stay the same. Experts of prompt tokens and images have no place in the result.
    """
    if buffers.hint_tokens is None or buffers.hint_offsets is None:
        return buffers
    starts, ends = buffers.token_offsets[:-1], buffers.token_offsets[:-1] + buffers.prompt_tokens
    own = np.split(buffers.tokens, np.stack([starts, ends], axis=1).ravel())[1:]
    # own: prompt and response of each trajectory in turn.
    hints = np.split(buffers.hint_tokens, buffers.hint_offsets[1:-1])
    prompts = [hint if len(hint) else prompt for hint, prompt in zip(hints, own[::2], strict=False)]
    tokens, offsets = ragged_tokens([run for pair in zip(prompts, own[1::2], strict=True) for run in pair])
    return replace(
        buffers,
        tokens=tokens,
        token_offsets=offsets[::2],
        prompt_tokens=np.array([len(prompt) for prompt in prompts], np.int32),
        routed_experts=None,
        images=(),
        image_rows=None,
        hint_tokens=None,
        hint_offsets=None,
    )


def hint_arrays(hints: Sequence[np.ndarray | None]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Join prompts with hints to tokens and offsets; (None, None) if none was read."""
    if all(hint is None for hint in hints):
        return None, None
    return ragged_tokens([np.empty(0, np.int32) if hint is None else hint for hint in hints])


def ragged_tokens(runs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Join runs of tokens. Shapes: int32 [sum], offsets int64 [runs + 1]."""
    joined = np.concatenate([*runs, np.empty(0, np.int32)]).astype(np.int32, copy=False)
    return joined, offsets_of([len(run) for run in runs])


class _ImageColumns(TypedDict):
    images: tuple[PromptImages, ...]
    image_rows: np.ndarray | None


def images_of(buffers: TrajectoryBuffers, row: int) -> PromptImages | None:
    """Return the images of a trajectory's prompt."""
    index = -1 if buffers.image_rows is None else int(buffers.image_rows[row])
    return None if index < 0 else buffers.images[index]


def distinct_images(images: Sequence[PromptImages | None]) -> tuple[tuple[PromptImages, ...], np.ndarray | None]:
    """Return the distinct images, and the index of each trajectory's images in them: int32 [B], -1 without images, or
    None if none has any.

    Prompts with equal images at other places are distinct.
    """
    places: dict[tuple[str, bytes], int] = {}
    chosen: list[PromptImages] = []
    rows = np.full(len(images), -1, np.int32)
    for row, found in enumerate(images):
        if found is not None:
            key = found.digest, found.starts.tobytes()
            if key not in places:
                places[key] = len(chosen)
                chosen.append(found)
            rows[row] = places[key]
    return tuple(chosen), rows if chosen else None


def _chosen_images(parts: Sequence[tuple[TrajectoryBuffers, np.ndarray]]) -> _ImageColumns:
    """Return the images of rows of buffers."""
    # Text only: no loop over all trajectories.
    if not any(buffers.images for buffers, _ in parts):
        return {"images": (), "image_rows": None}
    images, image_rows = distinct_images([images_of(buffers, int(row)) for buffers, rows in parts for row in rows])
    return {"images": images, "image_rows": image_rows}


def compact_temperatures(temperatures: np.ndarray) -> np.ndarray | None:
    """Return temperatures in their shortest form (see TrajectoryBuffers).

    NaN is ignored: tokens that were not sampled have no temperature. Shapes: [T] -> [T], or [] if all are equal; None
    if none is known.
    """
    known = temperatures[~np.isnan(temperatures)]
    if not len(known):
        return None
    return known[0].reshape(()) if (known == known[0]).all() else temperatures


def _joined_temperatures(parts: Sequence[TrajectoryBuffers]) -> np.ndarray | None:
    """Concatenate temperatures; buffers without temperatures get NaN if other buffers have some."""
    given = [part.temperatures for part in parts]
    if all(each is None for each in given):
        return None
    scalars = [each for each in given if each is not None and not each.ndim]
    if len(scalars) == len(given) and all(each == scalars[0] for each in scalars):
        return scalars[0]
    columns = [
        np.broadcast_to(np.float32(np.nan) if each is None else each, len(part.logp_rollout))
        for each, part in zip(given, parts, strict=True)
    ]
    return np.concatenate(columns).astype(np.float32, copy=False)


def split_rows(buffers: TrajectoryBuffers, counts: Sequence[int]) -> list[TrajectoryBuffers]:
    """Split buffers into consecutive parts of `counts` trajectories; counts must sum to the number of trajectories."""
    ends = np.cumsum([0, *counts])
    assert ends[-1] == len(buffers.prompt_tokens), f"counts sum to {ends[-1]}, not {len(buffers.prompt_tokens)}"
    return [take_rows(buffers, np.arange(start, end)) for start, end in itertools.pairwise(ends)]


def ragged(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the element indices of the runs `rows` of a ragged array, concatenated, and the new offsets."""
    # Element k of a run moves from offsets[row] + k to new[i] + k: shift each run by the difference of its starts.
    lengths = (offsets[1:] - offsets[:-1])[rows]
    new = offsets_of(lengths)
    return np.arange(new[-1]) + np.repeat(offsets[:-1][rows] - new[:-1], lengths), new


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the start of each of n consecutive runs and the end of the last one: int64 [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
